"""The project's errors. Exit codes: 2 a user's mistake, 1 a failed run, 130/143 interrupted, 75 start again."""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from tasks.system.network import without_secrets

# Characters that a terminal or a page obeys instead of showing them, such as changes of the text direction, and lone
# surrogates, which no stream accepts. Names of files, columns and classes may contain all of them.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


class StratagemError(Exception):
    """A failure that one sentence explains. The message omits passwords and shows unprintable characters as Python
    does, so it is one line, even with odd file names."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(printable(message)))


class UserError(StratagemError):
    """A user's mistake: names the key, the value, what is allowed and what to do."""

    exit_code = 2


class DownloadError(StratagemError):
    """A download broke off; another try may succeed."""


class ProcessDied(StratagemError):
    """A process died while it ran a stage, for example because it ran out of memory; another try may succeed."""


class Interrupted(StratagemError):
    """Ctrl-C (130) or SIGTERM (143) ended the work."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Preempted(Interrupted):
    """A member of a cluster that someone else started must stop; the training continues once all members restart."""

    def __init__(self, message: str) -> None:
        super().__init__(message, os.EX_TEMPFAIL)


class Terminated(KeyboardInterrupt):
    """SIGTERM; it stops a stage in the same way as Ctrl-C."""

    exit_code = 143


def terminate(number: int, frame: object) -> NoReturn:
    """Handle a signal by raising ``Terminated``."""
    raise Terminated


# Errors that travel between processes; a subclass travels as the first of these that it inherits from.
TYPES = (UserError, DownloadError, Interrupted, StratagemError)


def to_json(error: StratagemError) -> dict[str, str]:
    """Return an error as JSON values for another process."""
    return {"error": str(error), "type": next(one.__name__ for one in TYPES if isinstance(error, one))}


def from_json(reply: Mapping[str, str]) -> StratagemError:
    """Return the error of ``to_json``."""
    return {one.__name__: one for one in TYPES}[reply["type"]](reply["error"])


def printable(text: str, keep: str = "") -> str:
    """Return a text with its unprintable characters escaped as in Python, except those in ``keep``, such as
    newlines."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 8, 12, 12
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 120


def cut(text: str, length: int = 200) -> str:
    """Return a text as one line, without its middle if it is too long for a message."""
    text, half = printable(" ".join(text.split())), (length - 3) // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def causes(error: BaseException) -> list[BaseException]:
    """Return an error followed by its chain of causes."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in found):
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of tf.distribute, or of JAX's sums over processes on CPUs, means that another member of
    the cluster died or hangs.

    JAX has no class for it, and raises a ValueError or its general error. No issue known. Red without it:
    test_processes_on_jax.py.
    """
    names = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")
    return type(error).__name__ in names or "Gloo " in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, TensorFlow or JAX means that the machine or a device is out of memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "ResourceExhaustedError"
        or "RESOURCE_EXHAUSTED" in str(error)
    )


def one_line(error: BaseException) -> str:
    """Return an error's type and message as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def last_line(error: BaseException) -> str:
    """Return an error's type and the last line of its message, where TensorFlow and Keras put the cause."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {cut(lines[-1].strip(), 300)}"


def listed(texts: Sequence[str], most: int = 20, between: str = ", ") -> str:
    """Return the first texts, separated by ``between``, and the number of the others."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(map(printable, texts[:most])) + more


def shown(value: object) -> str:
    """Return ``repr(value)``, shortened if it is too long for a message."""
    return cut(_SHORT.repr(value))


def one_of(what: str, value: object, allowed: Iterable[str], see: str | None = None) -> str:
    """Return ``unknown <what> 'value'`` with the nearest match and the allowed values, or with ``see`` in their place.

    >>> one_of("recipe", "mnits", ["cifar10", "mnist"])
    "unknown recipe 'mnits': did you mean 'mnist'? Allowed: cifar10, mnist"
    """
    names = sorted(allowed)
    given = cut(str(value))
    near = get_close_matches(given, names, n=1, cutoff=0.6)
    hint = f": did you mean '{near[0]}'? " if near else ": " if see else ". "
    return f"unknown {what} '{given}'{hint}" + (see or f"Allowed: {listed(names, 100)}")

"""Plain messages for errors of libraries; messages.yaml is the table."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import yaml

from tasks.system import files
from tasks.system.errors import StratagemError, causes, cut, one_line


class KnownMessage(NamedTuple):
    """An entry of the table: a library's error message and its explanation."""

    name: str
    pattern: re.Pattern[str]
    says: str
    """What the message means; it may contain groups of the pattern in braces."""
    do: str


@functools.cache
def entries() -> tuple[KnownMessage, ...]:
    """Return the table; it is read only after an error."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(KnownMessage(name, re.compile(one["is"]), one["says"], one["do"]) for name, one in table.items())


def find_message(error: BaseException) -> tuple[KnownMessage, str] | None:
    """Return the entry for an error or one of its causes, and the message for the user: what the error means, what to
    do, and its type; None without an entry."""
    for cause in causes(error):
        said = one_line(cause)
        for entry in entries():
            if (match := entry.pattern.search(said)) is not None:
                known = {name: cut(text or "such", 120) for name, text in match.groupdict().items()}
                words = f"{entry.says.format(**known)}. To do: {entry.do.format(**known)}"
                return entry, f"{words} ({type(error).__name__}; --debug shows the traceback)"
    return None


def explain(error: BaseException, place: str, before: str = "") -> StratagemError | None:
    """Return one message for a full disk, a file without access rights, or an error of the table; else None.

    Args:
        error: of any library.
        place: the path that cannot be written, if the error does not name it.
        before: precedes the table's explanation.
    """
    if (found := files.find_full_disk(error, place) or files.find_no_access(error)) is not None:
        return found
    known = find_message(error)
    return None if known is None else StratagemError(before + known[1])

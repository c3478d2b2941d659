"""Whose turn it is to move the alias `champion` in an MLflow server's registry: the server has no lock, and sets an
alias whatever it is by then.

Whoever is to move it first says so in a tag of the registered model, and then looks who else has. Who sees another one
takes the word back, and tries again. Of two, the one that looks last sees what the other has said: so there are never
two that see nobody, however long one of them is held up between two requests (the flag principle; Herlihy and Shavit,
The Art of Multiprocessor Programming, 2008).

A process that is killed leaves its tag. The next one on its machine sees that it is dead; others take a tag for
nobody's after ``EXPIRED_SECONDS``. So whoever was held up for long moves nothing any more: see ``Turn.check``.
"""

import contextlib
import json
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import mlflow
import psutil
from mlflow.exceptions import MlflowException

from tasks import runs
from tasks.system.errors import StratagemError
from tasks.tracking.store import is_own_store

TAG = "champion_turn."
WAIT_SECONDS = 30.0
"""For others, of which each has a few requests to make."""
PAUSE_SECONDS = (0.2, 1.0)
MOST_SECONDS = 60.0
"""Between one's own word and the last request. That one may take MLflow's client 246 s, with all its tries."""
EXPIRED_SECONDS = 900.0
"""More than both, by as much as two machines' clocks may differ."""


class Taken(StratagemError):
    """Another process has its turn."""


class Turn:
    """The turn of this process."""

    def __init__(self, since: float | None) -> None:
        self._since = since

    def check(self) -> None:
        """Make sure, right before something is written, that nobody takes this process for dead.

        Raises:
            StratagemError: it was held up for long.
        """
        held_up = 0.0 if self._since is None else time.time() - self._since
        if not 0 <= held_up <= MOST_SECONDS:
            what = f"this process was held up for {held_up:,.0f} s" if held_up > 0 else "the clock was set back"
            raise StratagemError(
                f"{what} right before @champion was to move, so it has not moved, because another process may have "
                "moved it by now: give the same command again"
            )


@contextlib.contextmanager
def taken(client: mlflow.MlflowClient, name: str) -> Iterator[Turn]:
    """Have the turn of a registered model within the block. In the project's own store, where a file is locked all the
    while (``registry.registering``), there is nothing to do.

    Raises:
        Taken: another process has it, or several try to have it.
    """
    if is_own_store():
        yield Turn(None)
        return
    own, end = f"{TAG}{uuid.uuid4().hex}", time.monotonic() + WAIT_SECONDS
    try:
        while True:
            since = time.time()
            word = {"host": socket.gethostname(), "space": runs.process_space(), "pid": os.getpid(), "since": since}
            client.set_registered_model_tag(name, own, json.dumps(word))
            other = _other(client, name, own)
            if other is None:
                break
            client.delete_registered_model_tag(name, own)
            if time.monotonic() > end:
                who = f"process {other.get('pid')} on {other.get('host')}"
                raise Taken(
                    f"{who} is moving @champion of '{name}' at this moment; if it was killed, it is taken for dead "
                    f"{EXPIRED_SECONDS / 60:.0f} minutes after it began"
                )
            time.sleep(random.uniform(*PAUSE_SECONDS))
        yield Turn(since)
    finally:
        with contextlib.suppress(MlflowException):  # It is taken back; or it expires.
            client.delete_registered_model_tag(name, own)


def _other(client: mlflow.MlflowClient, name: str, own: str) -> Mapping[str, Any] | None:
    """Return what another process has said that is at work, None where there is none; the words of dead ones go."""
    for key, text in client.get_registered_model(name).tags.items():
        if not key.startswith(TAG) or key == own:
            continue
        try:
            word = dict(json.loads(text))
            age, pid = time.time() - float(word["since"]), int(word.get("pid", 0))
        except (ValueError, TypeError, KeyError):  # Somebody wrote it by hand.
            continue
        here = word.get("space") not in (None, "") and word["space"] == runs.process_space()
        if age <= EXPIRED_SECONDS and not (here and not psutil.pid_exists(pid)):
            return word
        with contextlib.suppress(MlflowException):  # Another one has done it.
            client.delete_registered_model_tag(name, key)
    return None

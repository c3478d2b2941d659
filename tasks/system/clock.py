"""Times: of now as records have it (ISO 8601, in UTC, to the second), and of what a command's processes do when.

`STRATAGEM_TIMELINE=FILE stratagem run` writes the latter, and `benchmarks.timeline` draws it.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime


def now() -> str:
    """Return the time now."""
    return at(time.time())


def at(seconds: float) -> str:
    """Return the time that is a number of seconds after the beginning of 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


@contextmanager
def span(process: str, what: str) -> Iterator[None]:
    """Write when the block began and ended to the timeline, by the clock that all processes share."""
    began = time.monotonic()
    try:
        yield
    finally:
        write(process, what, began)


def write(process: str, what: str, began: float) -> None:
    """Write what began at a time of ``time.monotonic`` and ends now to the timeline, where one is asked for."""
    if file := os.environ.get("STRATAGEM_TIMELINE"):
        line = json.dumps({"process": process, "what": what, "began": began, "ended": time.monotonic()})
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(line + "\n")

"""What a command's processes do when: `STRATAGEM_TIMELINE=FILE stratagem run`, which `benchmarks.timeline` draws."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def span(process: str, what: str) -> Iterator[None]:
    """Write down when the block began and ended, by the clock that all processes have; do nothing where nobody asks."""
    began = time.monotonic()
    try:
        yield
    finally:
        write(process, what, began)


def write(process: str, what: str, began: float) -> None:
    """Write down what began at a time of ``time.monotonic`` and ends now."""
    if file := os.environ.get("STRATAGEM_TIMELINE"):
        line = json.dumps({"process": process, "what": what, "began": began, "ended": time.monotonic()})
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(line + "\n")

"""Children that end when this process does."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def held_open() -> Iterator[int]:
    """Give a child process a standard input that closes when the block ends or this process dies, however it does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)

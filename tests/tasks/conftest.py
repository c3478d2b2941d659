"""Ctrl-C in the middle of something, and models of the user's own."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def interrupted_when() -> Callable[[Callable[[], object]], contextlib.AbstractContextManager[None]]:
    """Send Ctrl-C to this process when a condition holds: ``with interrupted_when(lambda: path.exists()): ...``."""

    @contextlib.contextmanager
    def interrupted_when(condition: Callable[[], object]) -> Iterator[None]:
        def interrupt() -> None:
            end = time.monotonic() + 300
            while not condition() and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            signal.signal(signal.SIGINT, before)

    return interrupted_when


@pytest.fixture
def own(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """``own(code)`` makes a model of the user's own, and returns its name; this process is as before afterwards."""
    monkeypatch.setattr(sys, "path", sys.path[:])

    def own(code: str) -> str:
        (project / "mine.py").write_text(code)
        return "model.name=mine:build"

    yield own
    sys.modules.pop("mine", None)

"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any


def wait(what: str, happened: Callable[[], Any], timeout_seconds: float = 900) -> Any:
    """Return what ``happened`` returns, once it is true."""
    end = time.monotonic() + timeout_seconds
    while not (result := happened()):
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.05)
    return result

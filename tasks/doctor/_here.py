"""What every check is given, and what it gives."""

import os
from pathlib import Path
from typing import NamedTuple

from tasks.records import Level

GIB = 2**30


class Here(NamedTuple):
    """What is looked at."""

    root: Path
    """The project's folder."""
    with_devices: bool = False
    """Whether TensorFlow is asked for its devices."""


class Found(NamedTuple):
    """What a check finds."""

    level: Level
    text: str
    mend: str | None = None


def prefect_home() -> Path:
    """Return where Prefect keeps its database and its profiles."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def size(num_bytes: float) -> str:
    """Return a number of bytes as a person reads it.

    >>> size(1610612736)
    '1.5 GiB'
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"

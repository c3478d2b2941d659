"""What every check is given, and what it gives."""

import os
from pathlib import Path
from typing import NamedTuple

from tasks.records import Level
from tasks.system import machine

GIB = 2**30


class Here(NamedTuple):
    """What is looked at."""

    root: Path
    """The project's folder."""
    with_devices: bool = False
    """Whether TensorFlow is asked for its devices."""


class Remark(NamedTuple):
    """What a check finds."""

    level: Level
    text: str
    mend: str | None = None


def prefect_home(root: Path) -> Path:
    """Return where Prefect keeps its database and its profiles: in a project's mlruns/ where the home cannot be
    written, as `flows.operate.prefect_server.set_environment` has it."""
    given, usual = os.environ.get("PREFECT_HOME"), os.path.expanduser("~/.prefect")
    if not given and not machine.can_write(usual):
        return root / "mlruns" / "prefect"
    return Path(os.path.expanduser(given or usual))


def size(num_bytes: float) -> str:
    """Return a number of bytes as a person reads it.

    >>> size(1610612736)
    '1.5 GiB'
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"

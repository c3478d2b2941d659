"""Finds what is wrong with this machine or this project: each file in this folder is a check of that name.

Its ``look(here)`` yields findings; it changes nothing and imports no framework. An error inside a check becomes a
finding, too.
"""

import importlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tasks import config
from tasks.records import Finding, Health, Level
from tasks.system import machine
from tasks.system.errors import UserError, one_line, one_of
from tasks.system.network import without_secrets

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
    """Return the folder of Prefect's database and profiles: in mlruns/ if the home cannot be written, as in
    `flows.operate.prefect_server.set_environment`."""
    given, usual = os.environ.get("PREFECT_HOME"), os.path.expanduser("~/.prefect")
    if not given and not machine.can_write(usual):
        return root / "mlruns" / "prefect"
    return Path(os.path.expanduser(given or usual))


def size(num_bytes: float) -> str:
    """Return a number of bytes in readable form.

    >>> size(1610612736)
    '1.5 GiB'
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def examine(names: Collection[str] = (), with_devices: bool = False) -> Health:
    """Return what checks find.

    Args:
        names: of the checks; all if empty.
        with_devices: also ask TensorFlow for its devices, which takes an import of seconds.

    Raises:
        UserError: there is no project here, or no check of a name.
    """
    known = config.names_of("operations/doctor")
    for name in names:
        if name not in known:
            raise UserError(one_of("check", name, known))
    here = Here(config.project_root(), with_devices)
    findings = [finding for name in known if not names or name in names for finding in _look(name, here)]
    return Health(findings=tuple(findings))


def _look(name: str, here: Here) -> Iterator[Finding]:
    try:
        for level, text, mend in importlib.import_module(f"tasks.operations.doctor.{name}").look(here):
            yield Finding(check=name, level=level, text=without_secrets(text), mend=mend and without_secrets(mend))
    except Exception as error:
        text = without_secrets(f"cannot be looked at ({one_line(error)})")
        mend = f"see to what {Path(str(getattr(error, 'filename', None) or here.root))} is"
        yield Finding(check=name, level="error", text=text, mend=mend)

"""The clock of this machine, beside that of the file system: by times of files it is decided what is newer."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.operations.doctor import Here, Remark
from tasks.system import clock

MOST_SECONDS = 2.0


def look(here: Here) -> Iterator[Remark]:
    """Yield how far both clocks are apart, and files that were written in what this clock takes for the future."""
    apart = _seconds_ahead(here.root)
    if apart is not None and abs(apart) > MOST_SECONDS:
        text = f"a file that is written now is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine"
        yield Remark("warning", text, "set both machines' clocks: sudo timedatectl set-ntp true")
    now = time.time()
    ahead = [path for path in _files(here.root) if path.stat().st_mtime > now + MOST_SECONDS]
    if ahead:
        newest = max(ahead, key=lambda path: path.stat().st_mtime)
        when = clock.at(newest.stat().st_mtime)
        text = f"{newest.relative_to(here.root)} is of {when}, and it is {clock.now()}"
        yield Remark("warning", text, f"set the clock (sudo timedatectl set-ntp true), or touch {newest}")
    elif apart is None or abs(apart) <= MOST_SECONDS:
        yield Remark("ok", f"{clock.now()}, and the file system agrees")


def _seconds_ahead(folder: Path) -> float | None:
    """Return how many seconds the file system is ahead; None where a file without a name cannot be made."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except (OSError, AttributeError):
        return None
    try:
        before = time.time()
        os.write(descriptor, b"now")
        return os.fstat(descriptor).st_mtime - before
    finally:
        os.close(descriptor)


def _files(root: Path) -> Iterator[Path]:
    names = ("params.yaml", "pyproject.toml", "requirements.lock", "mlruns/mlflow.db")
    yield from (path for name in names if (path := root / name).exists())
    for pattern in ("recipes/*.yaml", "data/*/dvc.lock", "data/*/params.yaml", "mlruns/runs/*/status.json"):
        yield from root.glob(pattern)

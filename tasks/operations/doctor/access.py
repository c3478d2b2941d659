"""Whether what a run writes to can be written."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from tasks.operations.doctor import Here, Remark, prefect_home


def look(here: Here) -> Iterator[Remark]:
    """Yield the places that cannot be written; nothing is written to find out."""
    wrong = 0
    for place in (here.root, *(here.root / name for name in ("data", "mlruns", ".dvc")), prefect_home(here.root)):
        for found in _look_at(place):
            wrong += 1
            yield found
    mlruns = here.root / "mlruns"
    for path in (mlruns / "mlflow.db", mlruns / ".id", mlruns / "active"):
        if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
            wrong += 1
            yield Remark("error", f"{path} cannot be written", _command_to_get_access(path))
    if not wrong:
        yield Remark("ok", "the project, its data/, mlruns/ and .dvc/, and Prefect's folder can be written")


def _look_at(place: Path) -> Iterator[Remark]:
    if os.path.islink(place) and not os.path.exists(place):
        yield Remark("error", f"{place} is a link to {os.readlink(place)}, which is not there", f"rm {_quoted(place)}")
        return
    there = next(folder for folder in (place, *place.absolute().parents) if os.path.exists(folder))
    if not there.is_dir():
        yield Remark("error", f"{there} is a file, and must be a folder", f"mv {_quoted(there)} {_quoted(there)}.aside")
    elif os.statvfs(there).f_flag & os.ST_RDONLY:
        yield Remark("error", f"{there} lies on a file system that is read-only", "copy the project to another one")
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        yield Remark("error", f"{there} cannot be written", _command_to_get_access(there))


def _command_to_get_access(path: Path) -> str:
    """Return the command that lets this user write to a path: one for their own files, another one for others'."""
    if path.stat().st_uid == os.getuid():
        return f"chmod u+rwX {_quoted(path)}"
    return f"sudo chown -R $(id -un) {_quoted(path)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))

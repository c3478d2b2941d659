"""What killed processes left half-written."""

import contextlib
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from tasks import config
from tasks.runs import catalogue, index
from tasks.runs.locks import is_abandoned, remove_free_locks
from tasks.system import files


def remove_leftovers(mine: str = "") -> list[Path]:
    """Remove what killed processes left half-written in data/ and in the folders of runs, and the records that they
    cached; return what it was.

    Args:
        mine: a key that the caller holds; what was done under it before is over.
    """
    root = config.project_root()
    removed = []
    for lock, pattern in ((".download.lock", ".scratch.*"), (".prepare.lock", ".prepared.*")):
        for path in root.glob(f"data/*/{pattern}"):
            if files.is_inside(path, root):  # Not even a lock is written elsewhere.
                with contextlib.suppress(Timeout), FileLock(path.with_name(lock), blocking=False):
                    removed += files.remove_scratch([path], root)
    for path in root.glob("mlruns/.cache.*"):
        if (path / files.MARK).is_file():
            with contextlib.suppress(Timeout, OSError), FileLock(path / files.MARK, blocking=False):
                removed += files.remove_scratch([path], root)
    for entry in catalogue.query("status = 'RUNNING' OR partial"):
        folder = root / entry.folder
        found = [*folder.glob("checkpoints/.*.partial"), *folder.glob("models/.*.partial*")]
        run = index.load(entry.folder) if found else None
        if run is None or not (run.key == mine or is_abandoned(run)):
            continue
        for path in found:
            if files.is_inside(path, root):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path)
    remove_free_locks()
    return removed

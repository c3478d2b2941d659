"""What killed processes left half-written."""

import contextlib
import logging
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from tasks import config
from tasks.runs import index
from tasks.runs.entries import find_unreadable
from tasks.runs.locks import is_abandoned, remove_free_locks
from tasks.system import files

logger = logging.getLogger(__name__)


def remove_leftovers(mine: str = "") -> list[Path]:
    """Remove what killed processes left half-written in data/ and in the folders of runs, the records that they cached,
    and what they had the input service read; return what it was.

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
    for path in [*root.glob("mlruns/.input.*"), *root.glob("mlruns/.cache.*")]:
        if (path / files.MARK).is_file():
            with contextlib.suppress(Timeout, OSError), FileLock(path / files.MARK, blocking=False):
                removed += files.remove_scratch([path], root)
    for path in [*root.glob("mlruns/runs/*/checkpoints/.*.partial"), *root.glob("mlruns/runs/*/models/.*.partial*")]:
        run = index.load(path.parents[1].relative_to(root).as_posix())
        if run is not None and (run.key == mine or is_abandoned(run)) and files.is_inside(path, root):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path)
    remove_free_locks()
    for why in find_unreadable().values():
        logger.warning("%s", why)
    return removed

"""What killed processes left half-written."""

import contextlib
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from tasks import config, files, records
from tasks.errors import UserError
from tasks.records import Run
from tasks.runs.holds import is_over


def remove_leftovers() -> list[Path]:
    """Remove what killed processes left half-written in data/ and in the folders of runs; return what it was."""
    root = config.project_root()
    removed = []
    for lock, pattern in ((".download.lock", ".scratch.*"), (".prepare.lock", ".prepared.*")):
        for path in root.glob(f"data/*/{pattern}"):
            if files.is_inside(path, root):  # Not even a lock is written elsewhere.
                with contextlib.suppress(Timeout), FileLock(path.with_name(lock), blocking=False):
                    removed += files.remove_scratch([path], root)
    for path in [*root.glob("mlruns/runs/*/checkpoints/.*.partial"), *root.glob("mlruns/runs/*/models/.*.partial*")]:
        with contextlib.suppress(UserError):
            run = records.load(Run, path.parent.parent / "records" / "run.json")
            if is_over(run) and files.is_inside(path, root):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path)
    return removed

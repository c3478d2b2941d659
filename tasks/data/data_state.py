"""Whether any dependency or output of a dataset has changed since DVC last found it up to date, without starting DVC.

A `dvc repro` that has nothing to do takes 1.2 s of CPU time: imports, and a look at each file. DVC trusts the hash of a
file whose inode, size and time of change are the same, and so does this module; if one differs, DVC is asked.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import yaml

from tasks.system import files

TRUSTED_AFTER_SECONDS = 2.0
"""A file that changed more recently is not trusted: a second change within the clock's resolution would not show."""


def is_known(root: Path, name: str) -> bool:
    """Return whether nothing has changed since DVC last found data/<name> up to date."""
    try:
        kept = _record(root, name).read_text(encoding="utf-8")
    except OSError:
        return False
    seen = _look(root, name)
    return seen is not None and kept == seen[0]


@contextmanager
def remembered(root: Path, name: str, trusted_after_seconds: float = TRUSTED_AFTER_SECONDS) -> Iterator[None]:
    """Remember the state of the files if DVC, called inside the block, finds data/<name> up to date."""
    _record(root, name).unlink(missing_ok=True)
    before = _look(root, name)
    yield
    after = _look(root, name)
    if before is None or after is None or before[0] != after[0] or time.time() - after[1] < trusted_after_seconds:
        return
    # If it cannot be written, DVC is asked again next time.
    with contextlib.suppress(OSError), files.replacing(_record(root, name)) as written:
        written.write_text(after[0], encoding="utf-8")


def forget(root: Path, name: str) -> None:
    """Forget the state, so that DVC is asked next time."""
    _record(root, name).unlink(missing_ok=True)


def _record(root: Path, name: str) -> Path:
    return root / ".dvc" / "tmp" / f"stratagem-{name}"


def _look(root: Path, name: str) -> tuple[str, float] | None:
    """Return a sha256 over the state of each dependency and output, and when the last of them changed; None if one is
    missing."""
    folder = root / "data" / name
    try:
        described = yaml.safe_load((folder / "dvc.yaml").read_text(encoding="utf-8"))
        stages = described["stages"].values()
        depended = [path.replace("${dataset.name}", name) for stage in stages for path in stage.get("deps", ())]
        found = [*_states(folder)]
        missing = []
        for path in (*depended, ".dvc/config", ".dvc/config.local", ".dvcignore"):
            if "${" in path:
                return None
            if path.startswith(".dvc") and not (root / path).exists():
                missing.append(path)
            elif not (root / path).resolve().is_relative_to(folder.resolve()):
                found += _states(root / path)
    except (OSError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None
    changed = max((state.st_ctime_ns for _, state in found), default=0) / 1e9
    numbers = ("st_mode", "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    lines = sorted([str(path), *(getattr(state, number) for number in numbers)] for path, state in found)
    text = json.dumps([version("dvc"), missing, lines])
    return hashlib.sha256(text.encode()).hexdigest(), changed


def _states(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the state of a file, or of each file in a folder; for a link also that of its target."""
    if path.is_dir():
        if path.is_symlink():
            raise OSError(f"{path} leads to another folder")  # Or round in a circle.
        for inside in sorted(path.iterdir()):
            if inside.name != "__pycache__":
                yield from _states(inside)
        return
    yield path, path.lstat()
    yield path, path.stat()

"""Whether anything that DVC goes by has changed since it last found a dataset up to date, without starting DVC.

A `dvc repro` that has nothing to do takes 1.2 s of a processor: imports, and a look at each file. It trusts the hash of
a file whose inode, size and time of change are those of before, and so does this; it is asked as soon as one differs.
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
"""What was changed so short before is not trusted: a second change in the same moment of the clock would not show."""


def is_known(root: Path, name: str) -> bool:
    """Return whether all is as it was when DVC last found data/<name> up to date."""
    try:
        kept = _record(root, name).read_text(encoding="utf-8")
    except OSError:
        return False
    seen = _look(root, name)
    return seen is not None and kept == seen[0]


@contextmanager
def remembered(root: Path, name: str, trusted_after_seconds: float = TRUSTED_AFTER_SECONDS) -> Iterator[None]:
    """Remember how all is, if DVC brings data/<name> up to date inside the block and finds nothing to do."""
    _record(root, name).unlink(missing_ok=True)
    before = _look(root, name)
    yield
    after = _look(root, name)
    if before is None or after is None or before[0] != after[0] or time.time() - after[1] < trusted_after_seconds:
        return
    # Unwritten, DVC is asked again next time.
    with contextlib.suppress(OSError), files.replacing(_record(root, name)) as written:
        written.write_text(after[0], encoding="utf-8")


def forget(root: Path, name: str) -> None:
    """Ask DVC the next time."""
    _record(root, name).unlink(missing_ok=True)


def _record(root: Path, name: str) -> Path:
    return root / ".dvc" / "tmp" / f"stratagem-{name}"


def _look(root: Path, name: str) -> tuple[str, float] | None:
    """Return the sha256 of how each file is that DVC goes by, and when the last of them changed; None where one of them
    is not there."""
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
    """Yield the state of a file, or of each in a folder; of a link, also of what it leads to."""
    if path.is_dir():
        if path.is_symlink():
            raise OSError(f"{path} leads to another folder")  # Or round in a circle.
        for inside in sorted(path.iterdir()):
            if inside.name != "__pycache__":
                yield from _states(inside)
        return
    yield path, path.lstat()
    yield path, path.stat()

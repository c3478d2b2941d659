"""What may be removed: only what this program made, and only inside of the project."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# In a scratch folder, it says who made that.
MARK = ".stratagem"


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path is no symlink, and none on its way leads out of a folder."""
    return not path.is_symlink() and path.parent.resolve().is_relative_to(root.resolve())


@contextlib.contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for what is half-written, and remove it when the block ends. A killed process leaves it behind."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as name:
        (Path(name) / MARK).touch()
        yield Path(name)


def remove_scratch(paths: Iterable[Path], root: Path) -> list[Path]:
    """Remove the scratch folders among these, which killed processes left; return them. Others of their name stay."""
    removed = []
    for path in paths:
        if is_inside(path, root) and (path / MARK).is_file():
            shutil.rmtree(path, ignore_errors=True)  # Another process may be doing the same.
            removed.append(path)
    return removed


def set_aside(path: Path, folder: Path, name: str | None = None) -> Path:
    """Move a file or a folder into another folder; return where it now lies.

    ``name`` is its own if not given, with a number after it where something lies there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, number = name or path.name, 1
    target = folder / name
    while target.exists() or target.is_symlink():
        number += 1
        target = folder / f"{name}.{number}"
    path.rename(target)
    return target

"""Saves uncommitted changes in a run's folder, as a text of limited size that only this user can read."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import Run
from tasks.runs.lineage import find_repository
from tasks.system import files

MAX_BYTES = 1_000_000
"""The limit for the whole text, and for each file in it."""
CODE = (".py", ".yaml", ".yml", ".toml", ".lock", ".md", ".sh", ".gitignore")
"""Untracked files are read only with these suffixes: others may be data or keys."""
NOT_SHOWN = "not shown: "
"""The start of a line that replaces the text of a file."""
FILE = "records/uncommitted.diff"
"""The path in a run's folder. The text may contain passwords from the project's files: it is never uploaded."""


def keep_changes(run: Run) -> str | None:
    """Write the differences from the commit into a run's folder, readable only by this user; return the sha256, None
    if nothing differs."""
    root = config.project_root()
    text = changes(root)
    if text is None:
        return None
    with files.replacing(root / run.folder / FILE) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8", newline="")
    return hashlib.sha256(text.encode()).hexdigest()


def changes(folder: Path) -> str | None:
    """Return the differences of a checkout from its commit in the format of ``git diff``; None without differences or
    without a commit.

    A new file is included with its text if its suffix is in ``CODE``. Other new files, files that are too large and
    binary files are only named.
    """
    import pygit2  # Here and not above, as in ``lineage``.

    repository = find_repository(folder)
    if repository is None or repository.head_is_unborn or repository.workdir is None:
        return None
    option = pygit2.enums.DiffOption
    flags = option.INCLUDE_UNTRACKED | option.RECURSE_UNTRACKED_DIRS | option.SHOW_UNTRACKED_CONTENT
    with contextlib.suppress(pygit2.GitError):  # An index that libgit2 cannot read, such as a split or sparse one.
        return "".join(_parts(repository.diff("HEAD", flags=flags), Path(repository.workdir))) or None
    return None


def told_apart(part: str) -> tuple[str, list[str]]:
    """Split a file's part of the text into the lines of the diff and the lines that only name a file."""
    lines = part.splitlines(keepends=True)
    missing = [line for line in lines if line.startswith(NOT_SHOWN)]
    return "".join(line for line in lines if line not in missing), [line.strip() for line in missing]


def _parts(diff: Any, root: Path) -> Iterator[str]:
    """Yield each file's part of a diff, without reading large files."""
    import pygit2

    left = MAX_BYTES
    for number, delta in enumerate(diff.deltas):
        path = root / delta.new_file.path
        size = path.lstat().st_size if os.path.lexists(path) else 0
        is_new = delta.status == pygit2.enums.DeltaStatus.UNTRACKED
        if max(size, delta.old_file.size) > left or (is_new and (path.is_symlink() or not path.name.endswith(CODE))):
            yield f"{NOT_SHOWN}{delta.new_file.path}\n"
        else:
            part = diff[number].data.decode(errors="replace")
            left -= len(part)
            yield part

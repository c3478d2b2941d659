"""Changes that are in no commit, as a text that is kept in a run's folder: this user's alone, and never long."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import Run
from tasks.runs.lineage import find_repository
from tasks.system import files

MAX_BYTES = 200_000
"""Of the whole text; what is longer is cut, and says so."""
CODE = (".py", ".yaml", ".yml", ".toml", ".lock", ".md", ".sh", ".gitignore")
"""Of a new file that git does not know yet, only these are read: others may be data, or keys."""
NEW, LARGE, LINK, CUT = "new, and not shown: ", "changed, and too large to be shown: ", "new, and a link: ", "... cut "
"""How a line begins that stands for what is not there."""
FILE = "records/uncommitted.diff"
"""In a run's folder. It may hold whatever the project's files do, passwords too: it is never uploaded."""


def keep_changes(run: Run) -> str | None:
    """Write what differs from the commit into a run's folder, readable by this user alone; return its sha256. None
    where nothing differs."""
    root = config.project_root()
    text = changes(root)
    if text is None:
        return None
    with files.replacing(root / run.folder / FILE) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8", newline="")
    return hashlib.sha256(text.encode()).hexdigest()


def changes(folder: Path) -> str | None:
    """Return how the files of a checkout differ from its commit, as ``git diff`` writes it; None where they do not, or
    there is no commit.

    A file that is new is there with its text if it may be code, else by its name. Of a binary file only the name is
    there.
    """
    import pygit2  # Here and not above, as in ``lineage``.

    try:
        repository = find_repository(folder)
        if repository is None or repository.head_is_unborn or repository.workdir is None:
            return None
        option = pygit2.enums.DiffOption
        flags = option.INCLUDE_UNTRACKED | option.RECURSE_UNTRACKED_DIRS | option.SHOW_UNTRACKED_CONTENT
        text = "".join(_parts(repository.diff("HEAD", flags=flags), Path(repository.workdir)))
    except pygit2.GitError:
        return None
    return _cut(text) if text else None


def told_apart(part: str) -> tuple[str, list[str]]:
    """Return a file's part of such a text without the lines that stand for what is not there, and those lines."""
    lines = part.splitlines(keepends=True)
    missing = [line for line in lines if line.startswith((NEW, LARGE, LINK, CUT))]
    return "".join(line for line in lines if line not in missing), [line.strip() for line in missing]


def _parts(diff: Any, root: Path) -> Iterator[str]:
    """Yield each file's part of a diff, until there is more than enough. No large file is read."""
    import pygit2

    total = 0
    for number, delta in enumerate(diff.deltas):
        path = delta.new_file.path
        size = (root / path).lstat().st_size if (root / path).exists() else 0
        is_new = delta.status == pygit2.enums.DeltaStatus.UNTRACKED
        if is_new and not (path.endswith(CODE) and size <= MAX_BYTES):
            part = f"{NEW}{path}\n"
        elif is_new and (root / path).is_symlink():
            part = f"{LINK}{path}\n"
        elif max(size, delta.old_file.size) > MAX_BYTES:
            part = f"{LARGE}{path}\n"
        else:
            part = diff[number].data.decode(errors="replace")
        yield part
        total += len(part)
        if total > MAX_BYTES:
            return


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[:MAX_BYTES].decode(errors="ignore") + f"\n{CUT}after {MAX_BYTES:,} bytes\n"

"""Reads the project's git repository: its state, the files of a commit, and what no commit contains, which a run's
folder keeps as a text of limited size that only this user can read."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import config
from tasks.records import Run
from tasks.system import files
from tasks.system.errors import UserError

if TYPE_CHECKING:
    import pygit2

MAX_BYTES = 1_000_000
"""The limit for the whole text, and for each file in it."""
CODE = (".py", ".yaml", ".yml", ".toml", ".lock", ".md", ".sh", ".gitignore")
"""Untracked files are read only with these suffixes: others may be data or keys."""
NOT_SHOWN = "not shown: "
"""The start of a line that replaces the text of a file."""
FILE = "records/uncommitted.diff"
"""The path in a run's folder. The text may contain passwords from the project's files: it is never uploaded."""


def state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the checked-out commit, and whether any file differs from it or is new and not ignored.

    (None, None) outside a git checkout; the commit is None before the first one. What libgit2 cannot read is None.
    """
    import pygit2

    repository = _find_repository(folder)
    commit = dirty = None
    if repository is not None:
        with contextlib.suppress(pygit2.GitError):  # An index that libgit2 cannot read, such as a split or sparse one.
            commit = None if repository.head_is_unborn else str(repository.head.target)
            dirty = bool(repository.status(untracked_files="normal"))
    return commit, dirty


def is_ignored(path: Path, folder: Path) -> bool:
    """Return whether git ignores a path in a folder of a repository; the file need not exist."""
    import pygit2

    try:
        repository = _find_repository(folder)
        return repository is not None and repository.path_is_ignored(os.path.relpath(path, repository.workdir))
    except (pygit2.GitError, ValueError):
        return False


def file_at(commit: str, path: str, folder: Path) -> str | None:
    """Return the text of a file in a commit, None if the commit does not contain it.

    Args:
        commit: any name that git accepts: a hash, a branch, a tag, ``HEAD~1``.
        path: relative to ``folder``.
        folder: a folder of the repository.

    Raises:
        UserError: the commit does not exist, or the folder is in no repository.
    """
    import pygit2

    repository, found = _find_commit(commit, folder)
    if repository is None:
        raise UserError(f"'{commit}': {folder} is not under version control, so it has no commits")
    if found is None:
        raise UserError(f"'{commit}' is not a commit, branch or tag here: `git log --oneline` lists the commits")
    place = (folder / path).resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    if place not in found.tree:
        return None
    blob = found.tree[place]
    return blob.data.decode() if isinstance(blob, pygit2.Blob) else None


def export(commit: str, root: Path, folder: Path) -> None:
    """Write the files of a commit below a folder of the repository into a new folder; the working tree, the index and
    the branches stay unchanged.

    Args:
        commit: its hash.
        root: a folder of the repository.
        folder: the folder to create.

    Raises:
        UserError: the commit does not exist, or does not contain the folder.
    """
    import pygit2

    repository, found = _find_commit(commit, root)
    if repository is None or found is None:
        raise UserError(f"git commit {commit} is not in this repository: fetch it (git fetch --unshallow --all)")
    inside = root.resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    try:
        tree = found.tree if inside == "." else found.tree[inside]
    except KeyError:
        raise UserError(f"git commit {commit} has no folder {inside}, where this project is") from None
    folder.mkdir()
    strategy = pygit2.enums.CheckoutStrategy
    how = strategy.FORCE | strategy.DONT_UPDATE_INDEX | strategy.DISABLE_PATHSPEC_MATCH
    repository.checkout_tree(tree, directory=str(folder), strategy=how)  # type: ignore[no-untyped-call]


def commit_of(name: str, folder: Path) -> str | None:
    """Return the hash of a commit by any name that git accepts: a hash or its first letters, a branch, a tag,
    ``HEAD~1``; None if it does not exist."""
    _, found = _find_commit(name, folder)
    return None if found is None else str(found.id)


def subject(commit: str, folder: Path) -> str | None:
    """Return the first line of a commit's message; None if the commit is not in this repository."""
    _, found = _find_commit(commit, folder)
    return None if found is None else "".join(sign for sign in found.message.partition("\n")[0] if sign.isprintable())


def _find_commit(name: str, folder: Path) -> "tuple[pygit2.Repository | None, pygit2.Commit | None]":
    """Return the repository of a folder and the commit that a name refers to; None for each that does not exist or
    cannot be read."""
    import pygit2

    repository = _find_repository(folder)
    if repository is not None:
        with contextlib.suppress(pygit2.GitError, KeyError, ValueError):
            return repository, repository.revparse_single(name).peel(pygit2.Commit)
    return repository, None


def _find_repository(folder: Path) -> "pygit2.Repository | None":
    # Imported here because it takes 0.1 s, which `stratagem --help` should not wait for.
    import pygit2

    # Reading runs no code of the repository, and in a container another user often owns the checkout.
    pygit2.option(pygit2.enums.Option.SET_OWNER_VALIDATION, False)
    with contextlib.suppress(pygit2.GitError):
        found = pygit2.discover_repository(str(folder))
        return pygit2.Repository(found) if found is not None else None
    return None


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
    import pygit2

    repository = _find_repository(folder)
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

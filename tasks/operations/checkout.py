"""Writes the project of an earlier commit into a separate folder: git's files, a run's uncommitted changes, the data.

It changes nothing in the user's repository: no file, no index, no branch, no entry of `git worktree list`. The folder
has no repository, shares mlruns/ with the project, and links to the prepared data.
"""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

from tasks import config
from tasks.data import prepared_data
from tasks.runs import lineage, uncommitted
from tasks.system.errors import UserError

PART = re.compile(r"^(?=diff --git )", re.MULTILINE)


def write(commit: str, folder: Path) -> None:
    """Write the project's files of a commit into a new folder.

    Raises:
        UserError: the repository has no such commit, or the commit has no project in this folder.
    """
    lineage.export(commit, config.project_root(), folder)
    (folder / ".dvc").mkdir(exist_ok=True)
    mlruns = folder / "mlruns"
    if mlruns.is_symlink():
        mlruns.unlink()
    shutil.rmtree(mlruns, ignore_errors=True)
    mlruns.symlink_to((config.project_root() / "mlruns").resolve(), target_is_directory=True)


def apply(diff: Path, folder: Path) -> list[str]:
    """Apply a run's ``records/uncommitted.diff`` to such a folder.

    Return a line for each change that the diff does not contain or that cannot be applied.
    """
    import pygit2

    text, *parts = PART.split(diff.read_bytes().decode())  # Keeps the line endings.
    left_out = [line for line in text.splitlines() if line]
    pygit2.init_repository(str(folder))
    try:
        repository = pygit2.Repository(str(folder))
        for part in parts:
            part, missing = uncommitted.told_apart(part)
            left_out += missing
            try:
                repository.apply(pygit2.Diff.parse_diff(part), pygit2.enums.ApplyLocation.WORKDIR)
            except (pygit2.GitError, KeyError, ValueError, OSError):
                left_out.append(f"cannot be applied: {part.splitlines()[0].rpartition(' b/')[2]}")
    finally:
        shutil.rmtree(folder / ".git")
    return left_out


def bring_data(name: str, version: str, folder: Path) -> str | None:
    """Link a data version of a dataset into such a folder.

    Return where the data are, such as ``DVC's cache``; None if this machine does not have that version.
    """
    root = config.project_root()
    place, today = folder / "data" / name, root / "data" / name
    if _version(place, "prepared") != version:
        if _version(today, "prepared") != version:
            return None
        _refuse_outside(place, folder)
        place.mkdir(parents=True, exist_ok=True)
        for file in ("params.yaml", "dvc.yaml", "dvc.lock"):
            (place / file).unlink(missing_ok=True)  # In the commit it may be a link to a user's file.
            shutil.copyfile(today / file, place / file)
    _refuse_outside(place, folder)
    found = _bring(place, "prepared", version)
    if found is not None and (raw := _version(place, "raw")) is not None:
        _bring(place, "raw", raw)  # Only streaming needs it, and fails with its own message without it.
    return found


def _refuse_outside(place: Path, folder: Path) -> None:
    """Refuse to write through a link of the commit that points outside the folder."""
    if not place.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"data/{place.name} of that commit is a link that points outside the project: nothing was done")


def _bring(place: Path, part: str, version: str) -> str | None:
    """Link raw/ or prepared/ of a data version to its files in the project or in DVC's cache."""
    root = config.project_root()
    today = root / "data" / place.name
    if _version(today, part) == version and (today / part).is_dir():
        (place / part).symlink_to((today / part).resolve(), target_is_directory=True)
        return f"data/{place.name}"
    listing = prepared_data.md5_by_file(version, root) or {}
    cached = {path: root / prepared_data.LISTINGS / md5[:2] / md5[2:] for path, md5 in listing.items()}
    if not cached or not all(file.is_file() for file in cached.values()):
        return None
    for path, file in cached.items():
        link = place / part / path
        _refuse_outside(link, place)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return "DVC's cache"


def _version(place: Path, part: Any) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError, UserError):
        return lineage.version_in((place / "dvc.lock").read_text(encoding="utf-8"), place.name, part)
    return None

"""Room on the disk: the checkpoints and models of runs that nothing needs any more are removed. Records stay.

A run is marked first. A kill in the middle leaves a run that says that it was pruned, and the next pruning goes on with
it, whatever it was asked for.
"""

import contextlib
import os
import pwd
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tasks import config, records
from tasks.records import ModelVersion, Pruned, PrunedRun, Pruning, Run, RunLine
from tasks.runs.entries import Entry, find_entries, find_entry, kind_of_parent, look_up_parent
from tasks.runs.listing import RunFilter, line_of
from tasks.runs.locks import is_locked, lock, project_id, store_name
from tasks.runs.outcome import PRUNED, is_pruned, status
from tasks.system import clock, files, network
from tasks.system.errors import UserError

PARTS = ("checkpoints", "models")
UNFINISHED = ("failed", "killed", "crashed", None)


@dataclass(frozen=True)
class Selection:
    """Which runs are pruned: those that meet every condition here. At least one of the first three is given."""

    keep_last: int | None = None
    """All but so many of the newest."""
    before: datetime | None = None
    """That ended before then."""
    not_registered: bool = False
    """That no version in MLflow's registry was made of."""
    dataset: str | None = None
    """On it alone; the newest are then counted on it, too."""
    unfinished: bool = False
    """Also those that could be resumed; what a sweep gave up is no such run."""

    def check(self) -> None:
        """Refuse to prune what nobody has chosen.

        Raises:
            UserError: nothing says which runs.
        """
        if self.keep_last is None and self.before is None and not self.not_registered:
            raise UserError(
                "say which runs are to be pruned: --keep-last N, --older-than 30d or --not-registered; --dry-run only "
                "tells what that would remove"
            )


def prune(selection: Selection, ask: Callable[[], list[ModelVersion]], dry_run: bool) -> Pruning:
    """Remove the checkpoints and models of the runs that are chosen, and of those whose pruning was killed.

    Runs of which a version was made, at work, of another user, project or store, and what lies behind a link, are left
    alone.

    Args:
        selection: which.
        ask: returns all versions that there are in MLflow's registry.
        dry_run: remove nothing.

    Raises:
        UserError: nothing says which, or there is no such dataset.
    """
    selection.check()
    # A run that gets a version after the registry was asked has another one then.
    before = {entry.run.folder: entry.model_version for entry in find_entries("runs")}
    needed = _needed(ask())
    pruned: list[PrunedRun] = []
    left: dict[str, str] = {}
    unfinished = 0
    for entry, line, chosen in _chosen(selection, needed):
        run = entry.run
        if not (chosen or is_pruned(run)):
            continue
        if line.status in UNFINISHED and not selection.unfinished and not is_pruned(run) and not _is_given_up(line):
            unfinished += any(map(files.num_bytes, _parts(run)))
            continue
        if not (taken := sum(map(files.num_bytes, _parts(run)))):
            continue
        why = _why_left(run, entry.is_unsent, needed)
        if why is None and not dry_run:
            try:
                _remove(run, taken, before.get(run.folder))
            except (UserError, OSError) as error:
                why = str(error)
        if why is not None:
            left[run.run_id] = why
        else:
            pruned.append(PrunedRun(run_id=run.run_id, began=line.began, dataset=line.dataset, bytes=taken))
    removed = sum(one.bytes for one in pruned)
    in_all = sum(files.num_bytes(config.project_root() / entry.run.folder) for entry in find_entries("runs"))
    return Pruning(
        dry_run=dry_run,
        pruned=tuple(pruned),
        bytes=removed,
        left=left,
        unfinished=unfinished,
        bytes_left=in_all - removed if dry_run else in_all,
    )


def _needed(versions: list[ModelVersion]) -> dict[str, str]:
    """Return which runs a version needs, and which one, with its aliases."""
    named = {
        f"{one.name}/{one.version}": " ".join([f"{one.name}/{one.version}", *(f"@{alias}" for alias in one.aliases)])
        for one in versions
    }
    needed = {one.run_id: named[f"{one.name}/{one.version}"] for one in versions if one.run_id}
    # Where the same model was a version before, that is another run's, and this one says that it is its own.
    for entry in find_entries("runs"):
        if (version := entry.model_version) in named:
            needed.setdefault(entry.run.run_id, named[version])
    return needed


def _chosen(selection: Selection, needed: dict[str, str]) -> Iterator[tuple[Entry, RunLine, bool]]:
    """Yield all runs on the dataset, the newest first, and whether each is chosen, finished or not."""
    known = [(entry, line_of(entry)) for entry in find_entries("runs")]
    choice = RunFilter(dataset=selection.dataset)
    choice.check([line for _, line in known])
    for number, (entry, line) in enumerate((entry, line) for entry, line in known if choice.includes(line)):
        ended = datetime.fromisoformat(line.ended or line.began)
        yield (
            entry,
            line,
            (selection.keep_last is None or number >= selection.keep_last)
            and (selection.before is None or ended < selection.before)
            and not (selection.not_registered and line.run_id in needed)
            and line.status in ("finished", *UNFINISHED),
        )


def _is_given_up(line: RunLine) -> bool:
    """Return whether a run is a trial that its sweep gave up: no sweep that has ended goes on with it."""
    if line.status != "killed" or line.parent_run_id is None or kind_of_parent(line.parent_run_id) != "sweep":
        return False
    parent = look_up_parent(line.parent_run_id)
    ended = status(parent) if parent is not None else None
    return ended is not None and ended.status == "FINISHED"


def _parts(run: Run) -> list[Path]:
    """Return what is removed of a run."""
    return [config.project_root() / run.folder / part for part in PARTS]


def _why_left(run: Run, unsent: bool, needed: dict[str, str]) -> str | None:
    """Return why a run that is chosen is left alone all the same; None where it is not."""
    folder = config.project_root() / run.folder
    if is_locked(run.key):
        return "a process is at work on it"
    if (version := needed.get(run.run_id)) is not None:
        return f"{version} was made of it"
    if not all(files.is_inside(path, config.project_root()) for path in (folder, *_parts(run))):
        return f"{run.folder} is, or has, a link to another folder"
    if (owner := folder.stat().st_uid) != os.geteuid():
        name = str(owner)
        with contextlib.suppress(KeyError):
            name = pwd.getpwuid(owner).pw_name
        return f"it is {name}'s"
    if unsent:
        return "it has more to tell its MLflow store, as its model maybe: `stratagem reconcile`"
    # The first part is the same in a copy of the whole project, whose registry is a copy, too.
    if run.project.partition(".")[0] != project_id().partition(".")[0]:
        return "it is of another project, whose registry is not asked here"
    if network.without_userinfo(run.store) != store_name():
        store = run.store or "the project's own store"
        return f"its MLflow is {store}, which is not asked: set or unset MLFLOW_TRACKING_URI"
    return None


def _remove(run: Run, num_bytes: int, version: str | None) -> None:
    """Remove the checkpoints and models of a run that nobody is at work on, and whose version is still this one.

    Raises:
        UserError: somebody is, or it is another one.
        OSError: it cannot be written.
    """
    with lock(run.key or run.run_id, f"run {run.run_id}"):
        entry = find_entry(run)
        if entry is None or entry.run != run:
            raise UserError("it was resumed just now")
        if entry.model_version != version:
            raise UserError("it was registered just now")
        if not is_pruned(run):
            records.save(Pruned(at=clock.now(), num_bytes=num_bytes), config.project_root() / run.folder / PRUNED)
        for path in _parts(run):
            if path.exists():
                shutil.rmtree(path)

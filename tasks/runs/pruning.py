"""Frees disk space: removes the checkpoints and models of runs that are no longer needed, and keeps their records.

Each run is marked first. If the process is killed, the run is already marked as pruned, and the next pruning completes
it, whatever its selection.
"""

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tasks import config, records
from tasks.records import ModelVersion, Pruned, Pruning, Run, RunLine
from tasks.runs import outcome
from tasks.runs.entries import find_runs, is_uncopied, kind_of_parent, load, look_up
from tasks.runs.listing import RunFilter, line_of, version_of
from tasks.runs.locks import is_locked, lock, project_id, store_name
from tasks.runs.outcome import is_pruned, status
from tasks.system import files, network
from tasks.system.errors import UserError

PARTS = ("checkpoints", "models")
UNFINISHED = ("failed", "killed")


@dataclass(frozen=True)
class Selection:
    """Selects the runs that meet every condition. At least one of the first three is required."""

    keep_last: int | None = None
    """All except this number of newest runs."""
    before: datetime | None = None
    """Only runs that ended before this time."""
    not_registered: bool = False
    """Only runs whose model has no version in MLflow's registry."""
    dataset: str | None = None
    """Only runs on this dataset; ``keep_last`` then counts only these."""
    unfinished: bool = False
    """Also runs that could be resumed; trials that a sweep stopped early do not need this option."""

    def check(self) -> None:
        """Refuse a selection without a condition.

        Raises:
            UserError: none of the first three conditions is given.
        """
        if self.keep_last is None and self.before is None and not self.not_registered:
            raise UserError(
                "choose the runs to prune: --keep-last N, --older-than 30d or --not-registered; --dry-run only shows "
                "what would be removed"
            )

    def chooses(self, number: int, line: RunLine, needed: Collection[str]) -> bool:
        """Return whether a run is selected, finished or not.

        Args:
            number: its position among the runs on the dataset; 0 is the newest.
            line: the run.
            needed: the ids of the runs whose model is a registered version.
        """
        ended = datetime.fromisoformat(line.ended or line.began)
        return (
            (self.keep_last is None or number >= self.keep_last)
            and (self.before is None or ended < self.before)
            and not (self.not_registered and line.run_id in needed)
            and line.status in ("finished", *UNFINISHED)
        )


def prune(selection: Selection, ask: Callable[[], list[ModelVersion]], dry_run: bool) -> Pruning:
    """Remove the checkpoints and models of the selected runs, and of runs whose pruning was killed.

    Skips runs with a registered version, running runs, runs of another project or store, and folders behind a link.

    Args:
        selection: selects the runs.
        ask: returns all versions in MLflow's registry.
        dry_run: remove nothing.

    Raises:
        UserError: the selection has no condition, or the dataset does not exist.
    """
    selection.check()
    # Read the runs before asking the registry, so that `_remove` notices a run that is registered in between.
    known = [(run, line_of(run)) for run in find_runs("runs")]
    needed = _needed(ask(), known)
    pruned: list[RunLine] = []
    left: dict[str, str] = {}
    unfinished = 0
    choice = RunFilter(dataset=selection.dataset)
    choice.check([line for _, line in known])
    for number, (run, line) in enumerate((run, line) for run, line in known if choice.includes(line)):
        if not (is_pruned(run) or selection.chooses(number, line, needed)):
            continue
        if line.status in UNFINISHED and not (selection.unfinished or is_pruned(run) or _is_given_up(line)):
            unfinished += any(map(files.num_bytes, _parts(run)))
            continue
        if not (taken := sum(map(files.num_bytes, _parts(run)))):
            continue
        why = _why_left(run, needed)
        if why is None and not dry_run:
            try:
                _remove(run, line.model_version, taken)
            except (UserError, OSError) as error:
                why = str(error)
        if why is not None:
            left[run.run_id] = why
        else:
            pruned.append(line.model_copy(update={"bytes": taken}))
    removed = sum(one.bytes for one in pruned)
    in_all = sum(files.num_bytes(config.project_root() / run.folder) for run, _ in known)
    return Pruning(
        dry_run=dry_run,
        pruned=tuple(pruned),
        bytes=removed,
        left=left,
        unfinished=unfinished,
        bytes_left=in_all - removed if dry_run else in_all,
    )


def _needed(versions: list[ModelVersion], known: list[tuple[Run, RunLine]]) -> dict[str, str]:
    """Return the runs that a version needs, by id, with the version and its aliases."""
    named = {
        f"{one.name}/{one.version}": " ".join([f"{one.name}/{one.version}", *(f"@{alias}" for alias in one.aliases)])
        for one in versions
    }
    needed = {one.run_id: named[f"{one.name}/{one.version}"] for one in versions if one.run_id}
    # If another run had registered the same model before, only this run's record names that version.
    for _, line in known:
        if line.model_version in named:
            needed.setdefault(line.run_id, named[line.model_version])
    return needed


def _is_given_up(line: RunLine) -> bool:
    """Return whether a run is a trial that its sweep stopped early; a finished sweep never continues it."""
    if line.status != "killed" or line.parent_run_id is None or kind_of_parent(line.parent_run_id) != "sweep":
        return False
    parent = look_up(line.parent_run_id)
    return parent is not None and status(parent).status == "FINISHED"


def _parts(run: Run) -> list[Path]:
    return [config.project_root() / run.folder / part for part in PARTS]


def _why_left(run: Run, needed: dict[str, str]) -> str | None:
    folder = config.project_root() / run.folder
    if is_locked(run.key):
        return "a process is using it"
    if (version := needed.get(run.run_id)) is not None:
        return f"it is the source of {version}"
    if not all(files.is_inside(path, config.project_root()) for path in (folder, *_parts(run))):
        return f"{run.folder} is or contains a link to another folder"
    if is_uncopied(run):
        return "the MLflow server may lack a part of it, such as its model: `stratagem reconcile` copies it"
    # The first part is the same in a copy of the whole project, whose registry is a copy, too.
    if run.project.partition(".")[0] != project_id().partition(".")[0]:
        return "it belongs to another project, with another registry"
    if network.without_userinfo(run.store) != store_name():
        store = run.store or "the project's own store"
        return f"its MLflow store is {store}: set or unset MLFLOW_TRACKING_URI to use that store"
    return None


def _remove(run: Run, version: str | None, num_bytes: int) -> None:
    """Remove the checkpoints and models of a run that is neither running nor changed since it was read."""
    with lock(run.key or run.run_id, f"run {run.run_id}"):
        if load(run.folder) != run or version_of(run) != version:
            raise UserError("it was just resumed or registered")
        if not is_pruned(run):
            outcome.save(run, Pruned(at=records.now(), num_bytes=num_bytes))
        for path in _parts(run):
            if path.exists():
                shutil.rmtree(path)

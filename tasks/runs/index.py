"""The runs in mlruns/: all of them, and the one that a command means or resumes."""

import contextlib
import re

from tasks import config, records
from tasks.records import Run
from tasks.runs.entries import PLACES, find_entries
from tasks.runs.outcome import is_pruned, nonfinite_steps, status
from tasks.system import errors
from tasks.system.errors import UserError

# As MLflow and ``uuid4().hex`` write it.
ID = re.compile("[0-9a-f]{32}")
PREFIX = re.compile("[0-9a-f]{1,32}")


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a run, and not a path or anything else."""
    return ID.fullmatch(text) is not None


def find(run_id: str) -> Run:
    """Return a run by its id.

    Raises:
        UserError: there is none. What is no id, such as a path, names none either.
    """
    path = config.project_root() / "mlruns" / "runs" / run_id / "records" / "run.json"
    if not is_id(run_id) or not path.exists():
        known = [entry.run.run_id for entry in find_entries("runs")]
        see = f"the newest runs: {', '.join(known[:5])}" if known else "there is none yet"
        raise UserError(errors.one_of("run", run_id, known, see))
    return records.load(Run, path)


def resolve(name: str) -> Run:
    """Return the run that a person names: by its id, the first letters of it that no other run has, or ``latest``.

    Raises:
        UserError: there is none, or there are several.
    """
    if name == "latest":
        return newest(None)
    if PREFIX.fullmatch(name):
        found = [entry.run.run_id for entry in find_entries("runs") if entry.run.run_id.startswith(name)]
        if len(found) > 1:
            raise UserError(
                f"run '{name}': {len(found):,} runs begin so: {errors.listed(sorted(found), 5)}. Give more of it"
            )
        name = found[0] if found else name
    return find(name)


def find_named(settings: config.Settings, resume: str | None) -> Run | None:
    """Return the run that is to be resumed: by its id, or the ``latest`` on the settings' dataset; None for None.

    Raises:
        UserError: there is none.
    """
    if resume is None:
        return None
    return newest(settings.dataset.name) if resume == "latest" else resolve(resume)


def newest(dataset: str | None) -> Run:
    """Return the run on a dataset, or on any, that was started or resumed last.

    Raises:
        UserError: there is none.
    """
    for entry in find_entries("runs"):
        if dataset in (None, entry.dataset):
            return entry.run
    on = "" if dataset is None else f" on {dataset}"
    raise UserError(f"there is no run{on} in mlruns/: train one first, or name a run with --run")


def find_unfinished(settings: config.Settings, wanted: records.Lineage) -> Run | None:
    """Return the newest run with these settings, data and code if it is unfinished, else None.

    The caller holds the key of the settings, so none of them is at work. A run of a comparison is left to it; one whose
    loss was not a number would come to the same end again.
    """
    found = [entry.run for entry in find_entries("runs") if entry.run.parent_run_id is None]
    same = ("data_version", "settings_digest", "code_digest")
    alike = (run for run in found if all(getattr(run.lineage, name) == getattr(wanted, name) for name in same))
    run = next(alike, None)
    ended = status(run) if run is not None else None
    if run is None or ended is None or ended.status == "FINISHED" or is_pruned(run):
        return None
    allowed = settings.train.max_rollbacks if settings.train.on_nonfinite == "rollback" else 0
    return None if len(nonfinite_steps(run)) > allowed else run


def load(folder: str) -> Run | None:
    """Return the run of a folder, None where that cannot be read."""
    with contextlib.suppress(UserError):
        return records.load(Run, config.project_root() / folder / "records" / "run.json")
    return None


def look_up(run_id: str) -> Run | None:
    """Return a run, a comparison or a sweep by its id, None where there is none; what is no id names none."""
    if not is_id(run_id):
        return None
    return load(f"mlruns/runs/{run_id}") or look_up_parent(run_id)


def look_up_parent(run_id: str) -> Run | None:
    """Return the comparison or the sweep of an id, None where there is none."""
    return next((found for place in PLACES[1:] if (found := load(f"mlruns/{place}/{run_id}")) is not None), None)


def kind_of_parent(run_id: str) -> str:
    """Return what a run's parent is called: ``comparison`` or ``sweep``."""
    return "sweep" if (config.project_root() / "mlruns" / "sweeps" / run_id).is_dir() else "comparison"


def children(run_id: str) -> list[Run]:
    """Return the runs of a comparison or a sweep, the newest first."""
    return [entry.run for entry in find_entries("runs") if entry.run.parent_run_id == run_id]


def sweeps() -> list[Run]:
    """Return the sweeps that can be read, the newest first."""
    return [entry.run for entry in find_entries("sweeps")]


def find_not_final() -> list[Run]:
    """Return the runs, comparisons and sweeps that say that they are at work, or have something to tell MLflow."""
    return [entry.run for entry in find_entries(*PLACES) if entry.is_running or entry.is_unsent]


def next_number() -> int:
    """Return the number of the run that is started or resumed now."""
    return 1 + max((entry.run.number for entry in find_entries(*PLACES)), default=0)


def finished() -> list[str]:
    """Return the ids of the runs that have finished."""
    return [path.parent.name for path in (config.project_root() / "mlruns" / "runs").glob("*/summary.json")]


def undelivered() -> list[str]:
    """Return the ids of runs that have something to tell MLflow."""
    return [entry.run.run_id for entry in find_entries(*PLACES) if entry.is_unsent]

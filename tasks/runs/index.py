"""The runs in mlruns/: all that were begun, and the one that a command means or takes up."""

import contextlib
import re

from tasks import config, errors, records
from tasks.errors import UserError
from tasks.records import Run
from tasks.runs.outcome import nonfinite_steps, status

# As MLflow and ``uuid4().hex`` write it.
ID = re.compile("[0-9a-f]{32}")


def find(run_id: str) -> Run:
    """Return a run by its id.

    Raises:
        UserError: there is none. What is no id, such as a path, names none either.
    """
    path = config.project_root() / "mlruns" / "runs" / run_id / "records" / "run.json"
    if not ID.fullmatch(run_id) or not path.exists():
        known = [run.run_id for run in begun()]
        see = f"the newest runs: {', '.join(known[:5])}" if known else "there is none yet"
        raise UserError(errors.one_of("run", run_id, known, see))
    return records.load(Run, path)


def find_named(settings: config.Settings, resume: str | None) -> Run | None:
    """Return the run that is to be resumed: by its id, or the ``latest`` on the settings' dataset; None for None.

    Raises:
        UserError: there is none.
    """
    if resume is None:
        return None
    return newest(settings.dataset.name) if resume == "latest" else find(resume)


def newest(dataset: str) -> Run:
    """Return the run on a dataset that began last.

    Raises:
        UserError: there is none.
    """
    for run in begun():
        if run.settings["dataset"]["name"] == dataset:
            return run
    raise UserError(f"no run on {dataset} has begun in mlruns/: train one first, or name a run with --run")


def find_unfinished(settings: config.Settings, wanted: records.Lineage) -> Run | None:
    """Return the newest run with these settings, data and code that did not come to its end, or None.

    The caller holds the key of the settings, so none of them is at work. A run of a comparison is left to it; one whose
    loss was not a number would come to the same end again.
    """
    for run in begun():
        same = (run.lineage.data_version, run.lineage.settings_digest, run.lineage.code_digest) == (
            wanted.data_version,
            wanted.settings_digest,
            wanted.code_digest,
        )
        if same and run.parent_run_id is None:
            ended = status(run)
            if ended is None or ended.status == "FINISHED":
                return None
            allowed = settings.train.max_rollbacks if settings.train.on_nonfinite == "rollback" else 0
            return None if len(nonfinite_steps(run)) > allowed else run
    return None


def begun() -> list[Run]:
    """Return all runs that were begun, the newest first."""
    found = []
    for path in config.project_root().glob("mlruns/runs/*/records/run.json"):
        with contextlib.suppress(UserError):  # Killed while it was written.
            run = records.load(Run, path)
            found.append((run.number, path.stat().st_mtime_ns, run))
    return [run for *_, run in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def next_number() -> int:
    """Return the number of the run that begins or is taken up now."""
    return 1 + max((run.number for run in begun()), default=0)


def finished() -> list[str]:
    """Return the ids of the runs that have finished."""
    return [path.parent.name for path in config.project_root().glob("mlruns/runs/*/summary.json")]


def undelivered() -> list[str]:
    """Return the ids of runs that have something to tell MLflow."""
    return [path.parent.name for path in config.project_root().glob("mlruns/*/*/unsent.jsonl")]

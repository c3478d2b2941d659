"""The records in a run's folder: its status and the results of its stages; and the final states of flow runs whose
Prefect server had died."""

from collections.abc import Iterator
from pathlib import Path

from tasks import config, records
from tasks.records import (
    ComparisonProgress,
    EvaluationResult,
    FlowEnd,
    Limits,
    NonFinite,
    Pruned,
    R,
    RegisteredModel,
    Reproduction,
    Run,
    RunStatus,
    RunSummary,
    SweepPlan,
    TrainingResult,
)
from tasks.system.errors import UserError

RESULTS: tuple[type[records.Record], ...] = (TrainingResult, EvaluationResult, RegisteredModel)
"""The results of the stages, in the order of the stages."""
FILES: dict[type[records.Record], str] = {
    Run: "records/run.json",
    RunStatus: "status.json",
    TrainingResult: "records/training.json",
    EvaluationResult: "records/evaluation.json",
    RegisteredModel: "records/registration.json",
    RunSummary: "summary.json",
    Reproduction: "records/reproduction.json",
    ComparisonProgress: "records/progress.json",
    SweepPlan: "records/plan.json",
    Limits: "records/limits.json",
    NonFinite: "records/nonfinite.json",
    Pruned: "records/pruned.json",
}
"""Each record's file in the folder of its run."""
UNREPORTED = "mlruns/unreported"


def file_of(run: Run, record_type: type[records.Record]) -> Path:
    """Return the path of a record of a run."""
    return Path(f"{config.project_root()}/{run.folder}/{FILES[record_type]}")


def save(run: Run, record: records.Record) -> Path:
    """Save a record of a run; return its path."""
    return records.save(record, file_of(run, type(record)))


def load(run: Run, record_type: type[R]) -> R | None:
    """Return a record of a run, None if it does not exist.

    Raises:
        UserError: it cannot be read.
    """
    path = file_of(run, record_type)
    return records.load(record_type, path) if path.exists() else None


def load_readable(run: Run, record_type: type[R]) -> R | None:
    """Return a record of a run, None if it does not exist or cannot be read."""
    return records.load_or_none(record_type, file_of(run, record_type))


def set_status(run: Run, status: str, reason: str | None = None) -> None:
    """Save the status of a run."""
    save(run, RunStatus.model_validate({"status": status, "reason": reason, "at": records.now()}))


def status(run: Run) -> RunStatus:
    """Return the status of a run.

    A missing or unreadable status counts as RUNNING: if no process holds the run, it then becomes KILLED.
    """
    try:
        return load(run, RunStatus) or RunStatus(status="RUNNING", reason=None, at="")
    except UserError as error:
        return RunStatus(status="RUNNING", reason=str(error), at="")


def is_running(run: Run) -> bool:
    """Return whether the status of a run is RUNNING."""
    return status(run).status == "RUNNING"


def is_pruned(run: Run) -> bool:
    """Return whether a run's checkpoints and models were removed."""
    return file_of(run, Pruned).exists()


def refuse_pruned(run: Run) -> None:
    """Refuse a run whose checkpoints and models were removed.

    Raises:
        UserError: the run was pruned; names the date.
    """
    if (pruned := load(run, Pruned)) is not None:
        raise UserError(
            f"run {run.run_id} was pruned on {pruned.at[:10]} (`stratagem runs prune`): its checkpoints and models are "
            "gone, its records, metrics and pictures are kept. Name another run (`stratagem runs`), or train it again "
            "with `stratagem run` and its settings (`stratagem runs show`)"
        )


def load_training(run: Run) -> TrainingResult:
    """Return the training result of a run.

    Raises:
        UserError: the training has not finished.
    """
    if (found := load(run, TrainingResult)) is None:
        raise UserError(
            f"run {run.run_id} did not finish its training: resume it with `stratagem train --resume {run.run_id}`"
        )
    return found


def load_evaluation(run: Run) -> EvaluationResult:
    """Return the evaluation result of a run.

    Raises:
        UserError: it was not evaluated.
    """
    if (found := load(run, EvaluationResult)) is None:
        raise UserError(f"run {run.run_id} was not evaluated: `stratagem evaluate {run.run_id}`")
    return found


def forget_results(run: Run, *types: type[records.Record]) -> None:
    """Remove the results of some stages of a run, or of all, so that they run again; its checkpoints stay."""
    for one in types or RESULTS:
        file_of(run, one).unlink(missing_ok=True)
    file_of(run, RunSummary).unlink(missing_ok=True)


def nonfinite_steps(run: Run) -> tuple[int, ...]:
    """Return the steps at which the loss of a run was not finite; empty if the record cannot be read."""
    found = load_readable(run, NonFinite)
    return found.steps if found is not None else ()


def keep_unreported(end: FlowEnd) -> None:
    """Save the final state of a flow run until its server has it."""
    records.save(end, config.project_root() / UNREPORTED / f"{end.flow_run_id}.json")


def unreported() -> Iterator[tuple[Path, FlowEnd]]:
    """Yield each saved final state with its file, which the caller removes after reporting it to the server."""
    for path in sorted((config.project_root() / UNREPORTED).glob("*.json")):
        if (end := records.load_or_none(FlowEnd, path)) is not None:
            yield path, end

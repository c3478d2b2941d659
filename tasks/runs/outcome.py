"""How a run stands: that it is at work or how it ended, and what its stages left; and how flow runs ended whose Prefect
server had died, so that it could not be told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tasks import config, records
from tasks.records import (
    EvaluationResult,
    FlowEnd,
    Limits,
    NonFinite,
    Pruned,
    R,
    RegisteredModel,
    Run,
    RunStatus,
    TrainingResult,
)
from tasks.system import clock
from tasks.system.errors import UserError

# The records that stages leave, in the order in which they are made.
RESULTS: dict[type[records.Record], str] = {
    TrainingResult: "records/training.json",
    EvaluationResult: "records/evaluation.json",
    RegisteredModel: "records/registration.json",
}
PRUNED = "records/pruned.json"
LIMITS = "records/limits.json"
NONFINITE = "records/nonfinite.json"


def set_status(run: Run, status: str, reason: str | None = None) -> None:
    """Write down that a run is at work, or how it ended."""
    now = clock.now()
    record = RunStatus.model_validate({"status": status, "reason": reason, "at": now})
    records.save(record, config.project_root() / run.folder / "status.json")


def status(run: Run) -> RunStatus | None:
    """Return how a run ended, or that it is at work; None for one that has nothing of it.

    One that cannot be read counts as at work: with no process that holds the run, it is ended as killed, and readable.
    """
    try:
        return load_record(run, "status.json", RunStatus)
    except UserError as error:
        return RunStatus(status="RUNNING", reason=str(error), at="")


def load_record(run: Run, file: str, record_type: type[R]) -> R | None:
    """Return a record in a run's folder, None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    path = config.project_root() / run.folder / file
    return records.load(record_type, path) if path.exists() else None


def load_result(run: Run, record_type: type[R]) -> R | None:
    """Return the record of a stage of a run, None where that stage did not come to its end."""
    return load_record(run, RESULTS[record_type], record_type)


def save_result(run: Run, result: records.Record) -> Path:
    """Keep the record of a stage of a run; return its file."""
    return records.save(result, config.project_root() / run.folder / RESULTS[type(result)])


def is_pruned(run: Run) -> bool:
    """Return whether a run's checkpoints and models were removed."""
    return (config.project_root() / run.folder / PRUNED).exists()


def refuse_pruned(run: Run) -> None:
    """Refuse a run whose checkpoints and models were removed.

    Raises:
        UserError: says so, and when that was.
    """
    if is_pruned(run):
        when = records.load(Pruned, config.project_root() / run.folder / PRUNED).at[:10]
        raise UserError(
            f"run {run.run_id} was pruned on {when} (`stratagem runs prune`): its checkpoints and models are gone, its "
            "records, metrics and pictures are kept. Name another run (`stratagem runs`), or train it again with "
            "`stratagem run` and its settings (`stratagem runs show`)"
        )


def load_training(run: Run) -> TrainingResult:
    """Return what the training of a run left.

    Raises:
        UserError: it was not trained to its end.
    """
    if (found := load_result(run, TrainingResult)) is None:
        raise UserError(
            f"run {run.run_id} was not trained to its end: resume it with `stratagem train --resume {run.run_id}`"
        )
    return found


def load_evaluation(run: Run) -> EvaluationResult:
    """Return the evaluation of a run.

    Raises:
        UserError: it was not evaluated.
    """
    if (found := load_result(run, EvaluationResult)) is None:
        raise UserError(f"run {run.run_id} was not evaluated: `stratagem evaluate --run {run.run_id}`")
    return found


def forget_results(run: Run, *types: type[records.Record]) -> None:
    """Remove what some stages of a run left, or all, because they are to be done again; its checkpoints stay."""
    folder = config.project_root() / run.folder
    for file in ("summary.json", *(RESULTS[one] for one in types or RESULTS)):
        (folder / file).unlink(missing_ok=True)


def nonfinite_steps(run: Run) -> tuple[int, ...]:
    """Return the steps at which the loss of a run was not a finite number; none where that cannot be read."""
    with contextlib.suppress(UserError):
        found = load_record(run, NONFINITE, NonFinite)
        return found.steps if found is not None else ()
    return ()


def mark_nonfinite(run: Run, step: int) -> None:
    """Mark a run whose loss was not a finite number."""
    steps = (*nonfinite_steps(run), step)
    records.save(NonFinite(steps=steps), config.project_root() / run.folder / NONFINITE)


def save_limits(run: Run, limits: Limits) -> None:
    """Keep what a trial of a sweep must reach, before it is trained: however often it is resumed, these are its."""
    records.save(limits, config.project_root() / run.folder / LIMITS)


def load_limits(run: Run) -> Limits | None:
    """Return what a trial of a sweep must reach, None of any other run."""
    return load_record(run, LIMITS, Limits)


def keep_unreported(end: FlowEnd) -> None:
    """Keep how a flow run ended until its server has it."""
    folder = _unreported_folder()
    folder.mkdir(parents=True, exist_ok=True)
    records.save(end, folder / f"{end.flow_run_id}.json")


def unreported() -> Iterator[tuple[Path, FlowEnd]]:
    """Yield what is kept, with its file, which whoever has told the server removes."""
    for path in sorted(_unreported_folder().glob("*.json")):
        try:
            yield path, records.load(FlowEnd, path)
        except UserError:  # Half of a file, or somebody else's: nothing that could be told.
            continue


def _unreported_folder() -> Path:
    return config.project_root() / "mlruns" / "unreported"

"""Compares a run with the current settings: what differs, and which differences prevent a resume. Also finds the
unfinished comparison to continue."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from tasks import config, records
from tasks.records import (
    Changed,
    ComparisonProgress,
    ComparisonRow,
    EvaluationResult,
    PreparedDataset,
    RegisteredModel,
    Run,
    TrainingResult,
)
from tasks.runs import outcome
from tasks.runs.entries import find_runs, look_up, newest
from tasks.runs.locks import is_abandoned
from tasks.runs.outcome import forget_results, nonfinite_steps, refuse_pruned, status
from tasks.system import machine
from tasks.system.errors import UserError, listed, shown


class Difference(NamedTuple):
    """A setting with a different value in a run."""

    key: str
    before: Any
    now: Any
    mark: config.Affects

    def __str__(self) -> str:
        return f"{self.key} was {shown(self.before)} and is now {shown(self.now)}"


def differences(run: Run, settings: config.Settings) -> list[Difference]:
    """Return the settings with different values in a run, without keys that only one kind of a section has."""
    marks = config.marks_of(config.Settings)
    before = dict(config.leaves(run.settings, whole=marks))
    now = dict(config.leaves(settings.to_json(), whole=marks))
    return [
        Difference(key, before[key], now[key], marks[key])
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    ]


def refuse_other_training(
    settings: config.Settings, run: Run, allow_changes: bool = False, prepared: PreparedDataset | None = None
) -> None:
    """Refuse to resume a run with settings or data that would make it a different training.

    Args:
        settings: the new settings.
        run: the run to resume.
        allow_changes: refuse only another dataset.
        prepared: the data, if they are already prepared.

    Raises:
        UserError: names each difference; or the run was pruned.
    """
    refuse_pruned(run)
    dataset = run.dataset
    if dataset != settings.dataset.name:
        raise UserError(
            f"run {run.run_id} cannot be resumed: it was trained on dataset.name = '{dataset}', but "
            f"'{settings.dataset.name}' needs another run, even with --allow-changes. Use --set "
            f"dataset.name={dataset}, or --set model.initial={run.run_id} instead of --resume, which starts a new run "
            "with its weights"
        )
    if allow_changes:
        return
    changed = [str(one) for one in differences(run, settings) if not one.mark.free_on_resume]
    if prepared is not None and prepared.data_version != run.lineage.data_version:
        changed.append(f"data version was {run.lineage.data_version!r} and is now {prepared.data_version!r}")
    changed += _other_batch_size(settings.train, run)
    if changed:
        raise UserError(
            f"run {run.run_id} cannot be resumed with other values: {'; '.join(changed)}. "
            "Use the settings that it was started with, start a new run, or pass --allow-changes"
        )


def other_result(run: Run, settings: config.Settings, wanted: records.Lineage) -> list[str]:
    """Return why a run's result differs from that of a new one: settings that affect the result, data and code."""
    found = [str(one) for one in differences(run, settings) if one.mark.what == "result"]
    if run.lineage.data_version != wanted.data_version:
        found.append(f"its data version was {run.lineage.data_version} and is now {wanted.data_version}")
    if run.lineage.code_digest != wanted.code_digest:
        found.append(
            "the code of flows/, tasks/ or its model, requirements.lock or the file of model.initial has changed"
        )
    return found


def why_not_resumed(settings: config.Settings, wanted: records.Lineage) -> str | None:
    """Return which unfinished run is not resumed, why, and what to do about it.

    Only the newest run on the dataset counts, and only if it is not running; otherwise None.
    """
    try:
        run = newest(settings.dataset.name)
    except UserError:
        return None
    if status(run).status == "FINISHED" or run.parent_run_id is not None or not is_abandoned(run):
        return None
    why = other_result(run, settings, wanted)
    if steps := nonfinite_steps(run):
        why.append(f"its loss was not a finite number at step {steps[-1]}")
    if not why:
        return None
    other = any(not one.mark.free_on_resume for one in differences(run, settings))
    fixed = other or run.lineage.data_version != wanted.data_version
    how = " and its own settings" if fixed else ""
    return (
        f"run {run.run_id} is unfinished but is not resumed: {listed(why, 3, '; ')}. A new run starts; "
        f"--resume {run.run_id}{how} resumes the unfinished one"
    )


def forget_what_changed(run: Run, settings: config.Settings, now: records.Lineage) -> None:
    """Remove the results of stages that would differ with these settings and data."""
    if not _results_stay(run, settings, now):
        forget_results(run)
    elif any(one.key.startswith("register.") for one in differences(run, settings)):
        forget_results(run, RegisteredModel)


def _results_stay(run: Run, settings: config.Settings, now: records.Lineage) -> bool:
    same = now.data_version == run.lineage.data_version
    return same and all(one.mark.what != "result" for one in differences(run, settings))


def what_changed(
    run: Run, settings: config.Settings, now: records.Lineage, environment: Mapping[str, str]
) -> tuple[Changed, ...]:
    """Return the changes since a run's training began: those in its record, and those of this resume. Empty if it has
    no checkpoint, because the training then starts again.

    Args:
        run: the run before this resume.
        settings: the new settings.
        now: the new lineage.
        environment: the new environment, see ``machine.surroundings``.
    """
    step = _reached(run).get("step")
    if not step:
        return ()
    if _results_stay(run, settings, now) and outcome.load(run, TrainingResult) is not None:
        return run.changed  # No step is repeated.
    was, of_run = run.lineage, run.environment
    values: list[tuple[Any, str, Any, Any, Any]] = [
        ("settings", one.key, one.before, one.now, one.mark.what)
        for one in differences(run, settings)
        if one.mark.what != "bookkeeping" and not one.key.startswith("evaluate.")  # It runs after the training.
    ]
    values.append(("code", "code", was.code_digest, now.code_digest, "result"))
    values.append(("data", "data version", was.data_version, now.data_version, "result"))
    for what in dict.fromkeys([*of_run, *environment]):
        kind = "machine" if what in machine.MACHINE else "environment"
        values.append((kind, what, of_run.get(what), environment.get(what), "speed"))
    found = [
        Changed(step=step, kind=kind, what=what, before=before, now=after, affects=affects)
        for kind, what, before, after, affects in values
    ]
    return (*run.changed, *(one for one in found if one.before != one.now))


def changes_without_result(settings: config.Settings, run: Run) -> str:
    """Return the settings that differ from a run with the same result, in parentheses; empty if none differs."""
    other = listed([str(one) for one in differences(run, settings) if one.mark.what != "result"], 3, "; ")
    return f" ({other})" if other else ""


def _other_batch_size(section: config.Train, run: Run) -> list[str]:
    """Return how the batch size differs from the run's. On other devices a run keeps its global batch size."""
    size, reached = section.global_batch_size, _reached(run).get("global_batch_size")
    if size is not None and reached is not None and size != reached:
        return [f"train.global_batch_size was {reached} and is now {size}"]
    sizes = run.settings["train"]["per_replica_batch_size"], section.per_replica_batch_size
    if None not in sizes and sizes[0] != sizes[1]:
        return [
            f"train.per_replica_batch_size was {sizes[0]} and is now {sizes[1]} (a run keeps its global batch; only "
            "train.global_batch_size changes it)"
        ]
    return []


def _reached(run: Run) -> dict[str, int]:
    """Return the step and the global batch size of the run's newest readable checkpoint, without importing a
    framework; empty if it has none."""
    folder = config.project_root() / run.folder / "checkpoints"
    for state in sorted(folder.glob("[0-9]*/state.json"), key=lambda path: int(path.parent.name), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            size = json.loads(state.read_text(encoding="utf-8"))["state"]["global_batch_size"]
            return {"step": int(state.parent.name), "global_batch_size": int(size)}
    return {}


def measured_rows(run: Run) -> list[ComparisonRow]:
    """Return the measurements of a comparison whose training records still exist."""
    found = outcome.load_readable(run, ComparisonProgress)
    rows = found.rows if found is not None else ()  # It may have been killed before its first training ended.
    runs = [(row, look_up(row.run_id or "")) for row in rows]
    both = TrainingResult, EvaluationResult
    return [row for row, run in runs if run is not None and all(outcome.load(run, one) is not None for one in both)]


def find_unfinished_comparison(key: str, dataset: str, wanted: records.Lineage) -> tuple[Run | None, str | None]:
    """Return the comparison to continue, or why the newest unfinished one cannot be continued.

    Args:
        key: the key of the rows and their settings, which the caller holds.
        dataset: the name of the dataset.
        wanted: the current data and code.

    Returns:
        (run, None), (None, why), or (None, None) if no comparison on this dataset is unfinished and has measurements.
    """
    why = None
    for run in find_runs("comparisons"):
        if run.dataset != dataset or status(run).status == "FINISHED":
            continue
        # While this process holds the key, no other process works under it.
        if not (run.key == key or is_abandoned(run)) or not measured_rows(run):
            continue
        reasons = {
            "it has other rows, settings or processor cores": run.key != key,
            "the data have changed": run.lineage.data_version != wanted.data_version,
            "the code has changed": run.lineage.code_digest != wanted.code_digest,
            f"it was started on {run.host}": run.host != socket.gethostname(),
        }
        if not (others := [reason for reason, applies in reasons.items() if applies]):
            return run, None
        why = why or (
            f"comparison {run.run_id} is unfinished but is not continued: {' and '.join(others)}. A new one starts"
        )
    return None, why

"""Whether a run is the same training as what the settings ask for: what differs, and what of it a resume refuses. And
which comparison that did not come to its end goes on."""

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
from tasks.runs.entries import find_entries, find_named, look_up, newest
from tasks.runs.locks import is_abandoned
from tasks.runs.outcome import forget_results, load_result, nonfinite_steps, refuse_pruned, status
from tasks.system import machine
from tasks.system.errors import UserError

SHOWN = 3


class Difference(NamedTuple):
    """A setting that a run has another value of."""

    key: str
    before: Any
    now: Any
    mark: config.Affects

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r} and is {self.now!r}"


def differences(run: Run, settings: config.Settings) -> list[Difference]:
    """Return the settings that a run has another value of, without the keys of another kind of a section."""
    marks = config.marks_of(config.Settings)
    before = dict(config.leaves(run.settings, whole=marks))
    now = dict(config.leaves(settings.to_json(), whole=marks))
    return [
        Difference(key, before[key], now[key], marks[key])
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    ]


def refuse_resume(settings: config.Settings, resume: str | None, allow_changes: bool = False) -> None:
    """Refuse, before anything is downloaded or started, to resume a run as another training.

    Args:
        settings: from now on.
        resume: the id of the run, ``latest``, or None, which refuses nothing.
        allow_changes: refuse only another dataset.

    Raises:
        UserError: there is no such run, or see ``refuse_other_training``.
    """
    run = find_named(settings, resume)
    if run is not None:
        refuse_other_training(settings, run, allow_changes)


def refuse_other_training(
    settings: config.Settings, run: Run, allow_changes: bool = False, prepared: PreparedDataset | None = None
) -> None:
    """Refuse to resume a run with settings or data that make it another training.

    Args:
        settings: from now on.
        run: the run.
        allow_changes: refuse only another dataset.
        prepared: the data, where they are there already.

    Raises:
        UserError: names each difference; or the run was pruned.
    """
    refuse_pruned(run)
    dataset = run.settings["dataset"]["name"]
    if dataset != settings.dataset.name:
        raise UserError(
            f"run {run.run_id} cannot be resumed: it was trained on dataset.name = '{dataset}', and "
            f"'{settings.dataset.name}' is another run, whatever is allowed. Give --set dataset.name={dataset}, or "
            f"--set model.initial={run.run_id} in place of --resume: a new run, which starts with its weights"
        )
    if allow_changes:
        return
    changed = [str(one) for one in differences(run, settings) if not one.mark.free_on_resume]
    if prepared is not None and prepared.data_version != run.lineage.data_version:
        changed.append(f"data version was {run.lineage.data_version!r} and is {prepared.data_version!r}")
    changed += _other_batch_size(settings.train, run)
    if changed:
        raise UserError(
            f"run {run.run_id} cannot be resumed as another training: {'; '.join(changed)}. "
            "Give the settings that it was started with, start a new run, or give --allow-changes"
        )


def why_not_resumed(settings: config.Settings, wanted: records.Lineage) -> str | None:
    """Return which run is unfinished and not the one that is asked for, why, and what to do about it.

    Only the newest run on the dataset counts, and only if nobody is at work on it; None where there is none such.
    """
    try:
        run = newest(settings.dataset.name)
    except UserError:
        return None
    ended = status(run)
    if ended is None or ended.status == "FINISHED" or run.parent_run_id is not None or not is_abandoned(run):
        return None
    other = differences(run, settings)
    why = _first_few([str(one) for one in other if one.mark.what == "result"])
    if run.lineage.data_version != wanted.data_version:
        why.append(f"its data version was {run.lineage.data_version} and is {wanted.data_version}")
    if run.lineage.code_digest != wanted.code_digest:
        why.append(
            "the code of flows/, tasks/ or its model, requirements.lock or the file of model.initial is not what it was"
        )
    if steps := nonfinite_steps(run):
        why.append(f"its loss was not a finite number at step {steps[-1]}")
    if not why:
        return None
    fixed = any(not one.mark.free_on_resume for one in other) or run.lineage.data_version != wanted.data_version
    how = " and its own settings" if fixed else ""
    return (
        f"run {run.run_id} is unfinished, and is not resumed: {'; '.join(why)}. A new run starts; --resume {run.run_id}"
        f"{how} resumes that one"
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
    """Return how a run's training differs from how it began: the changes in its record, and those of this resume.
    Nothing where it has no checkpoint: then no step is kept, and the training begins anew.

    Args:
        run: as it was so far.
        settings: from now on.
        now: its lineage from now on.
        environment: what it trains on from now on, see ``machine.surroundings``.
    """
    step = _reached(run).get("step")
    if not step:
        return ()
    if _results_stay(run, settings, now) and load_result(run, TrainingResult) is not None:
        return run.changed  # No step is done again.
    found = [
        Changed(step=step, kind="settings", what=one.key, before=one.before, now=one.now, affects=one.mark.what)
        for one in differences(run, settings)
        if one.mark.what != "bookkeeping" and not one.key.startswith("evaluate.")  # Which comes after the training.
    ]
    was, of_run = run.lineage, run.environment
    found += [
        Changed(step=step, kind="code", what="code", before=was.code_digest, now=now.code_digest, affects="result"),
        Changed(
            step=step, kind="data", what="data version", before=was.data_version, now=now.data_version, affects="result"
        ),
    ]
    found += [
        Changed(
            step=step,
            kind="machine" if what in machine.MACHINE else "environment",
            what=what,
            before=of_run.get(what),
            now=environment.get(what),
            affects="speed",
        )
        for what in dict.fromkeys([*of_run, *environment])
    ]
    return (*(one for one in run.changed if one.step < step), *_since(step, run.changed, found))


def _since(step: int, noted: Sequence[Changed], found: Sequence[Changed]) -> Iterator[Changed]:
    """Yield what differs from a step on, where a resume at a later one, or at the same, is noted whose steps are done
    again: what was changed then and is changed back now does not differ."""
    latest = {(one.kind, one.what): one for one in [*noted, *found] if one.step >= step}
    for one in reversed([one for one in noted if one.step >= step]):
        key = (one.kind, one.what)
        latest[key] = latest[key].model_copy(update={"step": step, "before": one.before})
    yield from (one for one in latest.values() if one.before != one.now)


def changes_without_result(settings: config.Settings, run: Run) -> str:
    """Return the settings that differ from a run of the same result, in parentheses; empty where none does."""
    other = _first_few([str(one) for one in differences(run, settings) if one.mark.what != "result"])
    return f" ({'; '.join(other)})" if other else ""


def _first_few(texts: Sequence[str]) -> list[str]:
    more = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return [*texts[:SHOWN], *more]


def _other_batch_size(section: config.Train, run: Run) -> list[str]:
    """Return how the batch size differs from the run's. On other devices a run keeps its global one."""
    size, reached = section.global_batch_size, _reached(run).get("global_batch_size")
    if size is not None and reached is not None and size != reached:
        return [f"train.global_batch_size was {reached} and is {size}"]
    sizes = run.settings["train"]["per_replica_batch_size"], section.per_replica_batch_size
    if None not in sizes and sizes[0] != sizes[1]:
        return [
            f"train.per_replica_batch_size was {sizes[0]} and is {sizes[1]} (a run keeps its global batch; only "
            "train.global_batch_size changes it)"
        ]
    return []


def _reached(run: Run) -> dict[str, int]:
    """Return the step and the global batch size of the run's newest checkpoint that can be read, without a framework;
    nothing where there is none."""
    folder = config.project_root() / run.folder / "checkpoints"
    for state in sorted(folder.glob("[0-9]*/state.json"), key=lambda path: int(path.parent.name), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            size = json.loads(state.read_text(encoding="utf-8"))["state"]["global_batch_size"]
            return {"step": int(state.parent.name), "global_batch_size": int(size)}
    return {}


def save_progress(run: Run, progress: ComparisonProgress) -> None:
    """Keep what a comparison has measured so far."""
    records.save(progress, _progress_file(run))


def load_progress(run: Run) -> ComparisonProgress:
    """Return what a comparison has measured: the trainings whose records are still there."""
    try:
        found = records.load(ComparisonProgress, _progress_file(run))
    except UserError:  # It was killed before its first training had ended.
        return ComparisonProgress(sitting=1, rows=())
    return found.model_copy(update={"rows": tuple(row for row in found.rows if _is_measured(row))})


def find_unfinished_comparison(key: str, dataset: str, wanted: records.Lineage) -> tuple[Run | None, str | None]:
    """Return the comparison to go on with, or why the newest that is unfinished is not that one.

    Args:
        key: of the rows and their settings, which the caller holds.
        dataset: the name of the data.
        wanted: the data and the code of now.

    Returns:
        (run, None), (None, why), or (None, None) where none on this dataset is unfinished and has measured something.
    """
    why = None
    for entry in find_entries("comparisons"):
        run = entry.run
        if entry.dataset != dataset or (entry.status is not None and entry.status.status == "FINISHED"):
            continue
        # While this process holds the key, no other one is at work under it.
        if not (run.key == key or is_abandoned(run)) or not load_progress(run).rows:
            continue
        others = _other_comparison(run, key, wanted)
        if not others:
            return run, None
        why = why or (
            f"comparison {run.run_id} is unfinished, and does not go on: {' and '.join(others)}. A new one starts"
        )
    return None, why


def _other_comparison(run: Run, key: str, wanted: records.Lineage) -> list[str]:
    found = []
    if run.key != key:
        found.append("it is of other rows, settings or processor cores")
    if run.lineage.data_version != wanted.data_version:
        found.append("the data are not what they were")
    if run.lineage.code_digest != wanted.code_digest:
        found.append("the code is not what it was")
    if run.host != socket.gethostname():
        found.append(f"it was begun on {run.host}")
    return found


def _is_measured(row: ComparisonRow) -> bool:
    run = look_up(row.run_id) if row.run_id is not None else None
    return run is not None and None not in (load_result(run, TrainingResult), load_result(run, EvaluationResult))


def _progress_file(run: Run) -> Path:
    return config.project_root() / run.folder / "records" / "progress.json"

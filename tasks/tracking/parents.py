"""Comparisons and sweeps in MLflow: their runs, which are the parents of others, and what MLflow gets beside what it
gets of every run."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tasks import config, records, runs
from tasks.system.errors import UserError
from tasks.tracking.lifecycle import NewRun, Uses, log_files, params_of, set_tags, start_new
from tasks.tracking.metrics import log_metrics
from tasks.tracking.outbox import MAX_TAG_LENGTH, mlflow_run_id, text_of


class Sweeping(NamedTuple):
    """What a sweep's run has that a comparison's has not."""

    key: str
    """What the process at work on it holds, see ``runs.lock``; that of a trial has its number behind it."""
    name: str
    """Of the space."""
    swept: tuple[str, ...]
    """The settings that each trial has of its own."""


def start_comparison(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    key: str,
    flow_run_id: str | None,
    uses: Uses | None = None,
) -> records.Run:
    """Start the MLflow run that is the parent of a comparison's runs; its folder is mlruns/comparisons/<run_id>.

    Args:
        settings: of any of those runs; what they do not share is left out of the parameters.
        prepared: becomes the run's datasets, one for each use.
        lineage: where the run comes from.
        key: what the process at work on the comparison holds, see ``runs.lock``.
        flow_run_id: the run of Prefect's flow.
        uses: as of ``start_run``.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    params = _shared(settings, ("train.loop", "strategy"))
    new = NewRun(f"{prepared.name}-comparison", "mlruns/comparisons", key, params)
    return start_new(new, settings, prepared, lineage, flow_run_id, uses)


def start_sweep(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    sweeping: Sweeping,
    flow_run_id: str | None,
    uses: Uses | None = None,
) -> records.Run:
    """Start the MLflow run that is the parent of a sweep's trials; its folder is mlruns/sweeps/<run_id>. The arguments
    are those of ``start_comparison``, with what is swept in place of the key."""
    params, label = _shared(settings, sweeping.swept), f"{prepared.name}-sweep-{sweeping.name}"
    new = NewRun(label, "mlruns/sweeps", sweeping.key, params, {"sweep": sweeping.name})
    return start_new(new, settings, prepared, lineage, flow_run_id, uses)


def _shared(settings: config.Settings, own: Sequence[str]) -> dict[str, object]:
    """Return the parameters that all runs of a parent share: none of these keys, nor one below them."""
    below = tuple(f"{key}." for key in own)
    return {key: value for key, value in params_of(settings).items() if key not in own and not key.startswith(below)}


def start_trial(
    settings: config.Settings,
    prepared: records.PreparedDataset,
    lineage: records.Lineage,
    parent: records.Run,
    number: int,
    uses: Uses | None = None,
) -> records.Run:
    """Start the MLflow run of a trial, a child of its sweep's, and its folder mlruns/runs/<run_id>.

    Raises:
        UserError: see ``open_store``; or the experiment was deleted.
    """
    tags = {"strategy": settings.strategy.kind, "loop": settings.train.loop, "trial": str(number)}
    params = {"comparison": f"trial {number}", **params_of(settings)}  # As in ``start_run``.
    new = NewRun(f"trial-{number}", "mlruns/runs", f"{parent.key}-{number}", params, tags, parent.run_id)
    return start_new(new, settings, prepared, lineage, parent.flow_run_id, uses)


def log_comparison(run: records.Run, comparison: records.Comparison, page: Path, others: Sequence[Path]) -> None:
    """Give a comparison its table, as files and as its description, and each of its runs the figures of its row.

    They have the same names in all runs, so that MLflow's page for comparing runs shows them in one chart each.

    Args:
        run: the comparison's.
        comparison: its rows name the runs.
        page: the table in Markdown.
        others: files to keep with it.
    """
    for row in comparison.rows:
        if row.reason is not None:
            continue
        figures = {
            "num_replicas": row.num_replicas,
            "seconds_per_epoch": row.seconds_per_epoch,
            "total_seconds": row.total_seconds,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
            "start_seconds": row.start_seconds,
            "setup_seconds": row.setup_seconds,
            "tracing_seconds": row.tracing_seconds,
            "peak_memory_bytes": row.peak_memory_bytes,
            **({f"{name}_ms": value for name, value in row.step_time.parts.items()} if row.step_time else {}),
        }
        known = {f"performance/{name}": value for name, value in figures.items() if value is not None}
        for repeat in row.repeats:
            log_metrics(runs.find_run(repeat.run_id), known | {"performance/load": repeat.load})
    log_files(run, [page, *others], "comparison")
    # MLflow shows a few lines of a description: those of the table, not its heading.
    description = page.read_text(encoding="utf-8").partition("\n\n")[2]
    set_tags(run, {"mlflow.note.content": description[:MAX_TAG_LENGTH]})


def log_trial(run: records.Run, trial: records.Trial) -> None:
    """Give a trial's run what came of it: tags to find it by, and its value, under one name in all runs of a sweep."""
    if trial.value is not None:
        log_metrics(run, {"sweep/value": trial.value, "sweep/epochs": len(trial.values)})
    set_tags(run, {"trial": str(trial.number), "trial_state": trial.state})


def log_sweep(run: records.Run, sweep: records.Sweep, paths: Sequence[Path]) -> None:
    """Give a sweep its files, what was the best, and the training on all examples as one more child: unless that was
    there before, as another sweep's or a run by itself. Then it stays where it is, and the sweep's tag names it."""
    log_files(run, paths, "sweep")
    found = next((one for one in sweep.trials if one.number == sweep.best), None)
    if found is not None and found.value is not None:
        log_metrics(run, {"sweep/value": found.value, "sweep/trials": len(sweep.trials)})
        told = [f"trial {found.number} of {len(sweep.trials)}: {sweep.plan.metric} {found.value:.4f}", ""]
        told += [f"- {key} = {text_of(value)}" for key, value in found.params.items()]
        told += ["", f"trained again on all examples: run {sweep.final.run_id}"] if sweep.final is not None else []
        set_tags(run, {"best_trial": str(found.number), "mlflow.note.content": "\n".join(told)[:MAX_TAG_LENGTH]})
    if sweep.final is not None:
        set_tags(run, {"final_run": sweep.final.run_id})
        final = runs.find_run(sweep.final.run_id)
        if final.start_time >= run.start_time and not _is_anothers(final, run):
            parent = {"mlflow.parentRunId": mlflow_run_id(run), "sweep": sweep.plan.name, "trial": "final"}
            set_tags(final, parent)


def _is_anothers(final: records.Run, run: records.Run) -> bool:
    """Return whether a sweep that was there before this one has trained a run as its last."""
    root = config.project_root()
    for other in runs.sweeps():
        if other.start_time < run.start_time:
            with contextlib.suppress(UserError):  # It has not come so far.
                kept = records.load(records.Sweep, root / other.folder / "sweep.json")
                if kept.final is not None and kept.final.run_id == final.run_id:
                    return True
    return False

"""The stages of a run, as the stage process runs them: each logs its result to MLflow, then writes its record.

The record is written last, because a resumed run does not repeat a stage with a record.
"""

import contextlib
import logging
import sys
import threading
from typing import Literal

from tasks import config
from tasks.data import prepared_data
from tasks.evaluate import evaluate as evaluate_stage
from tasks.evaluation import gate
from tasks.input.order import carve
from tasks.input.sources import augmented_examples
from tasks.records import EvaluationResult, Limits, ModelVersion, PreparedDataset, RegisteredModel, Run, TrainingResult
from tasks.register import register as register_stage
from tasks.reports import charts, page
from tasks.reports.tables import history_table
from tasks.runs import entries, lineage, locks, outcome, repository, resume
from tasks.serving.model_loader import LOADER
from tasks.tracking import copier, lifecycle, models
from tasks.tracking.lifecycle import NewRun, end_crashed
from tasks.tracking.metrics import MetricWriter, log_metrics, system_metrics
from tasks.tracking.store import Unavailable
from tasks.tracking.writing import log_files, set_tags
from tasks.train import check
from tasks.train import train as train_stage
from tasks.training import initial

Status = Literal["FINISHED", "FAILED", "KILLED"]


def start_run(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
) -> Run:
    """Start the MLflow run of a pipeline; refuse settings whose training or registration would fail.

    Args:
        settings: the run's settings.
        prepared: its data.
        flow_run_id: the id of the Prefect flow run.
        parent_run_id: the id of its comparison; such a run registers nothing and needs no gate.
    """
    check(settings, prepared)
    if parent_run_id is None:
        gate.check(settings, prepared)
    end_killed(locks.key_of(settings))
    run = start_training(settings, prepared, lifecycle.training(settings, parent_run_id), flow_run_id)
    keep_changes(run)
    return run


def start_training(settings: config.Settings, prepared: PreparedDataset, new: NewRun, flow_run_id: str | None) -> Run:
    """Start the MLflow run of a training, and save its initial weights."""
    weights = initial.find_weights(settings, prepared)
    run = start(settings, prepared, new, flow_run_id)
    if weights:
        initial.save(weights, config.project_root() / run.folder)
    return run


def start(settings: config.Settings, prepared: PreparedDataset, new: NewRun, flow_run_id: str | None) -> Run:
    """Start an MLflow run with its lineage and the examples for training, validation and test."""
    traced = lineage.collect(settings, prepared.data_version)
    carved = carve(prepared, settings.input.validation, settings.train.seed)
    uses = {use: (split, len(rows)) for use, (split, rows) in carved.items()}
    return lifecycle.start_run(settings, prepared, traced, flow_run_id, uses, new)


def keep_changes(run: Run) -> None:
    """Save the uncommitted changes in the run's folder, and their digest in MLflow."""
    if run.lineage.git_dirty and (digest := repository.keep_changes(run)) is not None:
        set_tags(run, {"uncommitted_digest": digest})


def end_run(settings: config.Settings, *, run: Run, status: Status, reason: str | None = None) -> None:
    """End the MLflow run; the reason of a failure becomes a tag."""
    lifecycle.end_run(run, status, reason)


def resume_run(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    run_id: str,
    flow_run_id: str | None = None,
    allow_changes: bool = False,
) -> Run:
    """Resume a run; refuse changes that would make it a different training."""
    run = entries.find_run(run_id)
    resume.refuse_other_training(settings, run, allow_changes, prepared)
    check(settings, prepared)
    gate.check(settings, prepared)
    traced = lineage.collect(settings, prepared.data_version)
    end_killed(locks.key_of(settings), run_id)
    return lifecycle.resume_run(run, settings, traced, flow_run_id)


def end_killed(key: str, run_id: str | None = None) -> None:
    """End the MLflow runs of processes that died."""
    with contextlib.suppress(Unavailable):
        for ended in end_crashed(key, run_id):
            print(f"{ended.what} is now {ended.status}: {ended.reason}", file=sys.stderr)


def train(
    settings: config.Settings, *, prepared: PreparedDataset, run: Run, stop: threading.Event | None = None
) -> TrainingResult:
    """Train until the end or until ``stop`` is set, and log metrics and system metrics to MLflow meanwhile."""
    # Many trials of a sweep may train in parallel.
    logging.getLogger("tasks").setLevel(logging.INFO if outcome.load(run, Limits) is None else logging.WARNING)
    try:
        with MetricWriter(run) as writer, system_metrics(run, settings):
            result = train_stage(settings, prepared, run, writer.write, stop)
    finally:
        if steps := outcome.nonfinite_steps(run):
            set_tags(run, {"nonfinite_steps": ", ".join(map(str, steps))})
    folder = config.project_root() / run.folder
    history = history_table(result, folder / "report" / "history.csv")
    log_files(run, [folder / "records" / "placement.json", history], "training")
    if result.examples_per_second is not None:
        log_metrics(run, {"training/examples_per_second": result.examples_per_second})
    if result.step_time is not None and run.parent_run_id is None:  # A comparison logs the median of its rounds.
        log_metrics(run, {f"training/{name}_ms": value for name, value in result.step_time.parts.items()})
    set_tags(
        run,
        {
            "checkpoint": result.checkpoint,
            "best_checkpoint": result.best_checkpoint,
            "weights_digest": result.weights_digest,
            "num_replicas": str(result.num_replicas),
            "devices": ", ".join(result.devices),
            "num_parameters": str(result.num_parameters),
            **({"optimizer": result.optimizer} if result.optimizer else {}),
        },
    )
    log_files(run, [outcome.save(run, result)], "training")
    return result


def evaluate(
    settings: config.Settings, *, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate, and log metrics, the record and augmented examples to MLflow."""
    if settings.register_.enabled and run.parent_run_id is None:  # A comparison registers nothing.
        LOADER.get_ready(settings, training)  # For much of an evaluation, one of two cores is idle.
    # A comparison does not show the importance of features, and measures only the strategy's time.
    result = evaluate_stage(settings, prepared, training, with_importance=run.parent_run_id is None)
    folder = config.project_root() / run.folder
    pictures = []
    examples = augmented_examples(settings, prepared)
    if examples is not None:
        path = folder / "report" / "augmented_examples.png"
        title = f"{run.name}: training images and what augmentation makes of them"
        pictures.append(charts.augmented_examples(examples, settings.input.augmentation).save(path, title))
    log_metrics(run, result.metrics)
    log_files(run, [*pictures, outcome.save(run, result)], "evaluation")
    return result


def register(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
    run: Run,
    force: bool = False,
) -> RegisteredModel:
    """Register the evaluated model; with ``force`` it becomes the champion regardless of the evidence."""
    prepared_data.verify(prepared)  # The model's version names the data.
    LOADER.get_ready(settings, training)
    try:
        result = register_stage(settings, run, prepared, training, evaluation, LOADER.ask, force)
    finally:
        LOADER.close()
    outcome.save(run, result)
    return result


def write_report(settings: config.Settings, *, run: Run, seconds: dict[str, float] | None = None) -> None:
    """Write a run's page, with the durations of its stages so far, into its folder and into MLflow."""
    written = page.write(run, seconds)
    log_metrics(run, written.metrics)
    pictures = [chart.save(written.page.with_name(name), written.title) for name, chart in written.pictures.items()]
    log_files(run, [written.page, *pictures], "evaluation")
    if not outcome.is_running(run):  # For example, after `models register`.
        copier.copy_run(run, whole=True)


def report_restarts(settings: config.Settings, *, run: Run, restarts: tuple[str, ...]) -> None:
    """Record why members of the cluster were restarted during a training, even if it failed."""
    set_tags(run, {"restarts": str(len(restarts)), "restart_reasons": "; ".join(restarts)})
    if (training := outcome.load(run, TrainingResult)) is not None:
        result = training.model_copy(update={"restarts": restarts})
        log_files(run, [outcome.save(run, result)], "training")


def find_version(settings: config.Settings, *, address: str) -> ModelVersion:
    """Return the version at an MLflow address such as ``models:/NAME@ALIAS``."""
    return models.find_version(address)

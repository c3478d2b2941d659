"""The stages as the stage process runs them: each logs its result to MLflow, then writes its record.

The record comes last, because a resumed run does not repeat a stage that has one.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Literal

from tasks import config, records, reports, runs
from tasks.data import prepared_data
from tasks.evaluate import evaluate as evaluate_stage
from tasks.evaluation import gate
from tasks.input.order import carve
from tasks.input.sources import augmented_examples
from tasks.process.model_loader import LOADER
from tasks.records import (
    HEADLINES,
    Comparison,
    EvaluationResult,
    Limits,
    LoggedModel,
    PreparedDataset,
    RegisteredModel,
    Run,
    Sweep,
    TrainingResult,
    Trial,
)
from tasks.register import How
from tasks.register import register as register_stage
from tasks.reports import charts, page, side_by_side
from tasks.runs import lineage, uncommitted
from tasks.tracking import lifecycle, models, parents
from tasks.tracking.lifecycle import end_crashed, log_files, set_tags
from tasks.tracking.metrics import MetricWriter, log_metrics, system_metrics
from tasks.tracking.parents import Sweeping, log_comparison, log_sweep, log_trial
from tasks.tracking.store import Unavailable
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
        settings: of the run.
        prepared: its data.
        flow_run_id: the run of Prefect's flow.
        parent_run_id: the comparison that it is part of; such a run registers nothing and needs no gate.
    """
    check(settings, prepared)
    if parent_run_id is None:
        gate.check(settings, prepared)
    weights = initial.find_weights(settings, prepared)
    _end_crashed(runs.key_of(settings))
    traced = lineage.collect(settings, prepared.data_version)
    run = lifecycle.start_run(settings, prepared, traced, flow_run_id, parent_run_id, _uses(settings, prepared))
    if weights:
        initial.save(weights, config.project_root() / run.folder)
    if traced.git_dirty:
        _keep_changes(run)
    return run


def _keep_changes(run: Run) -> None:
    """Keep what differs from the commit that the run names in its folder; MLflow gets the digest."""
    if (digest := uncommitted.keep_changes(run)) is not None:
        set_tags(run, {"uncommitted_digest": digest})


def start_comparison(
    settings: config.Settings, *, prepared: PreparedDataset, key: str, flow_run_id: str | None = None
) -> Run:
    """Start the MLflow run that is the parent of a comparison's runs."""
    _end_crashed(key)
    traced = lineage.collect(settings, prepared.data_version)
    return parents.start_comparison(settings, prepared, traced, key, flow_run_id, _uses(settings, prepared))


def _uses(settings: config.Settings, prepared: PreparedDataset) -> dict[str, tuple[str, int]]:
    """Return the split and the number of examples that are trained, validated and tested on."""
    carved = carve(prepared, settings.input.validation, settings.train.seed)
    return {use: (split, len(rows)) for use, (split, rows) in carved.items()}


def resume_parent(
    settings: config.Settings, *, prepared: PreparedDataset, run: Run, flow_run_id: str | None = None
) -> Run:
    """Resume an unfinished comparison or sweep."""
    _end_crashed(run.key, run.run_id)
    traced = lineage.collect(settings, prepared.data_version)
    return lifecycle.resume_run(run, settings, traced, flow_run_id, run.key)


def start_sweep(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    key: str,
    name: str,
    swept: list[str],
    flow_run_id: str | None = None,
) -> Run:
    """Start the MLflow run that is the parent of a sweep's trials; refuse a space whose first corner cannot be trained,
    or whose best model could not be registered."""
    check(settings, prepared)
    gate.check(settings, prepared)
    _end_crashed(key)
    traced = lineage.collect(settings, prepared.data_version)
    sweeping = Sweeping(key, name, tuple(swept))
    run = parents.start_sweep(settings, prepared, traced, sweeping, flow_run_id, _uses(settings, prepared))
    if traced.git_dirty:
        _keep_changes(run)
    return run


def start_trial(settings: config.Settings, *, prepared: PreparedDataset, run: Run, number: int, limits: Limits) -> Run:
    """Start the MLflow run of a trial; refuse settings that cannot be trained.

    Args:
        settings: of the trial.
        prepared: its data.
        run: the sweep's.
        number: of the trial.
        limits: the values that it must reach to be trained to its end.
    """
    check(settings, prepared)
    weights = initial.find_weights(settings, prepared)
    traced = lineage.collect(settings, prepared.data_version)
    trial = parents.start_trial(settings, prepared, traced, run, number, _uses(settings, prepared))
    if weights:
        initial.save(weights, config.project_root() / trial.folder)
    runs.save_limits(trial, limits)
    return trial


def resume_trial(
    settings: config.Settings, *, prepared: PreparedDataset, run: Run, limits: Limits, flow_run_id: str | None = None
) -> Run:
    """Resume a trial, with the same settings, data and limits."""
    traced = lineage.collect(settings, prepared.data_version)
    trial = lifecycle.resume_run(run, settings, traced, flow_run_id, run.key)
    runs.save_limits(trial, limits)  # Its process may have died before it wrote them.
    return trial


def end_trial(settings: config.Settings, *, run: Run, trial: Trial) -> None:
    """Record in MLflow how a trial ended, and end its run. A pruned trial ends as KILLED, and its tags say why."""
    log_trial(run, trial)
    status: dict[str, Status] = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
    lifecycle.end_run(run, status[trial.state], trial.reason)


def end_run(settings: config.Settings, *, run: Run, status: Status, reason: str | None = None) -> None:
    """End the MLflow run; the reason of a failure becomes a tag."""
    lifecycle.end_run(run, status, reason)


def report_sweep(settings: config.Settings, *, run: Run, sweep: Sweep) -> None:
    """Write a sweep's record, table and page into its folder and into MLflow."""
    folder = config.project_root() / run.folder
    record = records.save(sweep, folder / "sweep.json")
    table = reports.sweep_table(sweep, folder / "sweep.csv")
    log_sweep(run, sweep, [reports.sweep_page(sweep, folder / "sweep.html"), table, record])


def resume_run(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    run_id: str,
    flow_run_id: str | None = None,
    allow_changes: bool = False,
) -> Run:
    """Resume a run; refuse it if it would become another training."""
    run = runs.find_run(run_id)
    runs.refuse_other_training(settings, run, allow_changes, prepared)
    check(settings, prepared)
    gate.check(settings, prepared)
    traced = lineage.collect(settings, prepared.data_version)
    _end_crashed(runs.key_of(settings), run_id)
    return lifecycle.resume_run(run, settings, traced, flow_run_id)


def _end_crashed(key: str, run_id: str | None = None) -> None:
    """End the MLflow runs of processes that died."""
    with contextlib.suppress(Unavailable):
        for ended in end_crashed(key, run_id):
            print(f"{ended.what} is {ended.status} now: {ended.reason}", file=sys.stderr)


def train(
    settings: config.Settings, *, prepared: PreparedDataset, run: Run, stop: threading.Event | None = None
) -> TrainingResult:
    """Train until the end, or until ``stop`` is set; metrics and the processor's load go to MLflow meanwhile."""
    trial = runs.load_limits(run) is not None
    try:
        with _warnings_alone(trial), MetricWriter(run) as writer, system_metrics(writer, settings):
            result = train_stage(settings, prepared, run, writer.write, stop)
    finally:
        if steps := runs.nonfinite_steps(run):
            set_tags(run, {"nonfinite_steps": ", ".join(map(str, steps))})
    folder = config.project_root() / run.folder
    history = reports.history_table(result, folder / "report" / "history.csv")
    found = [folder / "records" / name for name in ("placement.json", "tuning.json")]
    log_files(run, [*(path for path in found if path.exists()), history], "training")
    if result.examples_per_second is not None:
        log_metrics(run, {"performance/examples_per_second": result.examples_per_second})
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
    log_files(run, [runs.save_result(run, result)], "training")
    return result


@contextlib.contextmanager
def _warnings_alone(applies: bool) -> Iterator[None]:
    """Log only warnings, if that applies: a sweep's trials are many and may train in parallel."""
    tasks = logging.getLogger("tasks")
    before = tasks.level
    if applies:
        tasks.setLevel(logging.WARNING)
    try:
        yield
    finally:
        tasks.setLevel(before)


def evaluate(
    settings: config.Settings, *, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate; metrics, records and pictures go to MLflow."""
    if settings.register_.enabled and run.parent_run_id is None:  # A comparison registers nothing.
        LOADER.get_ready(settings, training)  # An evaluation leaves one of two cores idle for much of its time.
    result = evaluate_stage(settings, prepared, training)
    folder = config.project_root() / run.folder
    headline = HEADLINES[prepared.target.task]
    title = f"{run.name}: test {headline} {result.metrics[f'test/{headline}']:.4f}"
    drawn = "confusion_matrix.png" if result.confusion_matrix else "predictions.png"
    pictures = [
        charts.predictions(result).save(folder / "report" / drawn, title),
        charts.learning_curve(training).save(folder / "report" / "learning_curve.png", title),
    ]
    examples = augmented_examples(settings, prepared)
    if examples is not None:
        path = folder / "report" / "augmented_examples.png"
        title = f"{run.name}: training images and what augmentation makes of them"
        pictures.append(charts.augmented_examples(examples, settings.input.augmentation).save(path, title))
    log_metrics(run, result.metrics)
    log_files(run, pictures, "evaluation")
    log_files(run, [runs.save_result(run, result)], "evaluation")
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
    LOADER.choose(settings, training)
    try:
        result = register_stage(settings, run, prepared, training, evaluation, How(LOADER.ask, force))
    finally:
        LOADER.close()
    runs.save_result(run, result)
    return result


def write_report(settings: config.Settings, *, run: Run, seconds: dict[str, float] | None = None) -> None:
    """Write a run's page into its folder and into MLflow, with the seconds of its stages so far."""
    written = page.write(run, seconds)
    log_metrics(run, written.metrics)
    pictures = [chart.save(written.page.with_name(name), written.title) for name, chart in written.pictures.items()]
    log_files(run, [written.page, *pictures], "evaluation")


def report_comparison(settings: config.Settings, *, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table and pages into its folder and into MLflow; return it with the intervals of its
    measurements and the conclusions from them."""
    comparison = reports.concluded(side_by_side.with_intervals(comparison))
    folder = config.project_root() / run.folder
    html, page = reports.comparison_pages(comparison, folder)
    others = [
        records.save(comparison, folder / "comparison.json"),
        reports.comparison_table(comparison, folder / "comparison.csv"),
        html,
    ]
    log_comparison(run, comparison, page, others)
    return comparison


def report_restarts(settings: config.Settings, *, run: Run, restarts: tuple[str, ...]) -> None:
    """Record why members of the cluster were restarted during a training, also of one that failed."""
    set_tags(run, {"restarts": str(len(restarts)), "restart_reasons": "; ".join(restarts)})
    if (training := runs.load_result(run, TrainingResult)) is not None:
        result = training.model_copy(update={"restarts": restarts})
        log_files(run, [runs.save_result(run, result)], "training")


def find_model(settings: config.Settings, *, uri: str) -> LoggedModel:
    """Return the run and the digest of the model at an MLflow address such as ``models:/NAME@ALIAS``."""
    return models.find_model(uri)

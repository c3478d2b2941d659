"""The stages of comparisons and sweeps, as the stage process runs them; those of a run are in `tracked`.

All runs of a comparison or sweep log metrics with the same names, so that MLflow's page for comparing runs shows each
metric in one chart.
"""

from tasks import config, records, tracked
from tasks.evaluation import gate
from tasks.records import Comparison, Limits, PreparedDataset, Run, Sweep, Trial
from tasks.reports import comparison as comparison_page
from tasks.reports import intervals
from tasks.reports import sweep as sweep_page
from tasks.reports.comparison import findings
from tasks.reports.tables import records_table
from tasks.runs import entries, lineage, outcome
from tasks.system import units
from tasks.tracking import lifecycle
from tasks.tracking.metrics import log_metrics
from tasks.tracking.writing import log_files, mlflow_run_id, set_tags
from tasks.train import check

COMPARISON_FIGURES = (
    "num_replicas", "seconds_per_epoch", "total_seconds", "speed_up", "efficiency", "start_up_seconds",
    "tracing_seconds", "peak_memory_bytes",
)  # fmt: skip
"""The fields of a comparison's row that are logged in each of its runs."""


def start_comparison(
    settings: config.Settings, *, prepared: PreparedDataset, key: str, flow_run_id: str | None = None
) -> Run:
    """Start the MLflow run that is the parent of a comparison's runs."""
    tracked.end_killed(key)
    label, own = f"{prepared.name}-comparison", ("train.loop", "strategy")
    new = lifecycle.parent(label, "mlruns/comparisons", key, settings, own)
    return tracked.start(settings, prepared, new, flow_run_id)


def start_sweep(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    key: str,
    name: str,
    swept: list[str],
    flow_run_id: str | None = None,
) -> Run:
    """Start the MLflow run that is the parent of a sweep's trials. Refuse a space if the settings of its first corner
    cannot be trained, or if its best model could not be registered."""
    check(settings, prepared)
    gate.check(settings, prepared)
    tracked.end_killed(key)
    new = lifecycle.parent(f"{prepared.name}-sweep-{name}", "mlruns/sweeps", key, settings, swept, sweep=name)
    run = tracked.start(settings, prepared, new, flow_run_id)
    tracked.keep_changes(run)
    return run


def resume_part(
    settings: config.Settings,
    *,
    prepared: PreparedDataset,
    run: Run,
    flow_run_id: str | None = None,
    limits: Limits | None = None,
) -> Run:
    """Resume an unfinished comparison, sweep or trial. A trial keeps its settings, data and limits."""
    tracked.end_killed(run.key, run.run_id)
    traced = lineage.collect(settings, prepared.data_version)
    resumed = lifecycle.resume_run(run, settings, traced, flow_run_id, run.key)
    if limits is not None:
        outcome.save(resumed, limits)  # The earlier process may have died before it wrote them.
    return resumed


def start_trial(settings: config.Settings, *, prepared: PreparedDataset, run: Run, number: int, limits: Limits) -> Run:
    """Start the MLflow run of a trial; refuse settings that cannot be trained.

    Args:
        settings: the trial's settings.
        prepared: its data.
        run: the sweep's run.
        number: the trial's number.
        limits: the values that the trial must reach; otherwise it is stopped early.
    """
    check(settings, prepared)
    trial = tracked.start_training(settings, prepared, lifecycle.trial(settings, run, number), run.flow_run_id)
    outcome.save(trial, limits)
    return trial


def end_trial(settings: config.Settings, *, run: Run, trial: Trial) -> None:
    """Record in MLflow how a trial ended, and end its run. A pruned trial ends as KILLED, and its tags say why."""
    if trial.value is not None:
        log_metrics(run, {"sweep/value": trial.value, "sweep/epochs": len(trial.values)})
    set_tags(run, {"trial": str(trial.number), "trial_state": trial.state})
    status: dict[str, tracked.Status] = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
    lifecycle.end_run(run, status[trial.state], trial.reason)


def report_sweep(settings: config.Settings, *, run: Run, sweep: Sweep) -> None:
    """Write a sweep's record, table, page and best trial into its folder and into MLflow. The training on all examples
    becomes a child run; if it existed before the sweep, only the sweep's tag names it."""
    folder = config.project_root() / run.folder
    record = records.save(sweep, folder / "sweep.json")
    table = records_table(sweep.trials, folder / "sweep.csv")
    log_files(run, [sweep_page.sweep_page(sweep, folder / "sweep.html"), table, record], "sweep")
    found = next((one for one in sweep.trials if one.number == sweep.best), None)
    if found is not None and found.value is not None:
        log_metrics(run, {"sweep/value": found.value, "sweep/trials": len(sweep.trials)})
        told = [f"trial {found.number} of {len(sweep.trials)}: {sweep.plan.metric} {units.metric(found.value)}", ""]
        told += [f"- {key} = {config.written(value)}" for key, value in found.params.items()]
        told += ["", f"trained again on all examples: run {sweep.final.run_id}"] if sweep.final is not None else []
        set_tags(run, {"best_trial": str(found.number), "mlflow.note.content": "\n".join(told)})
    if sweep.final is not None:
        set_tags(run, {"final_run": sweep.final.run_id})
        final = entries.find_run(sweep.final.run_id)
        if final.start_time >= run.start_time:
            parent = {"mlflow.parentRunId": mlflow_run_id(run), "sweep": sweep.plan.name, "trial": "final"}
            set_tags(final, parent)


def report_comparison(settings: config.Settings, *, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table and pages into its folder and into MLflow, and each row's figures into the row's runs.
    Return the comparison with the intervals of its measurements and the conclusions from them."""
    comparison = intervals.with_intervals(comparison)
    comparison = comparison.model_copy(update={"finding": findings(comparison)})
    folder = config.project_root() / run.folder
    html, page = comparison_page.comparison_pages(comparison, folder)
    record = records.save(comparison, folder / "comparison.json")
    table = records_table(comparison.rows, folder / "comparison.csv")
    for row in [row for row in comparison.rows if row.reason is None]:
        figures = row.model_dump(include=set(COMPARISON_FIGURES))
        figures |= {f"{name}_ms": value for name, value in row.step_time.parts.items()} if row.step_time else {}
        known = {f"training/{name}": value for name, value in figures.items() if value is not None}
        for repeat in row.repeats:
            log_metrics(entries.find_run(repeat.run_id), known | {"training/load": repeat.load})
    log_files(run, [page, record, table, html], "comparison")
    # MLflow shows only a few lines of a description, so omit the heading above the table.
    set_tags(run, {"mlflow.note.content": page.read_text(encoding="utf-8").partition("\n\n")[2]})
    return comparison

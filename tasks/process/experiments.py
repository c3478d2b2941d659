"""The stages of comparisons and sweeps, as the stage process runs them; those of a run are in `tracked`."""

from tasks import config, records
from tasks.evaluation import gate
from tasks.process import tracked
from tasks.records import Comparison, Limits, PreparedDataset, Run, Sweep, Trial
from tasks.reports import comparison as comparison_page
from tasks.reports import intervals
from tasks.reports import sweep as sweep_page
from tasks.reports.comparison import concluded
from tasks.reports.tables import records_table
from tasks.runs import lineage, outcome
from tasks.tracking import lifecycle
from tasks.train import check


def start_comparison(
    settings: config.Settings, *, prepared: PreparedDataset, key: str, flow_run_id: str | None = None
) -> Run:
    """Start the MLflow run that is the parent of a comparison's runs."""
    tracked.end_killed(key)
    return tracked.start(settings, prepared, lifecycle.comparison(settings, prepared, key), flow_run_id)


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
    tracked.end_killed(key)
    run = tracked.start(settings, prepared, lifecycle.sweep(settings, prepared, key, name, swept), flow_run_id)
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
    """Resume an unfinished comparison, sweep or trial; a trial has the same settings, data and limits as before."""
    tracked.end_killed(run.key, run.run_id)
    traced = lineage.collect(settings, prepared.data_version)
    resumed = lifecycle.resume_run(run, settings, traced, flow_run_id, run.key)
    if limits is not None:
        outcome.save(resumed, limits)  # Its process may have died before it wrote them.
    return resumed


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
    trial = tracked.start_training(settings, prepared, lifecycle.trial(settings, run, number), run.flow_run_id)
    outcome.save(trial, limits)
    return trial


def end_trial(settings: config.Settings, *, run: Run, trial: Trial) -> None:
    """Record in MLflow how a trial ended, and end its run. A pruned trial ends as KILLED, and its tags say why."""
    lifecycle.log_trial(run, trial)
    status: dict[str, tracked.Status] = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}
    lifecycle.end_run(run, status[trial.state], trial.reason)


def report_sweep(settings: config.Settings, *, run: Run, sweep: Sweep) -> None:
    """Write a sweep's record, table and page into its folder and into MLflow."""
    folder = config.project_root() / run.folder
    record = records.save(sweep, folder / "sweep.json")
    table = records_table(sweep.trials, folder / "sweep.csv")
    lifecycle.log_sweep(run, sweep, [sweep_page.sweep_page(sweep, folder / "sweep.html"), table, record])


def report_comparison(settings: config.Settings, *, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table and pages into its folder and into MLflow; return it with the intervals of its
    measurements and the conclusions from them."""
    comparison = concluded(intervals.with_intervals(comparison))
    folder = config.project_root() / run.folder
    html, page = comparison_page.comparison_pages(comparison, folder)
    others = [
        records.save(comparison, folder / "comparison.json"),
        records_table(comparison.rows, folder / "comparison.csv"),
        html,
    ]
    lifecycle.log_comparison(run, comparison, page, others)
    return comparison

"""The commands that train: `run`, `compare` and `sweep`, which start a flow, and single stages without Prefect."""

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flows.cli import completion, tables
from flows.cli.command import (
    ALLOW_CHANGES,
    DRY_RUN,
    FRESH,
    RECIPES,
    RESUME,
    SETTINGS,
    Result,
    argument,
    as_parameter,
    is_verbose,
    option,
    run_argument,
)
from tasks.system.errors import UserError

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import Comparison, RunSummary

MOST_TRIALS = 10
MOST_CLASSES = 5
"""More classes would not fit on one screen of 24 lines."""
FOLDED = {
    "replicas": "repli-\ncas", "examples/s": "examples\n/s", "s per epoch": "s per\nepoch", "speed-up": "speed\nup",
    "efficiency": "effi.", "total, s": "total\ns", "start-up, s": "start\nup s", "ms a step": "ms a\nstep",
    "compute": "com-\npute", "collectives": "collec-\ntives", "input wait": "input\nwait", "peak MB": "peak\nMB",
    "95% interval": "95%\ninterval",
}  # fmt: skip
"""Headings in two short lines, so that a comparison's tables fit into 80 columns."""
STRATEGIES = option(
    "--strategies",
    "The strategies; `stratagem strategies` lists them.",
    "A,B,...",
    complete=completion.strategy_lists,
    default=...,
)
LOOPS = option(
    "--loops",
    "The loops; unsupported combinations are skipped.",
    "A,B",
    complete=completion.loop_lists,
    default="fit,custom",
)
RUN_ID = run_argument("A run's id or its first characters; by default `latest`.", default=None)
REPEATS = option(
    "--repeats",
    "Number of rounds, each with its own seed; by default 2, or 1 if a round takes over 10 minutes.",
    "N",
    min=1,
)


def run(
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    if_changed: bool = option("--if-changed", "Do nothing if a finished run has the same data, settings and code."),
    resume: str | None = RESUME,
    allow_changes: bool = ALLOW_CHANGES,
    fresh: bool = FRESH,
    dry_run: bool = DRY_RUN,
) -> Result:
    """Train a model, from the data to the registered version.

    Downloads and prepares the data if needed, trains, evaluates, registers the model and writes a report. An unfinished
    run with the same settings, data and code continues.
    """
    from flows.operate import notifications
    from tasks import config
    from tasks.operations import dvc_data, pipeline, preconditions
    from tasks.runs import entries, locks

    settings = config.load(recipes, overrides)
    notifications.check()
    _check_resume(settings, recipes, resume, allow_changes, fresh, if_changed)
    resumption = pipeline.Resumption(resume, allow_changes, fresh)
    if dry_run:
        from flows import plan

        yield from tables.show_plan(plan.of_run(recipes, overrides, resumption, if_changed))
        return
    preconditions.check_writable()
    planned = pipeline.plan_ahead(recipes, overrides, resumption, if_changed) if if_changed else None
    if planned is not None and (same := planned.unchanged):
        yield same
        print_run(same, changed=False)
        return
    dvc_data.check_source(settings.dataset)
    preconditions.check_settings(settings)
    if pipeline.join(recipes, overrides, as_run=True):
        return
    locks.refuse_locked(settings, resume)
    before = set(entries.finished())
    values = config.Overrides(config.read_overrides(overrides))
    options = (if_changed, resume, allow_changes, fresh)
    summary = _run_flow("training", settings, as_parameter(recipes), values, *options)
    changed = not if_changed or summary.run_id not in before
    yield summary
    print_run(summary, changed)


def _run_flow(name: str, settings: "Settings", *given: Any) -> Any:
    """Run the flow flows.NAME.NAME with these parameters, and return its result."""
    from flows.operate import prefect_server
    from tasks.process import client
    from tasks.system.machine import without_collections

    prefect_server.set_environment(is_verbose())
    # They import their framework while this process imports Prefect; a cluster's processes start only for a training.
    client.start_processes(settings, with_cluster=name == "training")
    server = prefect_server.start_server()
    with without_collections():
        flow = getattr(import_module(f"flows.{name}"), name)
        reporting = import_module("flows.reporting")
    if server is not None:
        server.await_ready()
    result = reporting.run_flow(flow, *given)
    client.stop_processes()
    return result


def _check_resume(
    settings: "Settings",
    recipes: list[str],
    resume: str | None,
    allow_changes: bool,
    fresh: bool,
    if_changed: bool = False,
) -> None:
    """Refuse options that contradict each other, and resuming a run with another training."""
    from tasks import config
    from tasks.operations import preconditions
    from tasks.runs.entries import resolve
    from tasks.runs.resume import refuse_other_training
    from tasks.strategies import engines

    if resume is not None and fresh:
        raise UserError(f"--resume {resume} resumes a run, and --fresh starts a new one: use only one of them")
    if if_changed and (resume is not None or fresh):
        raise UserError(
            "--if-changed trains only if something has changed, but --resume and --fresh always train: use only one of "
            "them"
        )
    if resume is None and allow_changes:
        raise UserError("--allow-changes needs a run: add --resume RUN")
    if if_changed and engines.is_foreign(settings.strategy.cluster):
        raise UserError(
            "--if-changed: the other members of a cluster would wait for a chief that has nothing to do. "
            "Omit it, or add --set strategy.launcher=local"
        )
    preconditions.check_remote(settings, resume)
    # Settings that follow the data are compared later, when the data are prepared.
    if resume is not None:
        named = resolve(resume, settings.dataset.name)
        refuse_other_training(settings, named, allow_changes or config.follows_data(recipes, settings))


def print_run(summary: "RunSummary", changed: bool) -> None:
    """Print a run's weakest classes, its metrics and the path of its report, on one screen.

    ``changed`` is False for an earlier run that already has this result.
    """
    from tasks.records import EvaluationResult
    from tasks.reports.tables import summary_rows
    from tasks.runs import entries, outcome

    run = entries.find_run(summary.run_id)
    if evaluated := outcome.load(run, EvaluationResult):
        tables.print_classes(evaluated, MOST_CLASSES)
        print()
    if not changed:
        print("Nothing to do: this finished run has the same data, settings and code:")
    rows = {
        **summary_rows(summary),
        **({} if changed else {"finished": summary.finished_at}),
        "seconds": f"{summary.seconds['total']:.1f}",
        # Separate from the total, to fit on one line.
        "of these": ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items() if name != "total"),
        "next": "stratagem ui",
    }
    tables.print_rows(rows)
    tables.print_report(run)


def compare(
    strategies: str = STRATEGIES,
    recipes: list[str] = RECIPES,
    loops: str = LOOPS,
    overrides: list[str] = SETTINGS,
    repeats: int | None = REPEATS,
    fresh: bool = option("--fresh", "Start a new comparison even if the same one is unfinished."),
    dry_run: bool = DRY_RUN,
) -> Result:
    """Compare strategies: how fast, how good, and why.

    Trains the same model under each strategy, one after another, in rounds. The table shows where the time of a step
    goes, with conclusions; comparison.html also has plots. If a comparison is killed, the same command continues it.

    All rows have the same data, seeds, epochs and global batch; a batch size per replica counts as the global one.
    -S strategy.devices=2 applies to each strategy that has devices, -S strategy.mirrored.devices=2 to one. A strategy
    that fails becomes a row with its reason.
    """
    from flows import pairs, plan
    from flows.operate import notifications
    from tasks import config
    from tasks.operations import dvc_data, preconditions

    notifications.check()
    kinds, wanted, values = strategies.split(","), loops.split(","), config.read_overrides(overrides)
    planned = pairs.plan(kinds, wanted, recipes, values)
    first = planned.trainable[0]
    if dry_run:
        prepared = dvc_data.load_up_to_date(first.dataset.name)
        yield from tables.show_plan(plan.of_comparison(planned, prepared, fresh))
        return
    preconditions.check_writable()
    preconditions.check_remote(first)
    dvc_data.check_source(first.dataset)
    compared = _run_flow("comparison", first, kinds, wanted, as_parameter(recipes), values, repeats, fresh)
    yield compared
    print_comparison(compared)


def print_comparison(result: "Comparison") -> None:
    """Print the tables and conclusions of a comparison in 80 columns."""
    from tasks.reports import comparison as page

    for number, table in enumerate((page.figures_table(result), page.steps_table(result))):
        shown = [place for place, heading in enumerate(table.header) if heading != "tracing, s"]  # Too wide.
        names = [table.header[place] for place in shown]
        headings = [f"test\n{name[5:8]}." if name.startswith("test ") else FOLDED.get(name, name) for name in names]
        rows = [[row[place] for place in shown] for row in table.rows]
        if number == 0 or len(shown) > 2:
            print(end="\n" * number)
            tables.print_table(headings, rows, right=headings[2:], bottom=headings, gap=1)
    for remark in page.comparison_remarks(result):
        tables.print_text(remark)
    for sentence in result.finding:
        tables.print_text(f"- {sentence}")
    tables.print_text(
        f"{result.model} on {result.dataset}, {result.epochs} epochs, {result.global_batch_size} examples per step"
    )
    tables.print_text(f"page: {result.folder}/comparison.html")
    tables.print_text(f"runs: see the children of run {result.run_id} in `stratagem ui`")


def sweep(
    space: str = argument(
        "SPACE", "A name in recipes/sweeps/, or the path of a YAML file.", complete=completion.spaces
    ),
    trials: int = option("--trials", "Number of trials, including those of an unfinished sweep.", "N", default=20),
    parallel: int = option(
        "--parallel", "Number of trials that train at the same time, each in its own process.", "K", default=1
    ),
    overrides: list[str] = SETTINGS,
    fresh: bool = option("--fresh", "Start a new sweep even if one of this name is unfinished."),
    dry_run: bool = DRY_RUN,
) -> Result:
    """Search for settings with Optuna, and train the best again.

    Trains the best settings on the training and validation examples, and registers that model if it passes the gate.
    If a sweep is killed, the same command continues it with the same trials. docs/sweep.md has the format of a space.
    """
    from flows import plan
    from tasks import config, sweeps
    from tasks.operations import dvc_data, preconditions
    from tasks.reports import sweep as page
    from tasks.reports.tables import result_rows

    for name, value, most in (("--trials", trials, 100_000), ("--parallel", parallel, 64)):
        if not 1 <= value <= most:
            raise UserError(f"{name} = {value}: use a number from 1 to {most:,}")
    values = config.read_texts(overrides)
    found = sweeps.load(space, None, values)
    if dry_run:
        prepared = dvc_data.load_up_to_date(found.example.dataset.name)
        fitted = sweeps.load(space, prepared, values)
        yield from tables.show_plan(plan.of_sweep(fitted, parallel, trials, prepared, fresh))
        return
    preconditions.check_writable()
    dvc_data.check_source(found.example.dataset)
    preconditions.check_settings(found.example)
    preconditions.check_remote(found.example)
    result = _run_flow("sweep", found.example, space, trials, parallel, fresh, values)
    yield result
    ranked = page.ranked(result)
    header, rows = page.sweep_cells(result, ranked[:MOST_TRIALS])
    # Short lines, so that many columns fit.
    headings = [re.sub("[/._]", "\\g<0>\n", heading) for heading in page.short_names(header)]
    right = [heading for place, heading in enumerate(headings) if place != 1]
    tables.print_table(headings, rows, right=right, bottom=headings, gap=1)
    if (more := len(ranked) - MOST_TRIALS) > 0:
        tables.print_text(f"and {more:,} more: {result.folder}/sweep.csv")
    for remark in page.sweep_remarks(result):
        tables.print_text(remark)
    final = result.final
    if final is None:
        return
    print()
    tables.print_rows(
        {
            "best": f"trial {result.best}, chosen by {result.plan.metric}",
            "trained again": f"on all examples, {final.epochs} epochs, run {final.run_id}",
            **result_rows(final),
            "sweep": result.run_id,
            "seconds": f"{result.seconds:,.1f}",
            "next": "stratagem ui",
        }
    )
    print(f"{result.folder}/sweep.html")


def train(
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    resume: str | None = RESUME,
    allow_changes: bool = ALLOW_CHANGES,
    fresh: bool = FRESH,
) -> Result:
    """Only train, without Prefect, on a prepared dataset.

    An unfinished run with the same settings, data and code continues.
    """
    from tasks import config
    from tasks.operations import dvc_data, pipeline, preconditions
    from tasks.process import client

    asked = config.load(recipes, overrides)
    _check_resume(asked, recipes, resume, allow_changes, fresh)
    preconditions.check_writable()
    preconditions.check_settings(asked)
    if pipeline.join(recipes, overrides):
        return
    settings, prepared = dvc_data.load(recipes, overrides)
    result = pipeline.train_alone(settings, prepared, pipeline.Resumption(resume, allow_changes, fresh))
    client.stop_processes()
    trained = ("run_id", "dataset", "strategy", "epochs", "steps", "examples_per_second")
    yield from tables.show_record(result, (*trained, "checkpoint", "best_checkpoint", "weights_digest"))


def evaluate(
    run_id: str | None = RUN_ID,
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
) -> Result:
    """Evaluate a checkpoint of a run on the test split.

    -S evaluate.checkpoint=best chooses the best checkpoint; a number is its step.
    """
    from tasks.operations import pipeline
    from tasks.process import client

    settings, prepared, running, training = pipeline.load_training(recipes, overrides, run_id)
    result = client.evaluate(settings, prepared, training, running)
    client.write_report(settings, running)
    client.stop_processes()
    yield from tables.show_record(result, ("run_id", "checkpoint", "num_examples", "metrics"))
    tables.print_classes(result)
    tables.print_report(running)


def register(
    run_id: str | None = RUN_ID,
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    force: bool = option("--force", "Make it @champion even without evidence."),
) -> Result:
    """Register the model of an evaluated run.

    The version gets the alias register.alias, and @champion if it is significantly better than the champion on the same
    test rows.
    """
    from tasks.operations import pipeline
    from tasks.process import client

    settings, prepared, running, training = pipeline.load_training(recipes, overrides, run_id)
    result = pipeline.register(settings, prepared, running, training, force)
    client.stop_processes()
    shown = ("run_id", "model_name", "model_version", "aliases", "judgement", "model_uri", "reason", "notes")
    yield from tables.show_record(result, shown)

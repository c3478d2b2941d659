"""The commands that start a flow: `run`, `compare`, `sweep`.

The parameters of a command are its options, however many it has.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion, tables
from flows.cli.command import (
    NO_SETTINGS,
    AllowChanges,
    Debug,
    Explain,
    Fresh,
    Json,
    Recipe,
    Resume,
    Set,
    check_resume,
    command,
)

if TYPE_CHECKING:
    from tasks.records import Comparison, RunSummary, Sweep

MOST_TRIALS = 10
FOLDED = {
    "replicas": "repli-\ncas", "examples/s": "examples\n/s", "s per epoch": "s per\nepoch", "speed-up": "speed\nup",
    "efficiency": "effi.", "total, s": "total\ns", "start-up, s": "start\nup s", "ms a step": "ms a\nstep",
    "compute": "com-\npute", "collectives": "collec-\ntives", "input wait": "input\nwait", "peak MB": "peak\nMB",
    "95 % interval": "95 %\ninterval",
}  # fmt: skip
"""Headings of a comparison in two short lines, with which its tables fit a terminal of 80 columns."""
Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        metavar="A,B,...",
        help="Which: `stratagem strategies`.",
        autocompletion=completion.strategy_lists,
    ),
]
Loops = Annotated[
    str,
    typer.Option(
        "--loops",
        metavar="A,B",
        help="Which loops; a pair that does not exist is left out.",
        autocompletion=completion.loop_lists,
    ),
]
SetForAll = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting for all, such as train.epochs=3; strategy.devices=2 goes to each strategy that has "
        "devices, strategy.mirrored.devices=2 to one.",
        autocompletion=completion.settings,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        metavar="N",
        help="How often each is trained, in rounds. Without it twice; once where a round takes over 10 minutes.",
    ),
]


def run(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Train nothing when data, settings and code are those of the last run.")
    ] = False,
    resume: Resume = None,
    allow_changes: AllowChanges = False,
    fresh: Fresh = False,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download, prepare, train, evaluate and register: the whole pipeline.

    An unfinished run with the same settings, data and code is resumed.
    """
    if explain:
        with command(debug):
            given = {"--if-changed": if_changed, "--resume": resume, "--allow-changes": allow_changes, "--fresh": fresh}
            explain_run(recipe, overrides, json, beside=given)
        return
    with command(debug):
        from flows.operate import notifications, prefect_server
        from tasks import config
        from tasks import runs as all_runs
        from tasks.operations import dvc_data, pipeline, preconditions
        from tasks.process import client
        from tasks.system import clock

        settings = config.load(recipe, overrides)
        notifications.check()
        check_resume(settings, recipe, resume, allow_changes, fresh, if_changed)
        preconditions.check_writable()
        if if_changed and (same := pipeline.find_unchanged(recipe, overrides)):
            print(same.model_dump_json()) if json else print_run(same, changed=False)
            return
        dvc_data.check_source(settings.dataset)
        preconditions.check_devices(settings)
        if pipeline.join(recipe, overrides, as_run=True):
            return
        all_runs.refuse_locked(settings, resume)
        with prefect_server.starting(settings, debug):
            from flows.reporting import run_flow
            from flows.training import training

        before = set(all_runs.finished())
        values = config.Overrides(config.read_overrides(overrides))
        options = (if_changed, resume, allow_changes, fresh)
        with clock.span("flow", "flow"):
            summary = run_flow(training, recipe, values, *options)
        with clock.span("flow", "end the stages"):
            client.stop_processes()
        changed = not if_changed or summary.run_id not in before
        print(summary.model_dump_json()) if json else print_run(summary, changed)


def explain_run(recipe: str | None, overrides: Sequence[str], json: bool, beside: Mapping[str, object]) -> None:
    """Print what `stratagem run` would do.

    Args:
        recipe: as the command takes it.
        overrides: as the command takes them.
        json: print a record.
        beside: options of the command that would change what it does, as they were given.

    Raises:
        UserError: one of these was given; or as the command itself.
    """
    from tasks.operations import explanation
    from tasks.system.errors import UserError

    if given := [option for option, value in beside.items() if value]:
        raise UserError(f"{given[0]} with --explain: the plan is of the command without it; give one of them")
    tables.print_explanation(explanation.explain(recipe, overrides), json)


def print_run(summary: "RunSummary", changed: bool) -> None:
    """Print what a run ends with: how good it is for each class, the run itself, where its pictures are.

    Args:
        summary: of the run.
        changed: False for an earlier run, after which nothing has changed.
    """
    from tasks import runs
    from tasks.records import EvaluationResult

    run = runs.find_run(summary.run_id)
    if evaluated := runs.load_result(run, EvaluationResult):
        tables.print_classes(evaluated)
        print()
    if not changed:
        print("Nothing to do: data, settings and code are those of this finished run:")
    speed = (
        "one call of the step function only"
        if summary.examples_per_second is None
        else f"{summary.examples_per_second:,.0f}"
    )
    replicas = f"{summary.num_replicas} replica{'s' * (summary.num_replicas > 1)}"
    rows = {
        "dataset": f"{summary.dataset}, data version {(summary.data_version or 'not under DVC')[:12]}",
        "strategy": f"{summary.strategy}, {replicas}, loop {summary.loop}",
        "trained": f"{summary.epochs} epochs, {summary.steps:,} steps",
        "examples/s": speed,
        **_test_metrics(summary.metrics),
        "checkpoint": summary.checkpoint,
        "model": f"{summary.model_version} {' '.join('@' + alias for alias in summary.aliases)}"
        if summary.model_version
        else f"not registered: {summary.reason}",
        **({"champion": summary.judgement.told} if summary.judgement else {}),
        **({"note": "; ".join(summary.notes)} if summary.notes else {}),
        "run": summary.run_id,
        "finished": summary.finished_at,
        "seconds": f"{summary.seconds['total']:.1f}",
        # Together with the total they would need a second line.
        "of these": ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items() if name != "total"),
        "next": "stratagem ui",
    }
    tables.print_rows(rows)
    tables.print_pictures(run)


def _test_metrics(metrics: dict[str, float]) -> dict[str, str]:
    """Return a row for the headline of a test, and one for what else was measured."""
    from tasks.records import HEADLINES

    measured = {name.removeprefix("test/"): f"{value:.4f}" for name, value in metrics.items() if name != "test/loss"}
    headline = next(name for name in HEADLINES.values() if name in measured)
    rows = {f"test {headline}": measured.pop(headline)}
    return rows | ({"others": ", ".join(map(" ".join, measured.items()))} if measured else {})


def compare(
    strategies: Strategies,
    recipe: Recipe = None,
    loops: Loops = "fit,custom",
    overrides: SetForAll = NO_SETTINGS,
    repeats: Repeats = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, also where the same one is unfinished.")] = False,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the same under several strategies, one after another, in rounds: how fast, how good, and why.

    The table says where a step's time goes, and what follows from the figures; comparison.html has it with plots. A
    comparison that was killed goes on with the trainings that are missing.

    Data, seed, epochs and the global batch are those of the settings for all; a batch size for each replica counts as
    the global one. A strategy that fails is a row with its reason.
    """
    with command(debug):
        from flows.operate import notifications, prefect_server
        from flows.plan import plan
        from tasks import config
        from tasks.operations import dvc_data, explanation, preconditions
        from tasks.process import client

        notifications.check()
        kinds, wanted, values = strategies.split(","), loops.split(","), config.read_overrides(overrides)
        planned = plan(kinds, wanted, recipe, values)
        first = planned.trainable[0]
        if explain:
            prepared = dvc_data.load_up_to_date(first.dataset.name)
            rows = plan(kinds, wanted, recipe, values, prepared).rows
            tables.print_explanation(explanation.comparison(rows, planned.key, recipe, values, prepared), json)
            return
        preconditions.check_writable()
        preconditions.check_remote(first)
        dvc_data.check_source(first.dataset)
        with prefect_server.starting(first, debug, with_cluster=False):
            from flows.comparison import comparison
            from flows.reporting import run_flow

        compared = run_flow(comparison, kinds, wanted, recipe, values, repeats, fresh)
        client.stop_processes()
        if json:
            print(compared.model_dump_json())
        else:
            print_comparison(compared)


def print_comparison(result: "Comparison") -> None:
    """Print the table that a comparison ends with, in 80 columns."""
    from tasks import reports

    for number, table in enumerate((reports.figures_table(result), reports.steps_table(result))):
        shown = [place for place, heading in enumerate(table.header) if heading != "tracing, s"]  # No room for it.
        headings = [_folded(table.header[place]) for place in shown]
        rows = [[row[place] for place in shown] for row in table.rows]
        if number == 0 or len(shown) > 2:
            print(end="\n" * number)
            tables.print_table(headings, rows, right=headings[2:], bottom=headings, gap=1)
    for remark in reports.comparison_remarks(result):
        tables.print_text(remark)
    for sentence in result.finding:
        tables.print_text(f"- {sentence}")
    tables.print_text(
        f"{result.model} on {result.dataset}, {result.epochs} epochs, {result.global_batch_size} examples a step"
    )
    tables.print_text(f"page: {result.folder}/comparison.html")
    tables.print_text(f"runs: stratagem ui, under the run {result.run_id}")


def _folded(heading: str) -> str:
    return f"test\n{heading[5:8]}." if heading.startswith("test ") else FOLDED.get(heading, heading)


def sweep(
    space: Annotated[
        str,
        typer.Argument(
            metavar="SPACE",
            help="A name in recipes/sweeps/, or the path of a YAML file.",
            autocompletion=completion.spaces,
        ),
    ],
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", help="How many, with those of the same sweep before.")
    ] = 20,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="K", help="So many train side by side, each in a process of its own.")
    ] = 1,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin a new sweep, also where one of this name is unfinished.")
    ] = False,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Try settings out of a space (Optuna's TPE), and train the best again on all examples, behind the gate.

    A sweep that was killed goes on by the same command, with the same trials. docs/sweep.md has the format of a space.
    """
    with command(debug):
        from flows.operate import prefect_server
        from flows.plan import plan_of_sweep
        from tasks import sweeps
        from tasks.operations import dvc_data, explanation, pipeline, preconditions
        from tasks.process import client
        from tasks.system.errors import UserError

        for option, value, most in (("--trials", trials, 100_000), ("--parallel", parallel, 64)):
            if not 1 <= value <= most:
                raise UserError(f"{option} = {value}: give a number from 1 to {most:,}")
        found = sweeps.load(space)
        sweeps.refuse_foreign_cluster(found, pipeline.in_foreign_cluster(found.example))
        if explain:
            prepared = dvc_data.load_up_to_date(found.example.dataset.name)
            found = sweeps.load(space, prepared)
            tables.print_explanation(explanation.sweep(found, plan_of_sweep(found, parallel), trials, prepared), json)
            return
        preconditions.check_writable()
        dvc_data.check_source(found.example.dataset)
        preconditions.check_devices(found.example)
        preconditions.check_remote(found.example)
        with prefect_server.starting(found.example, debug, with_cluster=False):
            from flows.reporting import run_flow
            from flows.sweep import sweep as sweep_flow

        result = run_flow(sweep_flow, space, trials, parallel, fresh)
        client.stop_processes()
        print(result.model_dump_json()) if json else print_sweep(result)


def print_sweep(result: "Sweep") -> None:
    """Print the best trials, what mattered, and what became of the best."""
    from tasks import reports

    ranked = reports.ranked(result)
    header, rows = reports.sweep_cells(result, ranked[:MOST_TRIALS])
    headings = [_narrow(heading) for heading in reports.short_names(header)]
    right = [heading for place, heading in enumerate(headings) if place != 1]
    tables.print_table(headings, rows, right=right, bottom=headings, gap=1)
    if (more := len(ranked) - MOST_TRIALS) > 0:
        tables.print_text(f"and {more:,} more: {result.folder}/sweep.csv")
    for remark in reports.sweep_remarks(result):
        tables.print_text(remark)
    final = result.final
    if final is None:
        return
    aliases = " ".join(f"@{alias}" for alias in final.aliases)
    print()
    tables.print_rows(
        {
            "best": f"trial {result.best}, chosen by {result.plan.metric}",
            "trained again": f"on all examples, {final.epochs} epochs, run {final.run_id}",
            **{name.replace("/", " "): f"{value:.4f}" for name, value in final.metrics.items() if name != "test/loss"},
            "model": f"{final.model_version} {aliases}" if final.model_version else f"not registered: {final.reason}",
            **({"champion": final.judgement.told} if final.judgement else {}),
            "sweep": result.run_id,
            "seconds": f"{result.seconds:,.1f}",
            "next": "stratagem ui",
        }
    )
    print(f"{result.folder}/sweep.html")


def _narrow(heading: str) -> str:
    """Return a key in lines that are short, as many columns have to fit."""
    return heading.replace("/", "/\n").replace(".", ".\n").replace("_", "_\n")

"""`stratagem runs`: the runs in mlruns/, listed, shown, compared, and pruned where the disk is full.

The parameters of a command are its options, however many it has.
"""

from typing import Annotated

import typer

from flows.cli import completion
from flows.cli.command import Debug, Json, command

app = typer.Typer(
    help="List the runs, the newest first; show one, compare two, or remove what old ones take on the disk.",
    invoke_without_command=True,
)

SHOWN = 20
NAMED = "Its id, the first letters of it, or `latest`."
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="Only runs on this dataset.", autocompletion=completion.datasets),
]


@app.callback()
def list_runs(
    context: typer.Context,
    dataset: Dataset = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="KIND",
            help="Only runs under this strategy.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DATE|7d", help="Only runs that began on this day or since; or so long ago."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="S", help="Only running, finished, failed, killed or crashed ones."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="METRIC", help="By test/accuracy or another metric, examples_per_second or bytes."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="So many at most; 20 where it is a table.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, the newest first."""
    if context.invoked_subcommand is not None:
        return
    with command(debug):
        from tasks import runs
        from tasks.operations import pipeline

        when = runs.moment(since, "--since") if since is not None else None
        choice = runs.RunFilter(dataset, strategy, when, status and status.lower())
        metric = f"test/{sort}" if sort and "/" not in sort and sort not in runs.FIGURES else sort
        limit = limit if limit is not None or json else SHOWN
        found = runs.list_runs(choice, metric, metric is not None and pipeline.lower_is_better(metric), limit)
        if json:
            print(found.model_dump_json())
            return
        from flows.cli import run_tables

        run_tables.print_runs(found, metric)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="RUN", help=NAMED, autocompletion=completion.runs)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one run: its settings, where it comes from, what came of it, and what lies in its folder."""
    with command(debug):
        from flows.cli import run_tables
        from tasks import runs

        found = runs.show(runs.resolve(name))
        print(found.model_dump_json()) if json else run_tables.print_details(found)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=f"A run. {NAMED}", autocompletion=completion.runs)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", autocompletion=completion.runs)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what differs between two runs: settings, data, code, speed; and the test metrics with their intervals."""
    with command(debug):
        from flows.cli import run_tables
        from tasks import runs
        from tasks.reports import side_by_side

        found = side_by_side.differences(runs.resolve(first), runs.resolve(second))
        print(found.model_dump_json()) if json else run_tables.print_difference(found)


@app.command()
def prune(
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, metavar="N", help="All but the N newest runs.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="30d|DATE", help="Those that ended longer ago.")
    ] = None,
    not_registered: Annotated[
        bool, typer.Option("--not-registered", help="Those of which no model version was made.")
    ] = False,
    dataset: Dataset = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also runs that failed or were killed, which cannot be resumed then.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the checkpoints and models of finished runs that no registered version needs.

    Several options choose the runs that all of them choose. Records, metrics and pictures stay. A run of which a
    version in MLflow's registry was made, or that is at work, is never pruned.
    """
    with command(debug):
        from flows.cli import run_tables
        from tasks import runs
        from tasks.operations import pipeline

        before = runs.moment(older_than, "--older-than") if older_than is not None else None
        selection = runs.Selection(keep_last, before, not_registered, dataset, unfinished)
        selection.check()
        done = runs.prune(selection, pipeline.registered_versions, dry_run)
        print(done.model_dump_json()) if json else run_tables.print_pruning(done)

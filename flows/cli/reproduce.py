"""`stratagem reproduce`: a run is trained once more, from its commit, its settings and its data."""

import sys
from typing import Annotated

import typer

from flows.cli import completion
from flows.cli.command import Debug, Json, command

DIFFERS = 1
"""The exit code where something else came out."""


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run by its id, the first letters of it, or `latest`.",
            autocompletion=completion.runs,
        ),
    ] = "latest",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what is otherwise today; nothing is trained.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Also with other packages, or on another machine.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a run once more, and tell whether the same comes out: the weights, else each metric within its interval.

    Code, settings and data are those of the run, in a folder of its own. Exit code 0: the same; 1: something else.
    """
    with command(debug):
        from flows.cli import run_tables
        from tasks.operations import reproduce

        done = reproduce.reproduce(name, allow_changes, dry_run)
        print(done.model_dump_json()) if json else run_tables.print_reproduction(done)
    if done.same is False:
        sys.exit(DIFFERS)

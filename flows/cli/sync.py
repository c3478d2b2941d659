"""`stratagem sync`: runs that were made without the team's MLflow server are brought to it."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command import Debug, Json, command


def sync(
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URI", help="http://HOST:PORT or sqlite:///FILE; without it MLFLOW_TRACKING_URI."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="The mlruns/ of another machine, copied whole; without it, this one's.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring runs that were made without the team's MLflow server to it, with their models and versions.

    What is there already is not made twice, and an interrupted sync goes on. A run that has not ended is left out.
    """
    with command(debug):
        from flows.cli import run_tables
        from tasks.operations import pipeline

        done = pipeline.sync(to, folder)
        print(done.model_dump_json()) if json else run_tables.print_sync(done)

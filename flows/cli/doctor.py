"""`stratagem doctor`: what is wrong with this machine or this project."""

from typing import Annotated

import typer

from flows.cli import completion
from flows.cli.command import Debug, Json, command


def doctor(
    checks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECK", help="Such as disk or dvc; without one, all.", autocompletion=completion.checks
        ),
    ] = None,
    devices: Annotated[
        bool, typer.Option("--devices", help="Also ask TensorFlow which devices it sees: some seconds.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at this machine and this project, and say what is wrong and which command mends it.

    It changes nothing. The exit code is 1 where there is an error; a warning alone is 0.
    """
    with command(debug):
        from tasks.operations import doctor

        health = doctor.examine(checks or (), devices)
        if json:
            print(health.model_dump_json())
        else:
            from flows.cli import tables

            tables.print_health(health)
    if health.worst == "error":
        raise typer.Exit(1)

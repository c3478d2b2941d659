"""`stratagem sweep`: parses, calls, prints."""

from typing import Annotated

import typer

from flows.cli import completion
from flows.cli.command import Debug, Json, command
from flows.cli.explanation import Explain, show


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
        from flows.cli import sweep_tables
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
            show(explanation.sweep(found, plan_of_sweep(found, parallel), trials), json)
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
        print(result.model_dump_json()) if json else sweep_tables.print_sweep(result)

"""`stratagem sweep`: parses, calls, prints."""

from typing import Annotated

import typer

from flows.command import Debug, Json, command


def sweep(
    space: Annotated[
        str, typer.Argument(metavar="SPACE", help="A name in recipes/sweeps/, or the path of a YAML file.")
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Try settings out of a space (Optuna's TPE), and train the best again on all examples, behind the gate.

    A sweep that was killed goes on by the same command, with the same trials. docs/sweep.md has the format of a space.
    """
    with command(debug):
        from flows import prefect_server, sweep_tables
        from tasks import dvc_data, pipeline, sweeps
        from tasks.errors import UserError
        from tasks.machine import without_collections
        from tasks.process import client

        for option, value, most in (("--trials", trials, 100_000), ("--parallel", parallel, 64)):
            if not 1 <= value <= most:
                raise UserError(f"{option} = {value}: give a number from 1 to {most:,}")
        found = sweeps.load(space)
        sweeps.refuse_foreign_cluster(found, pipeline.in_foreign_cluster(found.example))
        pipeline.check_writable()
        dvc_data.check_source(found.example.dataset)
        pipeline.check_devices(found.example)
        prefect_server.set_environment(debug)
        client.start_processes(found.example, with_cluster=False)
        server = prefect_server.start_server()
        with without_collections():
            from flows.reporting import run_flow
            from flows.sweep import sweep as sweep_flow

        if server is not None:
            server.await_ready()
        result = run_flow(sweep_flow, space, trials, parallel, fresh)
        client.stop_processes()
        print(result.model_dump_json()) if json else sweep_tables.print_sweep(result)

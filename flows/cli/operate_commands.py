"""The commands that operate a machine: `up`, `down`, `status`."""

from typing import Annotated, Any

import typer

from flows.cli.command import Debug, Json, command


def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when everything answers; `stratagem down` ends it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Start Prefect's server, the deployments, a worker and MLflow's pages on 127.0.0.1, and keep them running.

    What dies is started again, and a training that died with it goes on. Where all runs already, this says so and ends.
    Until Ctrl-C, or `stratagem down`.
    """
    with command(debug):
        from flows.operate import operation, supervisor
        from tasks.operations import preconditions

        preconditions.check_writable()
        supervisor.check_environment()
        if operation.is_held():
            print("It runs already.")
        elif detach:
            if not supervisor.start_in_background():
                print("It runs already.")
        elif supervisor.keep(lambda: _print_addresses("Ctrl-C ends all.")):
            return
        else:
            print("It runs already.")
        _print_addresses("`stratagem down` ends all.")


def _print_addresses(last: str) -> None:
    from flows.operate import operation

    state = operation.load()
    for one in state.services if state else ():
        if one.address:
            print(f"{one.name:9}{one.address}", flush=True)
    print("password mlruns/up/key has it, as user:password", flush=True)
    print("shell    source mlruns/up/environment", flush=True)
    print(last, flush=True)


def down(debug: Debug = False) -> None:
    """End what `stratagem up` keeps running; a training saves its step first, and goes on with the next `up`."""
    with command(debug):
        from flows.operate import operation

        print("Everything has ended." if operation.take_down() else "Nothing runs here.")


def status(json: Json = False, debug: Debug = False) -> None:
    """Tell what `stratagem up` keeps running, what trains, what waits and what comes next.

    The exit code is 0 where everything runs, and 1 where not.
    """
    with command(debug):
        from json import dumps

        from flows.operate import operation_status

        found: dict[str, Any] = operation_status.collect()
        print(dumps(found)) if json else operation_status.show(found)
        if not found["well"]:
            raise SystemExit(1)

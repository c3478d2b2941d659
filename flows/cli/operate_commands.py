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


def serve_input(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, metavar="N", help="Where trainings ask.")] = 5050,
    host: Annotated[
        str, typer.Option("--host", metavar="NAME", help="What the other machines reach this one by.")
    ] = "127.0.0.1",
    join: Annotated[
        str | None,
        typer.Option("--join", metavar="grpc://HOST:PORT", help="Be one more worker of a service that runs there."),
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open", help="Let whoever reaches this machine connect; without it nothing is started.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Gather and augment batches for trainings with `--set input.service=grpc://HOST:PORT`, until Ctrl-C.

    It is tf.data service, with a worker. It listens on all interfaces, asks no password, and reads files for whoever
    connects: let a firewall admit the cluster's machines alone, and say --open.
    """
    with command(debug):
        import re

        from tasks.process import client
        from tasks.system.errors import UserError
        from tasks.system.machine import is_free

        if join is not None and not re.fullmatch(r"grpc://[\w.-]+:\d{1,5}", join):
            raise UserError(f"--join {join!r}: give the address of a service, grpc://HOST:PORT")
        if not re.fullmatch(r"[\w.-]+", host):
            raise UserError(f"--host {host!r}: give a name or an address of this machine, without a port")
        if not open_to_all:
            raise UserError(
                "serve-input listens on all interfaces, asks no password, and reads files as you for whoever connects: "
                "give --open where a firewall or a private network keeps others away. On this machine alone, "
                "`--set input.service=local` needs no server"
            )
        if join is None and not is_free(port):
            raise UserError(f"--port {port}: it is taken. End what holds it, or give another one")
        address = join or f"grpc://{host}:{port}"

        def tell() -> None:
            print(f"serves trainings with --set input.service={address}; Ctrl-C ends it", flush=True)

        client.serve_input(address, host if join else None, tell)


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

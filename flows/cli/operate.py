"""The commands that operate a machine: its servers and worker, and what stays to be told to MLflow and Prefect."""

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.command import Debug, Json, command

if TYPE_CHECKING:
    from tasks.records import Sync


def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when everything answers; `stratagem down` ends it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Start Prefect's server, the deployments, a worker and MLflow's pages on 127.0.0.1, and keep them running.

    Programs that die restart, and a training that died with them continues. If everything runs already, the command
    says so and ends. It runs until Ctrl-C, or `stratagem down`.
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
        from flows.operate import operation_status

        found: dict[str, Any] = operation_status.collect()
        print(dumps(found)) if json else operation_status.show(found)
        if not found["well"]:
            raise SystemExit(1)


def ui(debug: Debug = False) -> None:
    """Serve the MLflow UI and a Prefect server on 127.0.0.1 until Ctrl-C."""
    with command(debug):
        from flows.operate import prefect_server
        from flows.operate.ui import serve

        prefect_server.set_environment(debug)
        serve()


def reconcile(json: Json = False, debug: Debug = False) -> None:
    """End the runs of killed processes in MLflow, Prefect and mlruns/, and deliver what MLflow was not told."""
    with command(debug):
        from flows.operate import prefect_server
        from tasks.operations import preconditions

        preconditions.check_writable()
        prefect_server.set_environment(debug)
        server = prefect_server.start_server()
        from flows.operate.reconciliation import reconcile

        if server is not None:
            server.await_ready()
        ended, kept = reconcile()
        if json:
            print(dumps({"ended": [record.model_dump() for record in ended], "undelivered": kept}))
            return
        for record in ended:
            print(f"{record.what} is {record.status} now: {record.reason}")
        for run_id in kept:
            print(f"run {run_id} has more to tell its MLflow store, which does not answer or is not the one set now")
        if not ended and not kept:
            print("There is nothing to end.")


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
        from tasks.operations import pipeline

        done = pipeline.sync(to, folder)
        print(done.model_dump_json()) if json else print_sync(done)


def print_sync(done: "Sync") -> None:
    """Print how many runs were brought to a store, and what stays to be seen to; the runs were told as they came."""
    from collections import Counter

    from tasks.system.errors import listed

    for note in done.notes:
        print(note)
    if not done.runs:
        print("There is no run to deliver.")
        return
    counts = Counter(one.outcome for one in done.runs)
    print(f"{done.to}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in sorted(counts))}")
    versions = [version for one in done.runs for version in one.versions]
    if versions:
        print(f"versions: {listed(versions)}")

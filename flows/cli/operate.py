"""The commands that operate a machine: servers, a worker, and copies to MLflow and Prefect."""

from collections import Counter

from flows.cli.command import Result, is_verbose, option
from flows.cli.tables import format_moment
from tasks.system import units
from tasks.system.errors import listed

MOST_LISTED = 20


def up(
    detach: bool = option("--detach -d", "Return when everything answers; `stratagem down` stops it."),
) -> None:
    """Start the servers, a worker and the schedules.

    Runs Prefect's server with the deployments, a worker and MLflow's pages on 127.0.0.1, until Ctrl-C or `stratagem
    down`. Restarts programs that die, and continues a training that died with them. If everything is running already,
    the command only applies the current prefect.yaml.
    """
    from flows.operate import operation
    from flows.operate import up as programs
    from tasks.operations import preconditions

    preconditions.check_writable()
    programs.check_environment()
    held = operation.is_held()
    if not held and not detach and programs.keep(lambda: _print_addresses("Press Ctrl-C to stop everything.")):
        return
    if held or not detach or not programs.start_in_background():
        print("It is already running.")
        programs.deploy()
    _print_addresses("`stratagem down` stops everything.")


def _print_addresses(last: str) -> None:
    from flows.operate import operation, servers

    state = operation.load()
    for one in state.services if state else ():
        if one.address:
            print(f"{one.name:9}{one.address}", flush=True)
        if one.name == "mlflow" and one.address:
            for name, address in servers.runs_links(one.address, operation.private_key()).items():
                print(f"runs     {address} ({name})", flush=True)
    print("password in mlruns/up/key, as user:password", flush=True)
    print("shell    source mlruns/up/environment", flush=True)
    if (removed := operation.folder() / "removed").exists():
        print(removed.read_text(encoding="utf-8"), end="", flush=True)
    print(last, flush=True)


def down() -> None:
    """Stop what `stratagem up` started.

    A training saves its step first, and continues with the next `up`.
    """
    from flows.operate import operation

    print("Everything has stopped." if operation.take_down() else "No servers are running.")


def status() -> Result:
    """Show what is running, waiting and scheduled.

    Also shows the progress of each training, the last result, and what failed or was stopped in the last 24
    hours.

    The exit code is 0 if everything that `stratagem up` starts is running, else 1.
    """
    from flows.operate import operation

    found = operation.collect()
    yield found
    if not found["up"]:
        print("No servers are running: `stratagem up` starts them.")
    elif found["pid"] is None:
        print("It is starting.")
    else:
        print(f"up since {format_moment(found['since'])}, process {found['pid']}, {found['phase']}")
        for one in found["services"]:
            how = "answers" if one["answers"] else "runs, does not answer" if one["runs"] else "is starting"
            count = "once" if one["restarts"] == 1 else f"{one['restarts']} times"
            again = f", restarted {count} (last: {one['last_end']})" if one["restarts"] else ""
            print(f"  {one['name']:9}{how:23}{one['address'] or one['log']}{again}")
        for one in found["deployments"]:
            when = "paused" if one["paused"] else "scheduled" if one["scheduled"] else "on request"
            if one["next"] and not one["paused"]:
                when = f"next {format_moment(one['next'])}"
            print(f"  {one['name']:20}{when}")
    for title in ("training", "waiting"):
        for one in found[title][:MOST_LISTED]:
            print(f"  {title:9}{one['name']}, {one['state']}, flow run {one['id']}")
        if len(found[title]) > MOST_LISTED:
            print(f"  {title:9}and {len(found[title]) - MOST_LISTED} more")
    for one in found["runs"]["running"]:
        left = f", about {units.duration(one['seconds_left'])} left" if one["seconds_left"] else ""
        print(f"  running  {one['name']}, epoch {one['epoch']} of {one['epochs']}{left}")
    if (latest := found["runs"]["latest"]) is not None:
        name = latest["headline"]
        result = f", {name} {units.metric(latest['metrics'][name])}" if name else ""
        print(f"  finished {latest['name']}{result}, {format_moment(latest['ended'])}")
    for how in ("stopped", "failed"):
        for name, reason in found["runs"][how].items():
            print(f"  {how:9}{name}, {reason}")
    for one in found["failed"]:
        print(f"  failed   {one['name']}, {one['state']}: {one['reason']}, flow run {one['id']}")
    if found["lost_notice"]:
        print("  the last notification could not be sent (STRATAGEM_NOTIFY): mlruns/notifications/lost")
    if not found["well"]:
        raise SystemExit(1)


def ui() -> None:
    """Serve MLflow's and Prefect's pages on 127.0.0.1 until Ctrl-C."""
    from flows.operate import prefect_server
    from flows.operate.servers import show_pages
    from tasks.operations import preconditions

    preconditions.check_writable()
    prefect_server.set_environment(is_verbose())
    show_pages()


def reconcile() -> Result:
    """Record in MLflow and Prefect which runs were killed.

    Also copies the runs that the MLflow server does not have.
    """
    from flows.operate import prefect_server
    from tasks.operations import pipeline, preconditions
    from tasks.runs import entries

    preconditions.check_writable()
    prefect_server.set_environment(is_verbose())
    server = prefect_server.start_server()
    from flows.operate.reconciliation import end_crashed_flow_runs

    if server is not None:
        server.await_ready()
    ended = [*end_crashed_flow_runs(), *pipeline.reconcile()]
    kept = [run.run_id for run in entries.find_uncopied()]
    yield {"ended": ended, "undelivered": kept}
    for record in ended:
        print(f"{record.what} is now {record.status}: {record.reason}")
    for run_id in kept:
        print(f"run {run_id} is not completely copied: the MLflow server does not answer, or is not set")
    if not ended and not kept:
        print("There is nothing to record.")


def sync(
    to: str | None = option("--to", "http://HOST:PORT or sqlite:///FILE; by default MLFLOW_TRACKING_URI.", "URI"),
) -> Result:
    """Copy runs to a team's MLflow server.

    Copies their models and versions too, and registers models that waited for the server. Copies nothing twice,
    continues an interrupted sync, and skips runs that have not ended.
    """
    from tasks.operations import pipeline

    done = pipeline.sync(to)
    yield done
    for note in done.notes:
        print(note)
    if not done.runs:
        print("There are no runs to copy.")
        return
    counts = Counter(one.outcome for one in done.runs)
    print(f"{done.to}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in sorted(counts))}")
    versions = [version for one in done.runs for version in one.versions]
    if versions:
        print(f"versions: {listed(versions)}")

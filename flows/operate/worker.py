"""The worker that `stratagem up` keeps: `python -m flows.operate.worker [--deploy]`.

Before it becomes Prefect's worker, it makes the work pool and the deployments of prefect.yaml (`--deploy`), ends as
CRASHED the flow runs that the worker before it left at work, and lets them begin again: a training goes on from its
latest checkpoint. No other worker takes runs of this pool, so what runs there without one has no process any more.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import DeploymentSchedule, FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Crashed, Scheduled
from prefect.workers.process import ProcessWorker

from flows.operate import notifications, operation, reconciliation
from flows.operate.operation import POOL, WORKER
from tasks import config, runs
from tasks.process.environment import keep_private

AT_WORK = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
# So often a flow run is begun: one that ends its worker each time would do so for ever.
MAX_TRIES = 5
# By these a flow run could run any program, or allow itself what STRATAGEM_OWN_CODE forbids.
NOT_A_RUNS = ("command", "env", "working_dir")
# A run that crashes so long before its worker's last heartbeat has crashed by itself.
WITH_ITS_WORKER = timedelta(seconds=30)


def main() -> None:
    """Get ready, then become the worker."""
    keep_private()
    root = config.project_root()
    with get_client(sync_client=True) as client:
        if "--deploy" in sys.argv[1:]:
            _deploy(client, root)
        try:
            restart_crashed(client, find_last_heartbeat(client))
        except httpx.HTTPError as error:
            sys.exit(f"Prefect's server does not answer: {error}")
    command = ["worker", "start", "--pool", POOL, "--type", "process", "--name", WORKER, "--limit", "1"]
    os.execv(sys.executable, [sys.executable, "-m", "prefect", *command, "--install-policy", "never"])


def _deploy(client: SyncPrefectClient, root: Path) -> None:
    """Make the work pool, which lets one flow run be at work whatever deployment it is of, and the deployments."""
    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=job_template(), concurrency_limit=1)
    client.create_work_pool(pool, overwrite=True)
    paused = find_paused(client)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=root,
        env=os.environ | {"PROJECT_ROOT": str(root)},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        sys.exit("error: prefect.yaml cannot be deployed; the lines above say why")
    pause(client, paused, said_active())


class Paused(NamedTuple):
    """What a user has paused of a deployment."""

    whole: bool
    schedules: frozenset[str]


def find_paused(client: SyncPrefectClient) -> dict[uuid.UUID, Paused]:
    """Return what is paused on Prefect's pages: to deploy makes each schedule anew, as prefect.yaml has it."""
    found = {}
    for one in client.read_deployments():
        stopped = frozenset(_name_of(schedule) for schedule in one.schedules if not schedule.active)
        if one.paused or stopped:
            found[one.id] = Paused(bool(one.paused), stopped)
    return found


def said_active() -> set[tuple[str, str]]:
    """Return the schedules that prefect.yaml says to be active, by the deployment's name and their slug: it decides
    then, at each start."""
    return {
        (deployment["name"], schedule["slug"])
        for deployment in operation.deployments()
        for schedule in deployment.get("schedules") or ()
        if schedule.get("active") is True and "slug" in schedule
    }


def pause(client: SyncPrefectClient, paused: Mapping[uuid.UUID, Paused], but: Collection[tuple[str, str]] = ()) -> None:
    """Pause again what was: no run of it has begun since, because no worker asks for any before.

    Args:
        client: of the server.
        paused: what was.
        but: schedules that stay active, by the deployment's name and their slug.
    """
    for one in client.read_deployments():
        before = paused.get(one.id, Paused(False, frozenset()))
        if before.whole and not one.paused:
            client.pause_deployment(one.id)
        for schedule in one.schedules:
            if schedule.active and _name_of(schedule) in before.schedules and (one.name, schedule.slug) not in but:
                client.update_deployment_schedule(one.id, schedule.id, active=False)


def _name_of(schedule: DeploymentSchedule) -> str:
    """Return what a schedule is known by before and after a deployment; its id is another one then."""
    return schedule.slug or schedule.schedule.model_dump_json(exclude={"anchor_date"})


def job_template() -> dict[str, Any]:
    """Return what a flow run of the pool may say about its process: neither the command nor its folder nor a variable
    of its environment. Prefect's server refuses one that does."""
    template = ProcessWorker.get_default_base_job_template()
    for name in NOT_A_RUNS:
        # A variable that is left in the one alone is merged into the process' environment all the same.
        del template["job_configuration"][name], template["variables"]["properties"][name]
    template["variables"]["additionalProperties"] = False
    return template


def find_last_heartbeat(client: SyncPrefectClient) -> datetime:
    """Return the time of the last heartbeat of the worker before this one; now, if there was none."""
    workers = client.read_workers_for_work_pool(POOL)
    heartbeats = [one.last_heartbeat_time for one in workers if one.name == WORKER and one.last_heartbeat_time]
    return max(heartbeats, default=datetime.now(UTC))


def restart_crashed(client: SyncPrefectClient, last_heartbeat: datetime) -> None:
    """End the flow runs of the pool that have no process any more, and let them begin again.

    Args:
        client: of the server.
        last_heartbeat: of the worker before: what crashed after that, or just before, crashed with it.
    """
    dead = {run.id for run in _in_pool(client, *AT_WORK)}
    for path, end in runs.unreported():
        # Told to stop by the end of this service, where no server could be told any more: not by anybody who wants it
        # to end.
        if end.state == "CANCELLED" and end.flow_run_id in {str(run_id) for run_id in dead}:
            path.unlink(missing_ok=True)
    reconciliation.end_crashed_flow_runs()
    for run in _in_pool(client, *AT_WORK):
        wanted = run.state is not None and run.state.type == StateType.CANCELLING
        why = "its worker has ended"
        ended: State[Any] = Cancelled(message=why) if wanted else Crashed(message=why)
        reconciliation.end_flow_run(client, run.id, ended)
    for run in _in_pool(client, StateType.CRASHED):
        crashed_at = run.state.timestamp if run.state is not None else last_heartbeat
        if run.id not in dead and crashed_at < last_heartbeat - WITH_ITS_WORKER:
            continue
        if run.run_count >= MAX_TRIES:
            why = f"it was begun {run.run_count} times, and its worker ended each time: `prefect flow-run retry`"
            notifications.tell_failure(run.name, str(run.id), run.run_count + 1, why)
            continue
        # Its old time, so that it comes before what was asked for since then.
        when = run.expected_start_time or datetime.now(UTC)
        begin: State[Any] = Scheduled(scheduled_time=when, message="taken up again: its worker had ended")
        client.set_flow_run_state(run.id, begin, force=True)
        body = f"Its worker had ended; it goes on from its latest checkpoint.\n\nflow run {run.id}"
        notifications.tell("restart", f"{run.name} is taken up again", body)
        print(f"flow run {run.name} ({run.id}) is taken up again", flush=True)


def _in_pool(client: SyncPrefectClient, *states: StateType) -> list[FlowRun]:
    """Return the flow runs of the pool in one of these states; the newest ones, as many as a server gives at once."""
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )


if __name__ == "__main__":
    main()

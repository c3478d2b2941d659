"""The worker that `stratagem up` keeps running: `python -m flows.operate.worker`.

It first creates the work pool and the deployments of prefect.yaml, sets flow runs that an earlier worker left behind to
CRASHED, and restarts them: a training continues from its latest checkpoint. Then it becomes Prefect's worker, and does
the same for a flow run whose own process dies. No other worker takes runs from this pool, so a run without this worker
has no process any more.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from prefect.cli import app as prefect_command
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
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.states import Cancelled, Crashed, Failed, Scheduled, exception_to_crashed_state
from prefect.workers.process import ProcessWorker

from flows.operate import notifications, operation, reconciliation
from flows.operate.operation import POOL, WORKER
from tasks import config
from tasks.process.child import set_up_process
from tasks.runs import outcome
from tasks.system.errors import UserError, cut

IN_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
# Without a limit, a flow run that always crashes would restart forever. The end of the worker, as on `down`, does not
# count as a crash of its flow runs: they get SIGTERM, and report this to Prefect if its server answers.
MAX_CRASHES = 2
WORKER_ENDED = "its worker ended"
SIGTERMED = asyncio.run(exception_to_crashed_state(TerminationSignal(signal.SIGTERM))).message
# How long a flow run of the worker before may take to save its step and report its SIGTERM.
ENDING = timedelta(minutes=1)
CRASHED_TWICE = "CrashedTwice"
# Labels of a flow run on Prefect's server: the number of crashes, and the state about which a notice was sent.
CRASHES, TOLD = "stratagem.crashes", "stratagem.told"
# With these a flow run could run any program, or allow itself what STRATAGEM_OWN_CODE forbids.
NOT_FOR_RUNS = ("command", "env", "working_dir")
WATCH_SECONDS = 15.0
# Prefect's worker reports a crash twice, 4 to 20 s apart, and the second report would undo a restart between them.
SETTLED = timedelta(seconds=30)
TOLD_WITHIN = timedelta(days=1)


def main() -> None:
    """Deploy, then become the worker."""
    set_up_process()
    began = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        try:
            deploy(client, config.project_root())
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        end_unfinished(client)
        restart_crashed(client, datetime.now(UTC), began)
    threading.Thread(target=_watch, args=(began,), daemon=True).start()
    os.environ["STRATAGEM_RESUMES"] = "1"  # For the flow runs, see `reporting.reported`.
    command = ["worker", "start", "--pool", POOL, "--type", "process", "--name", WORKER, "--limit", "1"]
    sys.argv = ["prefect", *command, "--install-policy", "never"]
    prefect_command()


def deploy(client: SyncPrefectClient, root: Path) -> None:
    """Create the work pool and the deployments of prefect.yaml, delete the pool's other deployments, and write a line
    about each removed deployment and schedule to mlruns/up/removed.

    The pool runs one flow run at a time, of any deployment. What the user paused on Prefect's page stays paused.

    Raises:
        UserError: Prefect refuses prefect.yaml, or a deployment has no name; the message is one line.
    """
    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=job_template(), concurrency_limit=1)
    client.create_work_pool(pool, overwrite=True)
    before = {one.name: one for one in client.read_deployments(work_pool_filter=IN_POOL)}
    # Where all schedules have slugs, Prefect keeps those that the file no longer has, and refuses new ones without.
    extra = [
        (one.id, client.create_deployment_schedules(one.id, [(one.schedules[0].schedule, False)])[0].id)
        for one in before.values()
        if one.schedules and all(schedule.slug for schedule in one.schedules)
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
            cwd=root,
            env=os.environ | {"PROJECT_ROOT": str(root)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for deployment, added in extra:
            with contextlib.suppress(ObjectNotFound):  # Prefect has replaced it.
                client.delete_deployment_schedule(deployment, added)
    if done.returncode:
        # Prefect prints a box for each deployment, and then why it refuses the last one, or a traceback.
        last = done.stdout.rpartition("╭")[2].partition("Skipping")[0].translate(dict.fromkeys(map(ord, "─╮│╰╯"), " "))
        raise _refused(f"{last} {done.stderr.strip().rpartition(chr(10))[2]}")
    file = yaml.safe_load((root / "prefect.yaml").read_text("utf-8"))
    wanted = {one.get("name"): one for one in file["deployments"]}
    if None in wanted:  # Prefect skips it.
        raise _refused("a deployment has no name")
    removed = []
    for one in client.read_deployments(work_pool_filter=IN_POOL):
        if one.name not in wanted:
            client.delete_deployment(one.id)
            removed.append(f"deployment {one.name} is not in prefect.yaml: it was deleted")
            continue
        kept = one.schedules
        if not wanted[one.name].get("schedules"):  # Prefect replaces all schedules if there are any, else keeps all.
            for schedule in one.schedules:
                client.delete_deployment_schedule(one.id, schedule.id)
            kept = []
        if one.name not in before:
            continue
        if before[one.name].paused:
            client.pause_deployment(one.id)
        were = before[one.name].schedules
        for schedule in kept:
            if schedule.active and any(not old.active and _is_same(old, schedule) for old in were):
                client.update_deployment_schedule(one.id, schedule.id, active=False)
        removed += [
            f"schedule '{old.slug or _times_of(old)}' of {one.name} is not in prefect.yaml: it was removed. Add it "
            "there to keep it"
            for old in were
            if not any(_is_same(old, schedule) for schedule in kept)
        ]
    (operation.folder() / "removed").write_text("".join(f"{line}\n" for line in removed), encoding="utf-8")


def _refused(why: str) -> UserError:
    return UserError(
        f"prefect.yaml cannot be deployed: {cut(why, 500).rstrip('.')}. Correct it, and run `stratagem up` again; the "
        "deployments above the wrong one may have changed already"
    )


def _times_of(schedule: DeploymentSchedule) -> str:
    said = schedule.schedule.model_dump(mode="json", exclude_none=True)
    return str(said.get("cron") or said.get("rrule") or said.get("interval"))


def _is_same(one: DeploymentSchedule, other: DeploymentSchedule) -> bool:
    """Return whether two schedules have the same slug or, if one of them has none, the same times."""
    both = one.slug and other.slug
    return one.slug == other.slug if both else _times_of(one) == _times_of(other)


def job_template() -> dict[str, Any]:
    """Return the pool's job template without the variables for a process's command, folder and environment. Prefect's
    server rejects a flow run that sets them."""
    template = ProcessWorker.get_default_base_job_template()
    for name in NOT_FOR_RUNS:
        # Prefect would merge a variable that stays in either of the two into the process's environment.
        del template["job_configuration"][name], template["variables"]["properties"][name]
    template["variables"]["additionalProperties"] = False
    return template


def end_unfinished(client: SyncPrefectClient) -> None:
    """End the flow runs of the pool that have no process any more."""
    dead = _in_pool(client, StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
    for path, end in outcome.unreported():
        # `up` stopped this run when it ended, without a server to report to; the user did not cancel the run.
        if end.state == "CANCELLED" and end.flow_run_id in {str(run.id) for run in dead}:
            path.unlink(missing_ok=True)
    reconciliation.end_crashed_flow_runs()
    for run in dead:
        cancelled = run.state is not None and run.state.type == StateType.CANCELLING
        ended: State[Any] = Cancelled(message=WORKER_ENDED) if cancelled else Crashed(message=WORKER_ENDED)
        reconciliation.end_flow_run(client, run.id, ended)


def restart_crashed(client: SyncPrefectClient, before: datetime, began: datetime) -> None:
    """Restart flow runs that crashed up to ``before``; fail and report those that have crashed ``MAX_CRASHES`` times.

    Args:
        client: talks to Prefect's server.
        before: newer crashes may not have settled.
        began: when this worker began. The end of the one before, which is no crash, ended its flow runs.
    """
    for run in _in_pool(client, StateType.CRASHED):
        if run.state is None or run.state.timestamp > before:
            continue
        why = run.state.message or "its process died"
        # Prefect counts the starts, but only those after which the flow was running.
        with_worker = why == WORKER_ENDED or (why == SIGTERMED and run.state.timestamp < began + ENDING)
        crashes = int(str(run.labels.get(CRASHES, 0))) + (not with_worker)
        if crashes >= MAX_CRASHES:
            reason = (
                f"{why}\n\nIt has crashed {crashes} times. `Retry` on Prefect's page, or `prefect flow-run retry "
                f"{run.id}`, continues from its latest checkpoint, if there is one."
            )
            notifications.tell_failure(run.name, str(run.id), run.run_count, reason)
            failed: State[Any] = Failed(name=CRASHED_TWICE, message=reason)  # Its page shows the reason, too.
            client.set_flow_run_state(run.id, failed, force=True)
            continue
        # Keep its original time, so that it comes before newer requests.
        when = run.expected_start_time or datetime.now(UTC)
        client.set_flow_run_state(run.id, Scheduled(scheduled_time=when, message=f"restarted: {why}"), force=True)
        client.update_flow_run_labels(run.id, {CRASHES: crashes})
        how = "continues from its latest checkpoint" if run.run_count else "starts again"
        notifications.tell("restart", f"{run.name} restarts after a crash", f"{why}\n\nIt {how}.\n\nflow run {run.id}")
        print(f"flow run {run.name} ({run.id}) restarts: {why}", flush=True)


def report_rejected(client: SyncPrefectClient) -> None:
    """Report, once and on their day, the flow runs that Prefect itself failed before they ran, for example because of a
    wrong parameter."""
    for run in _in_pool(client, StateType.FAILED):
        if run.run_count or run.state is None or run.state.name == CRASHED_TWICE:
            continue
        told = run.labels.get(TOLD) == str(run.state_id)
        if not told and run.state.timestamp > datetime.now(UTC) - TOLD_WITHIN:
            notifications.tell_failure(run.name, str(run.id), 0, run.state.message or "Prefect did not start it")
            client.update_flow_run_labels(run.id, {TOLD: str(run.state_id)})


def _watch(began: datetime) -> None:
    """Restart flow runs whose process dies, for example for lack of memory; report those that Prefect rejects."""
    while True:
        time.sleep(WATCH_SECONDS)
        try:
            with get_client(sync_client=True) as client:
                restart_crashed(client, datetime.now(UTC) - SETTLED, began)
                report_rejected(client)
        except reconciliation.LEFT_FOR_LATER as error:
            print(f"cannot look for crashed flow runs, will try again: {error}", file=sys.stderr, flush=True)


def _in_pool(client: SyncPrefectClient, *states: StateType) -> list[FlowRun]:
    """Return the pool's newest flow runs in one of these states, as many as one answer of the server holds."""
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))),
        work_pool_filter=IN_POOL,
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )


if __name__ == "__main__":
    main()

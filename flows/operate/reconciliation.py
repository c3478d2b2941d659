"""Flow runs whose process was killed, which Prefect would take for RUNNING for ever."""

import uuid
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks import runs
from tasks.operations import pipeline
from tasks.records import Ended

# A flow run of another server, or a server that is away or does not let us: it is left to that one, or a later start.
# What is no id at all stops no start either.
LEFT_FOR_LATER = (ObjectNotFound, httpx.HTTPError, ValueError)


def reconcile() -> tuple[list[Ended], list[str]]:
    """End the flow runs and runs of processes that died; return those, and the runs that MLflow cannot be told of.

    Raises:
        StratagemError: the MLflow store cannot be used, or does not answer.
    """
    ended = [*end_crashed_flow_runs(), *pipeline.reconcile()]
    return ended, runs.undelivered()


def end_crashed_flow_runs() -> list[Ended]:
    """End the flow runs of this host whose process died, with the tasks that were running in them, as CRASHED; those
    whose server was not told how they ended, as they did."""
    ended = _report_ended()
    for path, holder in runs.crashed_holders():
        # One that was told to go on is at work again, as this process: its holder is the process that died.
        if holder.flow_run_id not in (None, flow_run.id):
            reason = f"process {holder.pid} on {holder.host} died"
            with get_client(sync_client=True) as client:
                try:
                    ended_now = end_flow_run(client, uuid.UUID(str(holder.flow_run_id)), Crashed(message=reason))
                except LEFT_FOR_LATER:
                    continue
            if ended_now:
                ended.append(Ended(what=f"Prefect flow run {holder.flow_run_id}", status="CRASHED", reason=reason))
        path.unlink(missing_ok=True)
    return ended


def _report_ended() -> list[Ended]:
    """Tell the server of flow runs that came to their end while it was down."""
    ended = []
    for path, end in runs.unreported():
        if end.flow_run_id == flow_run.id:
            path.unlink(missing_ok=True)
            continue
        with get_client(sync_client=True) as client:
            state: State[Any] = State(type=StateType(end.state), message=end.message or None)
            try:
                ended_now = end_flow_run(client, uuid.UUID(end.flow_run_id), state)
            except LEFT_FOR_LATER:
                continue
        if ended_now:
            reason = "it ended while Prefect's server did not answer"
            ended.append(Ended(what=f"Prefect flow run {end.flow_run_id}", status=end.state, reason=reason))
        path.unlink(missing_ok=True)
    return ended


def end_flow_run(client: SyncPrefectClient, flow_run_id: uuid.UUID, state: "State[Any]") -> bool:
    """End a flow run and its tasks; return whether it had no final state before."""
    found = client.read_flow_run(flow_run_id)
    tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[found.id])))
    for task_run in tasks:
        if not _is_final(task_run):
            client.set_task_run_state(task_run.id, state, force=True)
    if _is_final(found):
        return False
    client.set_flow_run_state(found.id, state, force=True)
    return True


def _is_final(run: FlowRun | TaskRun) -> bool:
    return run.state is None or run.state.is_final()

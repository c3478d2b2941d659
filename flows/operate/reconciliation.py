"""Flow runs whose process was killed, which Prefect would take for RUNNING for ever."""

import uuid
from collections.abc import Iterator
from pathlib import Path
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
# What is not an id at all stops no start either.
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
    ended = []
    for path, flow_run_id, state, reason in _to_be_ended():
        # This flow run may be one of them, begun again: the file is of the process that died.
        if flow_run_id not in (None, flow_run.id):
            with get_client(sync_client=True) as client:
                try:
                    ended_now = end_flow_run(client, uuid.UUID(str(flow_run_id)), state)
                except LEFT_FOR_LATER:
                    continue
            if ended_now:
                ended.append(Ended(what=f"Prefect flow run {flow_run_id}", status=state.type.value, reason=reason))
        path.unlink(missing_ok=True)
    return ended


def _to_be_ended() -> Iterator[tuple[Path, str | None, "State[Any]", str]]:
    """Yield the file that says so, the id, the state to end in and the reason of each flow run that is at its end."""
    for path, end in runs.unreported():
        state: State[Any] = State(type=StateType(end.state), message=end.message or None)
        yield path, end.flow_run_id, state, "it ended while Prefect's server did not answer"
    for path, holder in runs.crashed_holders():
        reason = f"process {holder.pid} on {holder.host} died"
        yield path, holder.flow_run_id, Crashed(message=reason), reason


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

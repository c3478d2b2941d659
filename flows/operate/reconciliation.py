"""Ends flow runs whose process was killed, which Prefect would show as RUNNING forever."""

import uuid
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from tasks.records import Ended
from tasks.runs import locks, outcome

# The flow run belongs to another server, the server does not answer or denies access, or the id is invalid: none of
# these stops a start, and a later start tries again.
LEFT_FOR_LATER = (ObjectNotFound, httpx.HTTPError, ValueError)


def end_crashed_flow_runs() -> list[Ended]:
    """Set the flow runs of this host whose process died, and their running tasks, to CRASHED; set those that ended
    without a server to report to to their final state."""
    ends: list[tuple[Path, str | None, State[Any], str]] = []
    for path, end in outcome.unreported():
        state: State[Any] = State(type=StateType(end.state), message=end.message or None)
        ends.append((path, end.flow_run_id, state, "it ended while Prefect's server did not answer"))
    for path, holder in locks.crashed_holders():
        reason = f"process {holder.pid} on {holder.host} died"
        ends.append((path, holder.flow_run_id, Crashed(message=reason), reason))
    ended = []
    for path, flow_run_id, state, reason in ends:
        # This flow run may be one of them, restarted: the file belongs to the process that died.
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

"""Reports a flow to its Prefect server, and keeps its result if that server is lost.

MLflow and the run's folder hold a result before Prefect does. If the server dies before the flow ends, the result must
not be lost, hidden or computed again: the flow ends without another request to the server, the command prints the
result with one warning, and mlruns/unreported/ keeps the flow's final state until a later start reaches the server.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast

import httpx
from prefect import Flow
from prefect.artifacts import create_markdown_artifact
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.exceptions import Abort, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from prefect.states import Cancelled, Crashed

from flows.operate import deployed, notifications, reconciliation
from flows.operate.prefect_server import answers
from tasks.process.child import set_up_process
from tasks.records import FlowEnd, Record, Run
from tasks.runs.outcome import keep_unreported
from tasks.system.errors import Interrupted, ProcessDied, one_line, terminate

R = TypeVar("R", bound=Record)

# A restarting server needs some seconds.
PATIENCE_SECONDS = 10.0
CONTINUES = "The same command continues"


class Outcome(Abort):
    """How a flow ended. As an exception it ends the flow without another request to the server: Prefect's engine
    reports everything that a flow raises except an `Abort`."""

    def __init__(self, returned: Any = None, error: Exception | None = None) -> None:
        super().__init__("the flow has ended, and its Prefect server does not answer")
        self.returned = returned
        self.error = error
        self.flow_run_id: str | None = flow_run.id

    def keep(self) -> None:
        """Save the final state, to report it later."""
        state: Literal["COMPLETED", "FAILED", "CANCELLED"] = "COMPLETED"
        if self.error is not None:
            state = "CANCELLED" if isinstance(self.error, Interrupted) else "FAILED"
        if self.flow_run_id is not None:
            keep_unreported(FlowEnd(flow_run_id=self.flow_run_id, state=state, message=str(self.error or "")))


_outcome: ContextVar[Outcome | None] = ContextVar("outcome", default=None)


def reported(body: Callable[[], R]) -> R:
    """Run a flow's body and return its result, which Prefect's engine reports; first end flow runs that crashed.

    Raises:
        Outcome: the server does not answer.
        Exception: what the body raised.
    """
    set_up_process()
    if not deployed.is_deployed() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, terminate)  # Prefect's own handler would hide that the step was saved.
    try:
        reconciliation.end_crashed_flow_runs()
        outcome = Outcome(returned=body())
    except (Interrupted, KeyboardInterrupt, TerminationSignal) as stop:
        if isinstance(stop, TerminationSignal) and _server_answers(0.0):
            raise  # Prefect's engine reports it, and the worker continues the flow run.
        code = 128 + stop.signal if isinstance(stop, TerminationSignal) else getattr(stop, "exit_code", 130)
        said = str(stop) if isinstance(stop, Interrupted) else "the run was stopped"
        outcome = Outcome(error=Interrupted(said if CONTINUES in said else f"{said}. {CONTINUES}", code))
    except Exception as error:
        if isinstance(error, ProcessDied) and "STRATAGEM_RESUMES" in os.environ and _server_answers(PATIENCE_SECONDS):
            return cast(R, Crashed(message=str(error)))  # The worker restarts the flow run, or reports it.
        outcome = Outcome(error=error)
        # Before Prefect, because this process ends if reporting to Prefect fails.
        name = flow_run.name or "a flow run"
        notifications.tell_failure(name, flow_run.id, flow_run.run_count or 1, str(error) or one_line(error))
    _outcome.set(outcome)
    # The user who stopped the run is waiting for the command to end, so the server gets no time to come back.
    if not _server_answers(0.0 if isinstance(outcome.error, Interrupted) else PATIENCE_SECONDS):
        outcome.keep()
        raise outcome
    if isinstance(outcome.error, Interrupted):
        # Prefect reads the run's state from it, and `run_flow` the exit code.
        return cast(R, Cancelled(message=str(outcome.error), data=outcome.error.exit_code))
    if outcome.error is not None:
        raise outcome.error
    returned: R = outcome.returned
    return returned


def publish(page: str, key: str, description: str) -> None:
    """Add a Markdown page to the flow run if a server answers."""
    if _server_answers(0.0):
        with contextlib.suppress(httpx.HTTPError):  # The server has just died; `reported` handles that.
            create_markdown_artifact(page, key=key, description=description)


def report_link(run: Run) -> str | None:
    """Return the address of a run's report in MLflow, if `stratagem up` serves MLflow's pages."""
    pages = os.environ.get("STRATAGEM_MLFLOW_PAGES")
    return pages and f"{pages}/#/experiments/0/runs/{run.run_id}/artifacts/evaluation/report.html"


def run_flow(flow: Flow[..., R], *arguments: Any) -> R:
    """Run a flow from a command and return the result of its body, even if the server has died.

    Raises:
        Interrupted: the run was stopped.
        Exception: it failed.
    """
    # Without a server, drop Prefect's events soon and silently. By default, Prefect tries a dozen events for
    # eight seconds each while Python exits.
    if not emit_events_to_cloud():
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)
    logging.raiseExceptions = False  # Prefect's log handler would print what it could not send.
    # The heartbeat's thread would delay the end by up to a second; `reconciliation` finds flows that died.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        _outcome.set(None)
        try:
            state: Any = flow(*arguments, return_state=True)
            if state.is_cancelled():  # Prefect puts the exit code into a record of its own.
                raise Interrupted(state.message or "the run was stopped", getattr(state.data, "result", state.data))
            ended: R = state.result()
            return ended
        except (Outcome, httpx.HTTPError) as lost:
            outcome = _outcome.get()
            if outcome is None:  # The body has not ended.
                raise
            outcome.keep()
            print(
                "warning: Prefect's server no longer answers; the next run, or `stratagem reconcile`, reports "
                "to it how this run ended",
                file=sys.stderr,
            )
            if outcome.error is not None:
                raise outcome.error from lost
            returned: R = outcome.returned
            return returned


def _server_answers(seconds: float) -> bool:
    url = get_current_settings().api.url
    return url is None or answers(url, seconds)

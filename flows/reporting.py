"""What a flow tells its Prefect server, and what becomes of its result when that server is gone: it stands.

A run's result is in MLflow and in its folder before Prefect learns of it. A server that died meanwhile must not lose
it, hide it or have it made again: the flow ends without asking the server anything more, the command prints the result
with one warning, and what the server has to be told is kept in mlruns/unreported/ for the next start that finds it.
"""

import base64
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import httpx
from prefect import Flow, State
from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker, emit_events_to_cloud
from prefect.exceptions import Abort, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from prefect.states import Cancelled

from flows.operate import notifications
from flows.operate.prefect_server import answers
from tasks import runs
from tasks.records import FlowEnd, Record
from tasks.system.errors import Interrupted, one_line

R = TypeVar("R", bound=Record)

# An own server that restarts needs some seconds; one of the user's may be on its way back.
PATIENCE_SECONDS = 10.0


class Outcome(Abort):
    """How a flow ended. As an exception it ends the flow without a word to the server: of all that a flow can raise,
    Prefect's engine reports everything but an `Abort`."""

    def __init__(self, returned: Any = None, error: Exception | None = None) -> None:
        super().__init__("the flow has ended, and its Prefect server does not answer")
        self.returned = returned
        self.error = error
        self.flow_run_id: str | None = flow_run.id

    def keep(self) -> None:
        """Keep what the server has to be told."""
        state: Literal["COMPLETED", "FAILED", "CANCELLED"] = "COMPLETED"
        if self.error is not None:
            state = "CANCELLED" if isinstance(self.error, Interrupted) else "FAILED"
        if self.flow_run_id is not None:
            runs.keep_unreported(FlowEnd(flow_run_id=self.flow_run_id, state=state, message=str(self.error or "")))


_outcome: ContextVar[Outcome | None] = ContextVar("outcome", default=None)


def reported(body: Callable[[], R]) -> R:
    """Run a flow's body and return what it returned, for Prefect's engine to report.

    Raises:
        Outcome: the server is gone.
        Exception: what the body raised.
    """
    try:
        outcome = Outcome(returned=body())
    except Exception as error:
        outcome = Outcome(error=error)
        if not isinstance(error, Interrupted):
            # Before Prefect learns of it: where that fails, this process ends.
            name = flow_run.name or "a flow run"
            notifications.tell_failure(name, flow_run.id, flow_run.run_count or 1, str(error) or one_line(error))
    except (KeyboardInterrupt, TerminationSignal) as stop:
        if _server_answers(0.0):
            raise  # Prefect's engine reports it, and ends the command as the signal does.
        number = stop.signal if isinstance(stop, TerminationSignal) else signal.SIGINT
        outcome = Outcome(error=Interrupted("the run was stopped", 128 + number))
    _outcome.set(outcome)
    # The user who stopped the run is waiting for the command to end, so the server gets no time to come back.
    if not _server_answers(0.0 if isinstance(outcome.error, Interrupted) else PATIENCE_SECONDS):
        outcome.keep()
        raise outcome
    if isinstance(outcome.error, Interrupted):
        # Prefect takes it for the run's state, and `result` for the exit code.
        return cast(R, Cancelled(message=str(outcome.error), data=outcome.error.exit_code))
    if outcome.error is not None:
        raise outcome.error
    returned: R = outcome.returned
    return returned


def publish(page: str, key: str, description: str) -> None:
    """Show a page at the flow run, where there is a server to show it."""
    if _server_answers(0.0):
        with contextlib.suppress(httpx.HTTPError):  # It died just now. `reported` says so.
            create_markdown_artifact(page, key=key, description=description)


def publish_report(run_folder: Path, run_id: str) -> None:
    """Show the learning curve of a run at the flow run, and a link to its report where `stratagem up` serves it."""
    if not _server_answers(0.0):
        return
    picture, pages = run_folder / "report" / "learning_curve.png", os.environ.get("STRATAGEM_MLFLOW_PAGES")
    with contextlib.suppress(httpx.HTTPError, OSError):
        # Prefect shows what an address leads to; this one holds the picture itself, so that no server must have it.
        held = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
        create_image_artifact(held, key="learning-curve", description="loss and accuracy by epoch")
    if pages:
        with contextlib.suppress(httpx.HTTPError):
            address = f"{pages}/#/experiments/0/runs/{run_id}/artifacts/evaluation/report.html"
            create_link_artifact(
                address, link_text="the report, in MLflow", key="report", description="how good it is, where it fails"
            )


def run_flow(flow: Flow[..., R], *arguments: Any) -> R:
    """Run a flow from a command and return what its body returned, also when its server has died.

    Raises:
        Interrupted: somebody stopped it.
        Exception: it failed.
    """
    _quiet_without_server()
    # A heartbeat's thread is waited for, up to a second, as a flow ends; what dies in the middle is found by the next
    # start (`reconciliation`).
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        _outcome.set(None)
        try:
            state: Any = flow(*arguments, return_state=True)
            ended: R = result(state)
            return ended
        except (Outcome, httpx.HTTPError) as lost:
            outcome = _outcome.get()
            if outcome is None:  # Nothing has come of it yet.
                raise
            outcome.keep()
            print(
                "warning: Prefect's server does not answer any more; the next run, or `stratagem reconcile`, tells it "
                "how this one ended",
                file=sys.stderr,
            )
            if outcome.error is not None:
                raise outcome.error from lost
            returned: R = outcome.returned
            return returned


def _quiet_without_server() -> None:
    """Let Prefect give up soon, and silently, what it sends beside the flow."""
    # Events: by default each is tried for eight seconds, a dozen of them one after another while Python ends.
    if not emit_events_to_cloud():
        EventsWorker.set_client_override(PrefectEventsClient, reconnection_attempts=2)
    logging.raiseExceptions = False  # Its log handler writes to the terminal what it could not send.


def _server_answers(seconds: float) -> bool:
    url = get_current_settings().api.url
    return url is None or answers(url, seconds)


def result(state: State[R]) -> R:
    """Return what a flow run returned.

    Raises:
        Interrupted: somebody stopped it.
        Exception: it failed.
    """
    if state.is_cancelled():
        kept: Any = state.data  # Prefect puts it into a record of its own.
        raise Interrupted(state.message or "the run was stopped", getattr(kept, "result", kept))
    returned: R = state.result()
    return returned

"""Which flow runs the worker of `stratagem up` restarts and reports; test_operation.py kills real ones."""

import contextlib
import os
import subprocess
import sys
import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed, Failed, Running, Scheduled
from typer.main import get_command

from flows import reporting
from flows.cli import main
from flows.operate import notifications, operation, servers, worker
from tasks.records import Operation, ServiceState
from tasks.system.errors import Interrupted, ProcessDied, StratagemError, Terminated, UserError
from tests.tasks.written_runs import run_id_of, write_run

NOW = datetime.now(UTC)


class Server:
    """Prefect's server with one flow run."""

    def __init__(self, state, starts):
        self.run = FlowRun(flow_id=uuid.uuid4(), name="a-training", run_count=starts)
        self.set_flow_run_state(self.run.id, state)

    def read_flow_runs(self, flow_run_filter, **others):
        return [self.run] if self.run.state.type in flow_run_filter.state.type.any_ else []

    def set_flow_run_state(self, flow_run_id, state, force=True):
        self.run.state, self.run.state_id = state, uuid.uuid4()

    def update_flow_run_labels(self, flow_run_id, labels):
        self.run.labels |= labels

    def read_flow_run(self, flow_run_id):
        return self.run

    def read_task_runs(self, flow_run_filter):
        return []


@pytest.fixture
def told(monkeypatch):
    """The notices, by title and text."""
    told = []
    monkeypatch.setattr(notifications, "tell", lambda kind, title, body: told.append((title, body)))
    return told


@pytest.mark.parametrize("has_run", [True, False])
def test_a_flow_run_is_restarted_once_also_if_it_dies_before_it_runs(told, has_run):
    server = Server(Scheduled(), 0)
    for start in (1, 2):
        server.set_flow_run_state(server.run.id, Crashed(message="it died"))
        server.run.run_count = start if has_run else 0
        worker.restart_crashed(server, NOW - timedelta(minutes=1), NOW)
        assert server.run.state.is_crashed(), "Prefect may report the crash once more"
        for _ in range(2):
            worker.restart_crashed(server, datetime.now(UTC), NOW)
        assert server.run.state.type == (StateType.SCHEDULED if start == 1 else StateType.FAILED)
        worker.report_rejected(server)
    (restarted, how), (failed, reason) = told
    assert server.run.state.message in reason
    assert (restarted, failed) == ("a-training restarts after a crash", "a-training failed")
    assert ("continues from its latest checkpoint" in how) == has_run
    assert (
        f"it died\n\nIt has crashed 2 times. `Retry` on Prefect's page, or `prefect flow-run retry {server.run.id}`"
        in reason
    )


def test_what_a_worker_left_is_scheduled_before_the_next_worker_takes_a_newer_request(told, project, monkeypatch):
    server, taken = Server(Running(), 1), []
    monkeypatch.setattr(worker, "get_client", lambda sync_client: contextlib.nullcontext(server))
    monkeypatch.setattr(worker, "deploy", lambda client, root: None)
    monkeypatch.setattr(worker, "_watch", lambda began: None)
    monkeypatch.setattr(worker, "prefect_command", lambda: taken.append(server.run.state))
    monkeypatch.setattr(sys, "argv", ["worker"])
    monkeypatch.setenv("STRATAGEM_RESUMES", "1")
    worker.main()
    assert [state.message for state in taken] == [f"restarted: {worker.WORKER_ENDED}"]


@pytest.mark.parametrize("why", [worker.WORKER_ENDED, worker.SIGTERMED])
def test_a_worker_that_ended_is_no_crash_of_its_flow_runs(told, why):
    server = Server(Scheduled(), 0)
    for start in range(1, 6):
        server.set_flow_run_state(server.run.id, Crashed(message=why))
        server.run.run_count = start
        worker.restart_crashed(server, datetime.now(UTC), datetime.now(UTC))
        assert server.run.state.is_scheduled(), "a training of several days continues after each `down` and `up`"


def test_a_flow_run_that_gets_sigterm_while_its_worker_lives_has_crashed(told):
    server = Server(Scheduled(), 0)
    for start in (1, 2):
        server.set_flow_run_state(server.run.id, Crashed(message=worker.SIGTERMED))
        server.run.run_count = start
        worker.restart_crashed(server, datetime.now(UTC), NOW - timedelta(hours=1))
        assert server.run.state.is_scheduled() == (start == 1)


@pytest.mark.parametrize(("starts", "hours", "count"), [(0, 1, 1), (0, 25, 0), (1, 1, 0)])
def test_a_flow_run_that_prefect_rejects_is_reported_once_and_on_its_day(told, starts, hours, count):
    server = Server(Failed(message="wrong parameter", timestamp=NOW - timedelta(hours=hours)), starts)
    for _ in range(2):
        worker.report_rejected(server)
    assert len(told) == count
    assert all("wrong parameter" in text for _, text in told)


@pytest.mark.parametrize("resumes", [True, False])
def test_where_the_worker_resumes_a_training_that_dies_is_a_crash(told, monkeypatch, project, resumes):
    def dies():
        raise ProcessDied("the process that ran train died (SIGKILL)")

    monkeypatch.setattr(reporting, "_server_answers", lambda seconds: True)
    if not resumes:
        with pytest.raises(StratagemError, match="SIGKILL"):
            reporting.reported(dies)
        assert len(told) == 1
        return
    monkeypatch.setenv("STRATAGEM_RESUMES", "1")
    state = reporting.reported(dies)
    assert (state.type, state.message, told) == (StateType.CRASHED, "the process that ran train died (SIGKILL)", [])


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "the run was stopped"),
        (Terminated(), 143, "the run was stopped"),
        (Interrupted("start_run was interrupted", 143), 143, "start_run was interrupted"),
        (Interrupted("step 3 is saved. The same command continues"), 130, "step 3 is saved"),
    ],
    ids=str,
)
def test_a_flow_that_is_stopped_says_that_the_same_command_continues(told, monkeypatch, project, stop, code, said):
    def stopped():
        raise stop

    monkeypatch.setattr(reporting, "_server_answers", lambda seconds: True)
    state = reporting.reported(stopped)
    assert (state.type, state.data, told) == (StateType.CANCELLED, code, [])
    assert state.message == f"{said}. The same command continues"


BOX = "╭──────────╮\n│ Deploying nightly │\n╰──────────╯\n"
TRACEBACK = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'x'\n"


@pytest.mark.parametrize(
    ("text", "code", "out", "err", "why"),
    [
        ("", 1, f"{BOX}{BOX}1 validation error\ncron", "", "Deploying nightly 1 validation error cron"),
        ("", 1, f"{BOX}An exception occurred.\n", TRACEBACK, "Deploying nightly An.+: No module named 'x'"),
        ("", 1, "Invalid fields:\n  • nightly\n\nSkipping ...\nAn entrypoint", "", "Invalid fields: • nightly"),
        ("deployments: [{name: a}, {nam: b}]", 0, f"{BOX}Discovered unnamed", "", "a deployment has no name"),
    ],
)
def test_a_prefect_yaml_that_prefect_refuses_is_one_message(monkeypatch, tmp_path, text, code, out, err, why):
    (tmp_path / "prefect.yaml").write_text(text)
    schedule = SimpleNamespace(id="added", schedule=None, slug="nightly")
    deployed = [SimpleNamespace(id=name, name=name, schedules=[schedule]) for name in ("taken", "refused")]
    deleted = []

    def delete(deployment, added):
        deleted.append((deployment, added))
        if deployment == "taken":
            raise ObjectNotFound(Exception())

    client = SimpleNamespace(
        create_work_pool=lambda *given, **others: None,
        read_deployments=lambda **given: deployed,
        create_deployment_schedules=lambda *given: [schedule],
        delete_deployment_schedule=delete,
    )
    monkeypatch.setattr(
        subprocess, "run", lambda *given, **others: SimpleNamespace(returncode=code, stdout=out, stderr=err)
    )
    with pytest.raises(UserError, match=rf"^prefect\.yaml cannot be deployed: {why}\. Correct it, and .+ again"):
        worker.deploy(client, tmp_path)
    assert deleted == [("taken", "added"), ("refused", "added")]


def test_status_lists_flow_runs_that_failed_before_they_became_runs(project, monkeypatch, capsys):
    service = ServiceState(name="prefect", pid=os.getpid(), created=0, since="", address="http://127.0.0.1:9")
    state = Operation(pid=1, created=0, host="here", phase="ready", services=(service,))
    write_run(1, "FAILED", flow_run_id="1")
    became, never = (
        {"id": number, "name": "a-run", "state_type": "FAILED", "state_name": "Failed", "run_count": 0}
        | {"state": {"message": "Flow run encountered an exception: UserError: Validation failed:\n  if_changed\n"}}
        for number in ("1", "2")
    )

    def ask(address, path, body):
        wanted = body.get("flow_runs")
        if wanted is None or wanted["state"]["type"]["any_"] != ("FAILED", "CRASHED"):
            return []
        assert NOW - datetime.fromisoformat(wanted["end_time"]["after_"]) < timedelta(hours=25)
        return [became, never]

    for module, name, answer in (
        (operation, "load", lambda: state),
        (operation, "is_held", lambda: True),
        (operation, "find_process", lambda pid, created: object()),
        (operation, "ask", ask),
        (servers, "server_answers", lambda name, address, seconds: True),
    ):
        monkeypatch.setattr(module, name, answer)
    get_command(main.app)(["status"], standalone_mode=False)
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  failed")]
    assert failed == [
        f"  failed   {run_id_of(1)[:6]}-convnet2-one_device-fit, some reason",
        "  failed   a-run, Failed: Validation failed: if_changed, flow run 2",
    ]

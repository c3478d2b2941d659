"""`stratagem up` for real: what it starts, what it starts again, what it leaves, and who is told."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from flows.operate import operation
from tasks import records
from tasks.system.machine import find_process, free_ports
from tests.flows.receiver import Receiver
from tests.waiting import wait

pytestmark = pytest.mark.slow

TRAINS_A_WHILE = {
    "train.epochs": 150,
    "model.name": "mlp",
    "model.options": {"units": [16]},
    "checkpoint.every_epochs": 1,
}


@dataclass
class Operated:
    """A project with `stratagem up` in it, for the tests of this file one after another."""

    project: Path
    run: Callable[..., Any]
    environment: dict[str, str]
    receiver: Receiver
    asked: list[str]

    def private_key(self) -> str:
        return operation.private_key().partition(":")[2]

    def command(self, *args: str) -> Any:
        return self.run(["stratagem", *args], cwd=self.project, env=self.environment)

    def nightly_hour(self) -> int:
        """Return at which hour, UTC, prefect.yaml starts `nightly`: far from now."""
        (hour,) = re.findall(r'cron: "0 (\d+) ', (self.project / "prefect.yaml").read_text())
        return int(hour)

    def state(self) -> records.Operation:
        found = operation.load()
        assert found is not None
        return found

    def service(self, name: str) -> records.ServiceState:
        return next(one for one in self.state().services if one.name == name)

    def worker(self) -> psutil.Process:
        """Return the worker, which its guard keeps."""
        (worker,) = psutil.Process(self.service("worker").pid).children()
        return worker

    def family(self) -> list[psutil.Process]:
        """Return `up` and all that it started."""
        process = psutil.Process(self.state().pid)
        return [process, *process.children(recursive=True)]

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return what Prefect's server answers; a busy one is slow now and then, or its database is locked: 503."""

        def answered() -> tuple[Any] | None:
            answer = operation.ask(self.service("prefect").address, path, body)
            return None if answer is None else (answer,)

        return wait(f"an answer of {path}", answered)[0]

    def submit(self, **overrides: Any) -> str:
        """Ask for a run of the deployment `training` with these settings; return the flow run's id."""
        return self.submit_with(overrides={**TRAINS_A_WHILE, **overrides})

    def submit_with(self, **parameters: Any) -> str:
        """Ask for a run with any parameters."""
        (deployment,) = self.ask("deployments/filter", {"deployments": {"name": {"any_": ["training"]}}})
        given = {
            "parameters": parameters,
            "enforce_parameter_schema": False,
            "idempotency_key": uuid.uuid4().hex,  # Asked twice, as its answer was late, it is one flow run.
        }
        asked = self.ask(f"deployments/{deployment['id']}/create_flow_run", given)
        self.asked.append(asked["id"])
        return self.asked[-1]

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return self.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})[0]

    def states(self, flow_run_id: str) -> list[str]:
        """Return which states a flow run had, in their order."""
        address = f"{self.service('prefect').address}/api/flow_run_states/"
        auth = ("stratagem", self.private_key())
        answer: requests.Response = wait(
            "the answer", lambda: requests.get(address, params={"flow_run_id": flow_run_id}, auth=auth, timeout=60)
        )
        return [state["type"] for state in sorted(answer.json(), key=lambda state: state["timestamp"])]

    def trains(self, flow_run_id: str) -> bool:
        """Return whether a training has written a checkpoint that is not of a run before it."""
        for note in (self.project / "mlruns" / "active").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                run = json.loads(note.read_text())
                if run["flow_run_id"] == flow_run_id and run["run_id"]:
                    return bool(list(self.project.glob(f"mlruns/runs/{run['run_id']}/checkpoints/*/state.json")))
        return False


@pytest.fixture(scope="module")
def project_of_all(prepared_template, prefect_database, tmp_path_factory) -> Path:
    project = tmp_path_factory.mktemp("operated") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    home = project / "mlruns" / "up" / "prefect"
    home.mkdir(parents=True, mode=0o700)
    shutil.copy(prefect_database, home)
    (home / prefect_database.name).chmod(0o600)  # As a server that is started there makes it.
    return project


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """A receiver of notices."""
    receiver = Receiver(free_ports(1)[0])
    receiver.start()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """The flow runs that were asked for, by their ids."""
    return []


@pytest.fixture
def operated(project_of_all, receiver, asked, run, monkeypatch) -> Operated:
    monkeypatch.chdir(project_of_all)
    monkeypatch.delenv("PREFECT_HOME")
    environment = {
        "PYTHONPATH": str(project_of_all),
        "STRATAGEM_NOTIFY": f"json://me:{receiver.password}@127.0.0.1:{receiver.port}/told?cto=60&rto=60",
    }
    return Operated(project_of_all, run, environment, receiver, asked)


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays(project_of_all) -> Iterator[None]:
    yield
    with contextlib.chdir(project_of_all):
        state = operation.load()
    process = find_process(state.pid, state.created) if state else None
    if process is not None:
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def _assert_gone(family: list[psutil.Process]) -> None:
    def left() -> list[str]:
        found = []
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(one.cmdline()))
        return found

    wait("the end of all", lambda: not left(), 90)


@pytest.mark.exhaustive
def test_a_start_that_is_killed_leaves_no_process_and_a_wrong_environment_starts_none(operated, start):
    wrong = operated.command("status")
    assert (wrong.returncode, wrong.stdout) == (1, "No servers are running: `stratagem up` starts them.\n")
    assert operated.command("down").stdout == "No servers are running.\n"
    for name, value in {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "STRATAGEM_NOTIFY": "jsn://token",
    }.items():
        refused = operated.run(["stratagem", "up"], env=operated.environment | {name: value})
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.startswith(f"error: {name}"), refused.stderr
        assert "jsn://token" not in refused.stderr
    command = start("stratagem", "up", cwd=operated.project, **operated.environment)
    process = psutil.Process(command.process.pid)
    wait("its first children", lambda: len(process.children(recursive=True)) >= 4)
    family = process.children(recursive=True)
    command.process.kill()
    command.process.wait()
    _assert_gone(family)


def test_up_starts_everything_once_and_nobody_else_gets_in(operated):
    with ThreadPoolExecutor() as pool:  # Two at once: one is the second.
        second, up = sorted(
            pool.map(lambda _: operated.command("up", "--detach"), range(2)), key=lambda one: str(one.stdout)
        )
    for one in (up, second):
        assert one.returncode == 0, one.stderr + (operated.project / "mlruns" / "up" / "up.log").read_text()
    assert second.stdout.startswith("It is already running.\n")
    again = operated.command("up")
    assert again.returncode == 0
    assert again.stdout == "It is already running.\n" + up.stdout, "the same addresses"

    def planned() -> dict[str, Any] | None:
        found = json.loads(operated.command("status", "--json").stdout)
        nexts = {one["name"]: one["next"] for one in found["deployments"]}
        return found if found["well"] and nexts.get("nightly") else None  # A busy server is asked again.

    found = wait("the plan of the next nightly run", planned)
    assert [one["name"] for one in found["services"]] == ["prefect", "mlflow", "worker"]
    deployments = {one["name"]: one["next"] for one in found["deployments"]}
    assert deployments.keys() >= {"comparison", "nightly", "training"}
    assert deployments["nightly"].endswith(f"T{operated.nightly_hour():02}:00:00Z")
    shown = operated.command("status").stdout
    assert max(map(len, shown.splitlines())) <= 80, shown
    key = (operated.project / "mlruns" / "up" / "key").read_text().strip()
    password = key.partition(":")[2]
    for one in found["services"][:2]:
        path = "/api/flows/filter" if one["name"] == "prefect" else "/api/2.0/mlflow/experiments/search"
        for given, status in ((None, 401), ("guessed", 401), (password, 200)):
            auth = None if given is None else ("stratagem", given)
            asked = {"max_results": 1} if "mlflow" in path else {}
            answer = requests.post(one["address"] + path, json=asked, auth=auth, timeout=60)
            assert answer.status_code == status, (one["name"], given)
        for other in ({"Host": "attacker.example"}, {"Origin": "http://attacker.example"}):
            answer = requests.post(one["address"] + path, auth=("stratagem", password), headers=other, timeout=60)
            assert answer.status_code == 403, (one["name"], other)
    # A flow run says nothing about the process that it is: by these it could run any program, or allow itself more.
    (deployment,) = operated.ask("deployments/filter", {"deployments": {"name": {"any_": ["training"]}}})
    address = f"{operated.service('prefect').address}/api/deployments/{deployment['id']}/create_flow_run"
    for name, value in {"command": "touch planted", "env": {"STRATAGEM_OWN_CODE": "*"}, "working_dir": "/"}.items():
        asked = {"job_variables": {name: value}}
        answer = requests.post(address, json=asked, auth=("stratagem", password), timeout=60)
        assert (answer.status_code, name in answer.text) == (422, True), answer.text
    for process in operated.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            said = " ".join(process.cmdline())
            assert password not in said
            assert operated.receiver.password not in said
    for path in [operated.project / "mlruns" / "up", *(operated.project / "mlruns" / "up").rglob("*")]:
        with contextlib.suppress(FileNotFoundError):  # A state that is written is in its place a moment later.
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for process in operated.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            addresses = {one.laddr.ip for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
            assert addresses <= {"127.0.0.1"}, process.cmdline()


def test_prefect_yaml_is_the_truth_also_while_up_runs(operated):
    path = operated.project / "prefect.yaml"
    text = path.read_text()
    nightly = operated.nightly_hour()
    hour = (nightly + 1) % 24
    full_hour, quarter_past, half_past = (f"{minute} {hour} * * *" for minute in (0, 15, 30))

    def deployments() -> dict[str, Any]:
        return {one["name"]: one for one in operated.ask("deployments/filter", {})}

    def crons(name: str) -> list[str]:
        return [one["schedule"]["cron"] for one in deployments()[name]["schedules"]]

    for name in ("nightly", "training"):  # As Prefect's page does it.
        address = f"{operated.service('prefect').address}/api/deployments/{deployments()[name]['id']}/schedules"
        asked = [{"schedule": {"cron": quarter_past}, "active": True}]
        given = {"json": asked, "auth": ("stratagem", operated.private_key()), "timeout": 60}
        # A busy server of Prefect answers with 503 if its database is locked.
        wait("the schedule's creation", lambda address=address, given=given: requests.post(address, **given).ok)
    changed = yaml.safe_load(text)
    changed["deployments"] = [one for one in changed["deployments"] if one["name"] != "sweep"]
    for one in changed["deployments"]:
        if one["name"] == "nightly":
            one["schedules"] = [{"cron": full_hour}, {"cron": half_past, "slug": "second"}]
        if one["name"] == "training":
            one["schedules"] = [{"cron": f"0 {hour} * * 0", "slug": "weekly"}]
    path.write_text(yaml.safe_dump(changed))
    up = operated.command("up")
    assert up.returncode == 0, up.stderr
    removed = f"schedule '{quarter_past}' of {{}} is not in prefect.yaml: it was removed. Add it there to keep it"
    for line in ("deployment sweep is not in prefect.yaml: it was deleted", removed.format("nightly")):
        assert line in up.stdout.splitlines()
    assert removed.format("training") in up.stdout.splitlines()
    assert ({*crons("nightly")}, crons("training")) == ({full_hour, half_past}, [f"0 {hour} * * 0"])
    for schedules, expected in (([{"slug": "a"}, {"slug": "b"}], "ab"), ([{"slug": "b"}], "b"), ([{}], "")):
        last = next(one for one in changed["deployments"] if one["name"] == "nightly")
        last["schedules"] = [{"cron": full_hour} | one for one in schedules]
        path.write_text(yaml.safe_dump(changed))
        up = operated.command("up")
        assert up.returncode == 0, up.stderr
        assert {one["slug"] or "" for one in deployments()["nightly"]["schedules"]} == {*(expected or [""])}, schedules
        assert ("it was removed" in up.stdout) == (schedules != [{}]), "without its slug it has the same times"
    shown = operated.command("status").stdout
    assert {"nightly", "training"} <= {*shown.split()}
    assert re.findall(r"(?:nightly|training) +on request", shown) == [], "also before Prefect has planned the next run"
    assert "sweep" not in deployments()
    path.write_text("deployments: [\n")
    broken = operated.command("up")
    assert broken.returncode == 2, broken.stderr
    assert re.fullmatch(
        "error: prefect.yaml cannot be deployed: Unable to read .+ `stratagem up` again.+\n", broken.stderr
    )
    path.write_text(text)
    assert "schedule 'weekly' of training is not in prefect.yaml" in operated.command("up").stdout
    assert (crons("nightly"), crons("training")) == ([f"0 {nightly} * * *"], [])
    assert "sweep" in deployments()


def test_a_server_that_is_killed_is_started_again_on_its_address(operated):
    before = operated.service("mlflow")
    port = int(before.address.rpartition(":")[2])

    def started() -> bool:
        for place in ("127.0.0.1", "0.0.0.0"):  # Whoever has the port is told the password.
            with pytest.raises(OSError, match="Address already in use"):
                socket.create_server((place, port))
        return operated.service("mlflow").restarts == 1

    for process in psutil.Process(before.pid).children():
        process.kill()
    with ThreadPoolExecutor() as pool:
        auth = ("stratagem", operated.private_key())
        answer = pool.submit(requests.get, before.address, auth=auth, timeout=240)
        wait("another one", started)
        assert answer.result().status_code == 200, "it waited, and did not fail"
    wait("its answer", lambda: json.loads(operated.command("status", "--json").stdout)["well"])
    assert operated.service("mlflow").address == before.address
    assert operated.service("mlflow").last_end == "SIGKILL"
    (server,) = psutil.Process(operated.service("mlflow").pid).children()
    server.suspend()
    shown = operated.command("status")
    server.resume()
    assert (shown.returncode, "mlflow   runs, does not answer" in shown.stdout) == (1, True), shown.stdout


def test_a_killed_workers_run_has_crashed_and_is_taken_up_while_another_one_waits(operated):
    first = operated.submit()
    wait("its beginning", lambda: operated.flow_run(first)["state_type"] == "RUNNING")
    second = operated.submit(**{"train.epochs": 1, "train.seed": 1})
    wait("its first checkpoint", lambda: operated.trains(first))
    worker = operated.worker()
    flow_process = worker.children()[0]
    worker.kill()
    wait("both runs' ends", lambda: all(operated.flow_run(one)["state_type"] == "COMPLETED" for one in (first, second)))
    _assert_gone([flow_process])
    states = operated.states(first)
    assert states.index("CRASHED") < states.index("SCHEDULED", 1) < states.index("COMPLETED"), states
    one, other = operated.flow_run(first), operated.flow_run(second)
    assert one["run_count"] == 2
    assert other["start_time"] > one["end_time"], "one training at a time, the one that was taken up first"
    ended = [json.loads(path.read_text())["status"] for path in operated.project.glob("mlruns/runs/*/status.json")]
    assert ended == ["FINISHED", "FINISHED"], "the first one went on as the same run"
    artifacts = operated.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [first]}}})
    (page,) = [artifact["data"] for artifact in artifacts if artifact["key"] == "result"]
    assert operated.service("mlflow").address in page
    (found,) = re.findall(r"/runs/(\w+)/artifacts/([\w./]+)", page)
    assert list(operated.project.glob("mlruns/artifacts/*/{}/artifacts/{}".format(*found))), page


def test_restarts_results_and_failures_are_told(operated):
    titles = operated.receiver.titles()
    host = socket.gethostname()
    assert [title for title in titles if "mlflow restarts" in title] == [f"stratagem: mlflow restarts on {host}"]
    assert [title for title in titles if "worker restarts" in title] == [f"stratagem: worker restarts on {host}"]
    assert [title for title in titles if "restarts after a crash" in title] == [
        "stratagem: digits-one_device-fit restarts after a crash"
    ]
    gate = [title for title in titles if title.endswith(("is the champion", "is not a version"))]
    assert len(gate) == 2, titles
    for overrides, reason in (
        ({"model.initial": "0" * 32}, "unknown run"),
        ({"model.name": "os:system", "model.options": {}}, "a flow run may not name code to import"),
    ):
        failed = operated.submit(**overrides)
        wait("its failure", lambda failed=failed: operated.flow_run(failed)["state_type"] == "FAILED")
        (told,) = [one for one in operated.receiver.told if f"flow run {failed}" in one["message"]]
        assert told["title"].endswith(" failed")
        assert reason in told["message"]
    rejected = operated.submit_with(if_changed="maybe")  # Prefect checks parameters before it runs the flow.
    wait("that it is told", lambda: any(f"flow run {rejected}" in one["message"] for one in operated.receiver.told))
    assert operated.flow_run(rejected)["run_count"] == 0
    shown = json.loads(operated.command("status", "--json").stdout)["failed"]
    (reason,) = [one["reason"] for one in shown if one["id"] == rejected]
    assert "if_changed" in reason
    said = [path.read_text() for path in operated.project.glob("mlruns/up/*.log")]
    assert not [text for text in said if operated.receiver.password in text]


@pytest.mark.exhaustive
def test_a_flow_run_whose_process_or_training_dies_is_resumed_once_and_reported(operated):
    flow_run = operated.submit(**{"train.seed": 3, "train.epochs": 100_000})

    def reports(words: str) -> list[str]:
        mine = [told for told in operated.receiver.told if f"flow run {flow_run}" in told["message"]]
        return [told["message"] for told in mine if told["title"].endswith(words)]

    for starts, whom in ((1, ["tasks", "serve"]), (2, None)):
        wait("its start", lambda starts=starts: operated.flow_run(flow_run)["run_count"] == starts)
        wait("its first checkpoint", lambda: operated.trains(flow_run))
        wait("its process", lambda: operated.worker().children())
        (process,) = operated.worker().children()
        family = [process, *process.children(recursive=True)]
        (victim,) = [one for one in family if one.cmdline()[-2:] == whom] if whom else [process]
        victim.kill()
        wait("its end", lambda: operated.flow_run(flow_run)["state_type"] == "CRASHED")
        _assert_gone(family)
    assert "The machine may have run out of memory" in reports(" restarts after a crash")[0]
    wait("that it is told", lambda: reports(" failed"))
    assert f"prefect flow-run retry {flow_run}" in reports(" failed")[0]
    assert (len(reports(" restarts after a crash")), len(reports(" failed"))) == (1, 1)
    assert operated.flow_run(flow_run)["run_count"] == 2
    folders = [
        folder
        for folder in operated.project.glob("mlruns/runs/*")
        if json.loads((folder / "records" / "run.json").read_text())["flow_run_id"] == flow_run
    ]
    assert len(folders) == 1, "the same run went on"
    operated.ask(f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLED"}, "force": True})


@pytest.mark.exhaustive
def test_a_flow_run_that_dies_before_it_runs_is_started_twice(operated):
    flow_run = operated.submit_with(unknown=1)
    told = operated.receiver.told
    wait(
        "that it is told", lambda: any(one["title"].endswith(" failed") and flow_run in one["message"] for one in told)
    )
    mine = [one["title"].split(" ", 2)[2] for one in told if f"flow run {flow_run}" in one["message"]]
    assert mine == ["restarts after a crash", "failed"]
    assert operated.flow_run(flow_run)["run_count"] == 0
    assert flow_run in operated.command("status").stdout


@pytest.mark.exhaustive
def test_up_that_is_killed_leaves_no_process_and_the_next_one_goes_on(operated):
    (nightly,) = operated.ask("deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
    address = f"{operated.service('prefect').address}/api/deployments/{nightly['id']}"
    schedule = f"{address}/schedules/{nightly['schedules'][0]['id']}"
    auth = ("stratagem", operated.private_key())
    wait("the pause", lambda: requests.patch(schedule, json={"active": False}, auth=auth, timeout=60).ok)
    flow_run = operated.submit(**{"train.epochs": 100_000, "train.seed": 2})
    wait("its first checkpoint", lambda: operated.trains(flow_run))
    newer = operated.submit(**{"train.seed": 4})
    operated.asked.remove(newer)
    family = operated.family()
    addresses = [one.address for one in operated.state().services]
    temporary = operated.project / "mlruns" / "up" / "tmp"
    assert operated.worker().environ()["TMPDIR"] == str(temporary)
    (temporary / "prefect-workspace-attempt-1").write_text("what holds the password")
    os.kill(operated.state().pid, signal.SIGKILL)
    up = operated.command("up", "-d")  # At once: the others are ending.
    assert up.returncode == 0, up.stderr
    _assert_gone(family)
    assert [one.address for one in operated.state().services] == addresses
    assert not (temporary / "prefect-workspace-attempt-1").exists()
    wait("the training", lambda: operated.flow_run(flow_run)["run_count"] == 2 and operated.trains(flow_run))
    assert operated.flow_run(newer)["run_count"] == 0, "it waits"
    operated.ask(f"flow_runs/{newer}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    (again,) = operated.ask("deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
    assert [one["active"] for one in again["schedules"]] == [False], "paused on the page"


def test_down_lets_a_training_save_its_step_and_leaves_no_process(operated):
    flow_run = operated.asked[-1]
    if not operated.trains(flow_run):  # That of the test before trains if this is the weekly suite.
        flow_run = operated.submit(**{"train.epochs": 100_000, "train.seed": 3})
        wait("its first checkpoint", lambda: operated.trains(flow_run))
    family = operated.family()
    down = operated.command("down")
    assert (down.returncode, down.stdout) == (0, "Everything has stopped.\n"), down.stderr
    _assert_gone(family)
    (run,) = [
        record["run_id"]
        for path in operated.project.glob("mlruns/runs/*/records/run.json")
        if (record := json.loads(path.read_text()))["flow_run_id"] == flow_run
    ]
    ended = json.loads((operated.project / "mlruns" / "runs" / run / "status.json").read_text())
    assert ended["status"] == "KILLED", "the next `up` takes it up"
    assert " is saved. " in ended["reason"]
    with contextlib.closing(sqlite3.connect(operated.project / "mlruns/up/prefect/prefect.db")) as database:
        query = "SELECT state_name FROM flow_run WHERE id = ?"
        assert database.execute(query, (flow_run,)).fetchall() == [("Crashed",)], "the server ended after the worker"

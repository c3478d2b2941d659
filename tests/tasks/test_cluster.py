"""The processes of a cluster: who is asked what, and what happens to all of them when one is lost."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tasks import config
from tasks.process import cluster
from tasks.process.cluster import StageProcesses
from tasks.strategies import engines
from tasks.system import lifetime
from tasks.system.errors import Interrupted, Preempted, StratagemError, Terminated, UserError
from tasks.system.machine import free_ports
from tests.tasks.clusters import multi_worker, parameter_server, place_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_cpus")]  # Each starts processes.


# In place of `python -m tasks`: a process that does what plan.json says for its name and the number of its start.
MEMBER = """
import glob, json, os, signal, socket, sys, threading, time

task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']} {task['index']}"
starts = f"{name}.starts"
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\\n")
with open("plan.json") as file:
    plans = json.load(file)
with open(starts) as file:
    plan = plans.get(f"{name} #{len(file.readlines())}", "work")
lock, beaten = threading.Lock(), threading.Event()

def say(**values):
    with lock:
        print(json.dumps(values), flush=True)

def beat():
    while plan != "never begin":
        say(heartbeat=True)
        beaten.set()
        time.sleep(float(os.environ["STRATAGEM_HEARTBEAT_SECONDS"]))

def act():
    # All have begun: who is ended before it has, would count its next start as its first.
    waits = plan not in ("work", "never begin")
    while waits and sum(os.path.getsize(one) > 0 for one in glob.glob("*.starts")) < plans["members"]:
        time.sleep(0.01)
    if plan == "never begin":
        time.sleep(1000)
    beaten.wait()
    if plan == "die":
        print('{"half a li', end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)

def answer(request):
    with open("requests", "a") as file:
        file.write(json.dumps([name, request["stage"], sorted(request["arguments"])]) + "\\n")
    act()
    done = request["stage"] in plan.split(" in ")[1:] or " in " not in plan
    errors = {
        "lose a peer": dict(error="no peer", type="StratagemError", lost_peer=True),
        "fail": dict(error="it broke", type="StratagemError", lost_peer=False),
        "refuse": dict(error="train.epochs = 0", type="UserError"),
    }
    what = plan.split(" in ")[0]
    if done and what == "block":  # As in a collective: it reads nothing any more.
        time.sleep(1000)
    if done and what == "wait":
        return
    if done and what in errors:
        say(id=request["id"], **errors[what])
    else:
        if plan == "take a while":
            time.sleep(3)
        say(id=request["id"], record={"name": name, "stage": request["stage"]})
        if plan == "answer and die":
            os.kill(os.getpid(), signal.SIGKILL)

def interrupted(number, frame):
    if plan == "wait":
        say(id=last["id"], error="interrupted", type="Interrupted")

if sys.argv[1] == "serve" and task["type"] == "chief":
    # The chief of parameter servers serves at its own address.
    host, _, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"][0].rpartition(":")
    listening = socket.create_server((host, int(port)))
signal.signal(signal.SIGINT, interrupted)
threading.Thread(target=beat, daemon=True).start()
print("for the log", file=sys.stderr, flush=True)
if sys.argv[1] == "tf_server":
    time.sleep(0.3)
    act()
for line in sys.stdin:
    last = json.loads(line)
    answer(last)
os._exit(0)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a cluster of such processes: ``start(section, {"worker 1 #1": "die"})``; all are ended after the test."""
    monkeypatch.setattr(lifetime, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(cluster, "LOST_PEER_SECONDS", 2.0)
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__init__.py").touch()  # Before any other package of that name.
    (tmp_path / "tasks" / "__main__.py").write_text(MEMBER)
    started = []

    def start(section: config.AnyStrategy, plan: dict[str, str], start_seconds: float = 300) -> StageProcesses:
        members = len(engines.members(section))
        (tmp_path / "plan.json").write_text(json.dumps(plan | {"members": members}))
        monkeypatch.setattr(cluster, "START_SECONDS", start_seconds)
        started.append(StageProcesses(section.cluster, os.environ))
        return started[-1]

    yield start
    for one in started:
        one.close()
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "tasks" in child.cmdline()], "a process is left"


def _requests(folder) -> list[list]:
    path = folder / "requests"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _starts(folder) -> dict[str, list[str]]:
    return {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.starts"))}


ARGUMENTS = {"settings": {}, "prepared": {}, "run": {"folder": "mlruns/runs/first"}}


def test_a_request_that_all_take_part_in_goes_to_all_and_any_other_to_the_chief(start, tmp_path):
    team = start(multi_worker(workers=3), {})
    assert team.call("start_run", ARGUMENTS | {"flow_run_id": None}) == {"name": "worker 0", "stage": "start_run"}
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.call("evaluate", ARGUMENTS | {"training": {}})["stage"] == "evaluate"
    for alone in ("evaluate on one device", "register"):
        assert team.call(alone, {"settings": {}})["name"] == "worker 0"
    asked = _requests(tmp_path)
    names = ["flow_run_id", "prepared", "run", "settings"]
    # All check, before the chief begins a run.
    assert sorted(asked[:3]) == [[f"worker {index}", "check", ["prepared", "settings"]] for index in range(3)]
    assert asked[3] == ["worker 0", "start_run", names]
    assert sorted([name, stage] for name, stage, _ in asked[4:7]) == [
        ["worker 0", "train"], ["worker 1", "train"], ["worker 2", "train"]
    ]  # fmt: skip
    assert sorted([name, stage] for name, stage, _ in asked[7:10]) == [
        ["worker 0", "evaluate"], ["worker 1", "evaluate"], ["worker 2", "evaluate"]
    ]  # fmt: skip
    assert [name for name, _, _ in asked[10:]] == ["worker 0"] * 2
    assert team.restarts == []
    assert team.usable
    logs = tmp_path / "mlruns" / "runs" / "first" / "logs"
    assert {log.name: log.read_text() for log in logs.glob("*/*")} == {
        "worker-1.log": "for the log\n", "worker-2.log": "for the log\n"
    }  # fmt: skip


def test_a_cluster_that_loses_members_too_often_fails(start, tmp_path):
    team = start(multi_worker(max_restarts=1), {f"worker 1 #{i}": "die" for i in range(1, 9)})
    with pytest.raises(
        StratagemError, match=r"train failed: worker 1 died \(SIGKILL\), and strategy.max_restarts = 1 allows no"
    ) as caught:
        team.call("train", ARGUMENTS)
    assert caught.value.exit_code == 1
    assert len(team.restarts) == 1
    assert not team.usable
    assert not team.first.alive
    assert len(_starts(tmp_path)["worker 1"]) == 2


@pytest.mark.exhaustive
def test_a_process_that_never_begins_is_lost(start):
    plan = {"worker 1 #1": "never begin", "worker 0 #1": "wait"}
    team = start(multi_worker(heartbeat_timeout_seconds=2), plan, start_seconds=30)
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == ["worker 1 sent no heartbeat for 30 s"]


def test_a_worker_that_dies_after_its_part_disturbs_nothing(start):
    team = start(multi_worker(max_restarts=0), {"worker 1 #1": "answer and die", "worker 0 #1": "take a while"})
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == []
    assert not team.usable


def test_a_mistake_is_not_a_lost_member(start, tmp_path):
    team = start(multi_worker(), {"worker 0 #1": "refuse in train", "worker 1 #1": "refuse in train"})
    with pytest.raises(UserError, match=r"^train.epochs = 0$"):
        team.call("train", ARGUMENTS)
    assert team.restarts == []
    assert team.usable
    assert team.call("end_run", {})["name"] == "worker 0"


@pytest.mark.exhaustive
def test_a_member_that_would_never_answer_is_ended_when_another_fails(start, tmp_path):
    team = start(multi_worker(), {"worker 0 #1": "block", "worker 1 #1": "fail in train"})
    with pytest.raises(StratagemError, match=r"^worker 1: it broke; its log: mlruns/"):
        team.call("train", ARGUMENTS)
    assert team.restarts == []
    assert not team.usable
    assert not team.first.alive


def test_a_death_while_the_chief_alone_works_does_not_disturb_it(start):
    team = start(multi_worker(), {"worker 1 #1": "die"})
    os.kill(team.processes[1].pid, signal.SIGKILL)
    assert team.call("register", {})["stage"] == "register"
    assert not team.usable
    os.kill(team.first.pid, signal.SIGKILL)
    with pytest.raises(StratagemError, match=r"the process that ran register died \(SIGKILL\)"):
        team.call("register", {})


def test_an_interrupted_training_leaves_a_chief_that_can_end_the_run(start, tmp_path, interrupted_when):
    team = start(multi_worker(), {"worker 0 #1": "wait", "worker 1 #1": "wait"})
    with (
        interrupted_when(lambda: len(_requests(tmp_path)) == 2),
        pytest.raises(Interrupted, match="interrupted"),
    ):
        team.call("train", ARGUMENTS)
    assert team.first.alive
    assert not team.usable
    assert team.restarts == []


def test_a_training_goes_on_without_a_worker_that_may_not_start_again(start, tmp_path, capfd, interrupted_when):
    plan = {"worker 1 #1": "die", "chief 0 #1": "wait"}
    team = start(parameter_server(max_restarts=0), plan)
    with interrupted_when(lambda: len(team.processes) == 3), pytest.raises(Interrupted, match="interrupted"):
        team.call("train", ARGUMENTS)
    told = "worker 1 died (SIGKILL); strategy.max_restarts = 0, so the training continues without it"
    assert told in capfd.readouterr().err
    assert len(_starts(tmp_path)["worker 1"]) == 1


def test_without_any_worker_the_training_fails(start):
    plan = {"worker 0 #1": "die", "worker 1 #1": "die", "chief 0 #1": "wait"}
    with pytest.raises(
        StratagemError, match=r"worker \d died \(SIGKILL\); no workers are left, and strategy.max_restarts = 0"
    ):
        start(parameter_server(max_restarts=0), plan).call("train", ARGUMENTS)


def test_a_cluster_that_someone_else_started_is_not_started_again(start, monkeypatch):
    ports = free_ports(2)
    addresses = [f"localhost:{port}" for port in ports]
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=addresses))
    team = start(multi_worker(), {"worker 1 #1": "lose a peer"})
    with pytest.raises(
        StratagemError, match=r"train ended: worker 1 lost its peers. .+ the same command for each continues"
    ):
        team.call("train", ARGUMENTS)
    assert not team.usable


def test_a_member_that_hangs_when_it_is_told_to_stop_leaves_the_step_to_the_next_start(
    start, tmp_path, monkeypatch, interrupted_when
):
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=[f"localhost:{port}" for port in free_ports(2)]))
    team = start(multi_worker(), {"worker 1 #1": "block in train"})
    with (
        interrupted_when(lambda: ["worker 1", "train"] in [one[:2] for one in _requests(tmp_path)], Terminated),
        pytest.raises(
            Preempted, match=r"^train stopped on a signal: the next start continues from the latest checkpoint$"
        ),
    ):
        team.call("train", ARGUMENTS)
    assert not team.first.alive


def test_a_member_serves_as_long_as_the_chief_of_its_cluster(start, tmp_path, monkeypatch):
    ports = free_ports(4)
    addresses = [f"localhost:{port}" for port in ports]
    cluster_of = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, **cluster_of))
    member = start(parameter_server(), {"worker 1 #1": "die"})
    monkeypatch.setenv("TF_CONFIG", place_of("chief", 0, **cluster_of))
    chief = start(parameter_server(), {"worker 1 #1": "die"})

    def end_chief() -> None:
        while len(_starts(tmp_path).get("worker 1", ())) < 2:
            time.sleep(0.1)
        chief.close()

    thread = threading.Thread(target=end_chief)
    thread.start()
    member.stand_by()
    thread.join()
    assert not chief.first.alive
    assert member.restarts == ["worker 1 died (SIGKILL)"], "on this machine, whoever started the cluster"
    monkeypatch.setenv("TF_CONFIG", place_of("ps", 0, **cluster_of))
    with pytest.raises(StratagemError, match=r"ps 0 died \(SIGKILL\); its log: mlruns/logs/"):
        start(parameter_server(), {"ps 0 #1": "die"}).stand_by()


def test_a_worker_that_has_done_its_part_stays_until_the_chief_has_ended(start, monkeypatch):
    """The chief may still be receiving its part of their last sum: TensorFlow's ring pulls."""
    ports = free_ports(2)
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=[f"127.0.0.1:{port}" for port in ports]))
    worker = start(multi_worker(), {})
    with socket.create_server(("127.0.0.1", ports[0])) as chief, ThreadPoolExecutor() as pool:
        stays = pool.submit(worker.stand_by)
        with pytest.raises(TimeoutError):
            stays.result(1.0)
        chief.close()
        stays.result(30.0)
    assert worker.usable


def test_a_cluster_that_others_reach_says_so_in_one_line(start, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    start(multi_worker(), {})
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "this cluster's servers" in line]
    assert line.startswith(
        "this cluster's servers accept everyone who can reach this machine's ports, because the chief has to reach "
        "the server of MLFLOW_TRACKING_URI: "
    )
    assert "127.0.0.1" not in line


def test_the_members_of_a_local_cluster_share_a_network_of_their_own(start, capfd):
    team = start(multi_worker(), {})
    team.call("start_run", ARGUMENTS)
    children = [child.pid for child in psutil.Process().children() if "tasks" in child.cmdline()]
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in children}
    assert len(children) == 2
    assert len(networks) == 1
    assert networks != {os.readlink("/proc/self/ns/net")}
    assert "this cluster's servers" not in capfd.readouterr().err

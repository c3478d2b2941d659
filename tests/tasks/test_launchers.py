"""Launchers: which processes a cluster has, and what happens to all of them when one is lost."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks import config, launchers
from tasks.errors import Interrupted, StratagemError, UserError
from tasks.launchers import cluster, isolation, local, tf_config
from tasks.launchers.cluster import Cluster


def _multi_worker(**values) -> config.MultiWorker:
    return config.MultiWorker(kind="multi_worker", **values)


def _parameter_server(**values) -> config.ParameterServer:
    return config.ParameterServer(kind="parameter_server", **values)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """What a launcher finds does not depend on the machine that the tests run on."""
    for module in (local, tf_config):
        monkeypatch.setattr(module, "visible_gpus", list)
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


CLUSTERS = [
    (_multi_worker(workers=1), ["worker 0"]),
    (_multi_worker(workers=3), ["worker 0", "worker 1", "worker 2"]),
    (_parameter_server(workers=2, ps=1), ["chief 0", "worker 0", "worker 1", "ps 0"]),
    (_parameter_server(workers=1, ps=2), ["chief 0", "worker 0", "ps 0", "ps 1"]),
]


@pytest.mark.parametrize(("section", "names"), CLUSTERS)
def test_a_local_cluster_has_all_its_members_on_free_ports(section, names):
    members = local.members(section)
    assert [member.name for member in members] == names
    assert [member.is_chief for member in members] == [True] + [False] * (len(names) - 1)
    told = [json.loads(member.environment["TF_CONFIG"]) for member in members]
    assert [f"{one['task']['type']} {one['task']['index']}" for one in told] == names
    assert all(one["cluster"] == told[0]["cluster"] for one in told)
    addresses = [address for job in told[0]["cluster"].values() for address in job]
    assert len(set(addresses)) == len(names)
    for address in addresses:
        host, port = address.split(":")
        with socket.socket() as probe:
            probe.bind((host, int(port)))
    again = json.loads(local.members(section)[0].environment["TF_CONFIG"])
    assert again["cluster"] != told[0]["cluster"], "a restart takes new ports"


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for member in local.members(_multi_worker(workers=3)):
        assert member.environment["TF_NUM_INTRAOP_THREADS"] == "5"
        assert member.environment["TF_NUM_INTEROP_THREADS"] == "5"
    (member, *_) = local.members(_multi_worker(workers=32))
    assert (member.environment["TF_NUM_INTRAOP_THREADS"], member.environment["TF_NUM_INTEROP_THREADS"]) == ("1", "2")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "7")
    assert local.members(_multi_worker())[1].environment["TF_NUM_INTRAOP_THREADS"] == "7", "what the user set stays"


# Each: the strategy, the GPUs of the machine, what each member sees.
SHARES = [
    (_multi_worker(workers=2), [], [None, None]),
    (_multi_worker(workers=2), ["0", "1", "2", "3"], ["0,1", "2,3"]),
    (_multi_worker(workers=2), ["4", "7", "9"], ["4", "7"]),
    (_multi_worker(workers=2, devices=1), ["0", "1", "2", "3"], ["0", "1"]),
    (_parameter_server(workers=2), ["0", "1"], ["", "0", "1", ""]),
]
TOO_FEW = [
    (_multi_worker(workers=2, devices=1), [], "strategy.devices = 1: 2 workers need 2 GPUs, and this machine has 0"),
    (_multi_worker(workers=2, devices=2), ["0", "1", "2"], "strategy.devices = 2: 2 workers need 4 GPUs"),
    (_multi_worker(workers=3), ["0", "1"], "strategy.workers = 3: this machine has 2 GPUs"),
    (_parameter_server(workers=2), ["0"], "strategy.workers = 2: this machine has 1 GPUs"),
]


@pytest.mark.parametrize(("section", "gpus", "seen"), SHARES)
def test_workers_share_the_gpus(monkeypatch, section, gpus, seen):
    monkeypatch.setattr(local, "visible_gpus", lambda: gpus)
    assert [member.environment.get("CUDA_VISIBLE_DEVICES") for member in local.members(section)] == seen


@pytest.mark.parametrize(("section", "gpus", "message"), TOO_FEW)
def test_more_gpus_than_there_are_are_refused(monkeypatch, section, gpus, message):
    monkeypatch.setattr(local, "visible_gpus", lambda: gpus)
    with pytest.raises(UserError, match=message):
        local.members(section)


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [
        (None, 2, ["0", "1"]),
        ("1,0", 2, ["1", "0"]),
        ("", 2, []),
        ("-1", 2, []),
        ("0", 0, []),
        ("GPU-ab", 8, ["GPU-ab"]),
    ],
)
def test_the_visible_gpus_are_those_of_the_driver_that_the_user_leaves(monkeypatch, named, count, seen):
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: count)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert launchers.visible_gpus() == seen

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert launchers.visible_gpus() == []


def test_tf_config_is_used_where_it_is_set(monkeypatch):
    assert launchers.find(_multi_worker()) is local
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert launchers.find(_multi_worker()) is tf_config
    assert launchers.find(_multi_worker(launcher="local")) is local
    one_device = config.OneDevice(kind="one_device")
    assert [member.is_chief for member in launchers.members(one_device)] == [True], "no cluster at all"


def _tf_config(job: object, index: object, **cluster: list[str]) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


TWO = ["localhost:40001", "localhost:40002"]
PLACES = [
    ("multi_worker", _tf_config("worker", 0, worker=TWO), "worker 0", True, None),
    ("multi_worker", _tf_config("worker", 1, worker=TWO), "worker 1", False, None),
    ("multi_worker", _tf_config("chief", 0, chief=["a:1024"], worker=TWO), "chief 0", True, None),
    ("multi_worker", _tf_config("worker", 0, chief=["a:1024"], worker=TWO), "worker 0", False, None),
    ("parameter_server", _tf_config("chief", 0, chief=["a:2000"], worker=TWO, ps=["b:1024"]), "chief 0", True, ""),
    ("parameter_server", _tf_config("worker", 1, chief=["a:1"], worker=TWO, ps=["b:1024"]), "worker 1", False, None),
    ("parameter_server", _tf_config("ps", 0, chief=["a:1"], worker=TWO, ps=["b:2000"]), "ps 0", False, ""),
]


@pytest.mark.parametrize(("kind", "text", "name", "is_chief", "gpus"), PLACES)
def test_a_process_takes_its_place_in_a_cluster(monkeypatch, kind, text, name, is_chief, gpus):
    monkeypatch.setenv("TF_CONFIG", text)
    section = config.strategy_kinds()[kind](kind=kind)
    (member,) = launchers.members(section)
    assert (member.name, member.is_chief) == (name, is_chief)
    assert member.environment["TF_CONFIG"] == text
    assert member.environment.get("CUDA_VISIBLE_DEVICES") == gpus, "only who trains takes GPUs"


MALFORMED = [
    ("multi_worker", "worker 0", r"TF_CONFIG = 'worker 0': it is not JSON .+ Write it as \{\"cluster\""),
    ("multi_worker", "{}", "it must hold the two mappings `cluster` and `task`"),
    ("multi_worker", "[1]", "it must hold the two mappings"),
    ("multi_worker", json.dumps({"cluster": {"worker": TWO}}), "it must hold the two mappings"),
    ("multi_worker", json.dumps({"task": {"type": "worker", "index": 0}}), "it must hold the two mappings"),
    ("multi_worker", _tf_config("worker", 0), "it must hold the two mappings"),
    ("multi_worker", _tf_config("worker", 0, worker="a:1"), "cluster.worker must be a list of addresses"),
    ("multi_worker", _tf_config("worker", 0, worker=["localhost"]), "cluster.worker must be a list of addresses"),
    ("multi_worker", _tf_config("worker", 0, worker=["a:99999"]), "cluster.worker must be a list of addresses"),
    ("multi_worker", _tf_config("worker", 0, worker=[]), "cluster.worker must be a list of addresses"),
    ("multi_worker", _tf_config("worker", 0, worker=["a:1", "a:1"]), "a:1 is given to two tasks"),
    ("multi_worker", _tf_config("worker", 2, worker=TWO), "task.index = 2 .+ so give a number from 0 to 1"),
    ("multi_worker", _tf_config("worker", -1, worker=TWO), "task.index = -1"),
    ("multi_worker", _tf_config("worker", "0", worker=TWO), "task.index = '0'"),
    ("multi_worker", _tf_config("worker", True, worker=TWO), "task.index = True"),
    ("multi_worker", _tf_config("wroker", 0, worker=TWO), "unknown task.type 'wroker': did you mean 'worker'"),
    ("multi_worker", _tf_config(["worker"], 0, worker=TWO), "unknown task.type"),
    ("multi_worker", _tf_config("ps", 0, worker=TWO, ps=["b:1"]), "cluster has 'ps', and strategy.kind=multi_worker"),
    ("multi_worker", _tf_config("worker", 0, worker=TWO, evaluator=["b:1"]), "cluster has 'evaluator'"),
    ("multi_worker", _tf_config("worker", 0, worker=TWO, chief=["b:1", "b:2"]), "cluster has 2 'chief', .+ at most 1"),
    ("parameter_server", _tf_config("worker", 0, worker=TWO), "has 0 'chief', .+parameter_server needs exactly 1"),
    ("parameter_server", _tf_config("chief", 0, worker=TWO, chief=["a:1"]), "cluster has 0 'ps', .+ needs at least 1"),
    ("parameter_server", _tf_config("chief", 0, ps=TWO, chief=["a:1"]), "cluster has 0 'worker', .+ at least 1"),
]


@pytest.mark.parametrize(("kind", "text", "message"), MALFORMED)
def test_a_tf_config_that_cannot_be_used_is_refused(monkeypatch, kind, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match=message):
        launchers.members(config.strategy_kinds()[kind](kind=kind))


def test_a_launcher_without_its_variable_is_refused():
    with pytest.raises(UserError, match=r"strategy.launcher = 'tf_config': TF_CONFIG is not set"):
        launchers.members(_multi_worker(launcher="tf_config"))


def test_a_port_that_is_taken_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("TF_CONFIG", _tf_config("worker", 1, worker=["localhost:40001", f"localhost:{port}"]))
        with pytest.raises(UserError, match=f"worker 1 is to serve at localhost:{port}, .+ in use"):
            launchers.members(_multi_worker())
    launchers.members(_multi_worker())


@pytest.mark.parametrize(("devices", "seen"), [(None, None), (1, "3"), (2, "3,5")])
def test_a_member_takes_as_many_of_its_own_gpus_as_the_settings_say(monkeypatch, devices, seen):
    monkeypatch.setenv("TF_CONFIG", _tf_config("worker", 0, worker=TWO))
    monkeypatch.setattr(tf_config, "visible_gpus", lambda: ["3", "5"])
    (member,) = launchers.members(_multi_worker(devices=devices))
    assert member.environment.get("CUDA_VISIBLE_DEVICES") == seen
    with pytest.raises(UserError, match=r"strategy.devices = 3: this machine has 2 GPUs"):
        launchers.members(_multi_worker(devices=3))


# In place of `python -m tasks`: a process that does what plan.json says for its name and the number of its start.
MEMBER = """
import glob, json, os, signal, socket, sys, threading, time

task = json.loads(os.environ["TF_CONFIG"])["task"] if "TF_CONFIG" in os.environ else {"type": "worker", "index": 0}
name = f"{task['type']} {task['index']}"
starts = f"{name}.starts"
with open(starts, "a") as file:
    file.write(f"{os.getpid()} {sys.argv[1]} {os.environ.get('TF_CONFIG')}\\n")
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
    while plan in ("die", "stop") and len(glob.glob("*.starts")) < plans["members"]:
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
        "lose a peer": dict(error="no peer", kind="StratagemError", lost_peer=True),
        "fail": dict(error="it broke", kind="StratagemError", lost_peer=False),
        "refuse": dict(error="train.epochs = 0", kind="UserError"),
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
            time.sleep(1)
        say(id=request["id"], record={"name": name, "stage": request["stage"]})
        if plan == "answer and die":
            os.kill(os.getpid(), signal.SIGKILL)

def interrupted(number, frame):
    if plan == "wait":
        say(id=last["id"], error="interrupted", kind="Interrupted")

if sys.argv[1] == "serve" and task["type"] == "chief":
    # The chief of parameter servers serves at its own address.
    host, _, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"][0].rpartition(":")
    listening = socket.create_server((host, int(port)))
signal.signal(signal.SIGINT, interrupted)
if "STRATAGEM_HEARTBEAT_SECONDS" in os.environ:
    threading.Thread(target=beat, daemon=True).start()
else:
    beaten.set()
print("for the log", file=sys.stderr, flush=True)
if sys.argv[1] == "member":
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
    monkeypatch.setattr(cluster, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 3.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").touch()
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "__main__.py").write_text(MEMBER)
    started = []

    def start(section: config.AnyStrategy, plan: dict[str, str], whole: bool = True) -> Cluster:
        members = len(launchers.members(section)) if whole else 1
        (tmp_path / "plan.json").write_text(json.dumps(plan | {"members": members}))
        started.append(Cluster(section, os.environ, "kind", whole))
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
    team = start(_multi_worker(workers=3), {})
    assert team.call("start", ARGUMENTS | {"flow_run_id": None}) == {"name": "worker 0", "stage": "start"}
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.call("evaluate", ARGUMENTS | {"training": {}})["stage"] == "evaluate"
    for alone in ("evaluate on one device", "register"):
        assert team.call(alone, {"settings": {}})["name"] == "worker 0"
    asked = _requests(tmp_path)
    names = ["flow_run_id", "prepared", "run", "settings"]
    # All check, before the chief begins a run.
    assert sorted(asked[:3]) == [[f"worker {index}", "check", ["prepared", "settings"]] for index in range(3)]
    assert asked[3] == ["worker 0", "start", names]
    assert sorted([name, stage] for name, stage, _ in asked[4:7]) == [
        ["worker 0", "train"], ["worker 1", "assist"], ["worker 2", "assist"]
    ]  # fmt: skip
    assert sorted([name, stage] for name, stage, _ in asked[7:10]) == [
        ["worker 0", "evaluate"], ["worker 1", "assist_evaluation"], ["worker 2", "assist_evaluation"]
    ]  # fmt: skip
    assert [name for name, _, _ in asked[10:]] == ["worker 0"] * 2
    assert team.restarts == []
    assert team.usable
    logs = tmp_path / "mlruns" / "runs" / "first" / "logs"
    assert {log.name: log.read_text() for log in logs.glob("*/*")} == {
        "worker-1.log": "for the log\n", "worker-2.log": "for the log\n"
    }  # fmt: skip


# Each: what the first start of a member does, why all start again.
LOSSES = [
    ({"worker 0 #1": "die"}, "worker 0 died (SIGKILL)"),
    ({"worker 1 #1": "die"}, "worker 1 died (SIGKILL)"),
    ({"worker 0 #1": "stop", "worker 1 #1": "wait"}, "worker 0 gave no sign of life for 2 s"),
    ({"worker 0 #1": "wait", "worker 1 #1": "stop"}, "worker 1 gave no sign of life for 2 s"),
    # Tensorflow's own heartbeats were quicker than ours.
    ({"worker 0 #1": "lose a peer", "worker 1 #1": "stop"}, "worker 1 no longer answers"),
    ({"worker 0 #1": "lose a peer", "worker 1 #1": "lose a peer"}, "worker 0 lost its peers"),
    # The chief told of an error before anyone saw that it came from a death.
    ({"worker 0 #1": "fail", "worker 1 #1": "die"}, "worker 1 died (SIGKILL)"),
]


@pytest.mark.parametrize(("plan", "reason"), LOSSES, ids=[reason for _, reason in LOSSES])
def test_when_one_is_lost_all_start_again_from_the_latest_checkpoint(start, tmp_path, capfd, plan, reason):
    team = start(_multi_worker(heartbeat_timeout_seconds=2), plan)
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == [reason]
    assert (
        f"{reason}; all 2 processes start again, restart 1 of 3; logs: mlruns/runs/first/logs/"
        in capfd.readouterr().err
    )
    for first, second in _starts(tmp_path).values():
        pid, _, told = first.split(" ", 2)
        assert not psutil.pid_exists(int(pid))
        assert json.loads(told)["cluster"] != json.loads(second.split(" ", 2)[2])["cluster"], "new ports"
    assert team.usable


@pytest.mark.parametrize("most", [0, 2])
def test_a_cluster_that_loses_members_too_often_fails(start, tmp_path, most):
    team = start(_multi_worker(max_restarts=most), {f"worker 1 #{i}": "die" for i in range(1, 9)})
    with pytest.raises(
        StratagemError, match=rf"train failed: worker 1 died \(SIGKILL\), and strategy.max_restarts = {most} allows no"
    ) as caught:
        team.call("train", ARGUMENTS)
    assert caught.value.exit_code == 1
    assert len(team.restarts) == most
    assert not team.usable
    assert not team.first.alive
    assert len(_starts(tmp_path)["worker 1"]) == most + 1


def test_a_new_run_counts_its_restarts_from_none(start, tmp_path):
    team = start(_multi_worker(), {"worker 1 #1": "die"})
    team.call("start", ARGUMENTS)
    assert len(team.restarts) == 1
    team.call("start", ARGUMENTS)
    assert team.restarts == []
    assert [name for name, stage, _ in _requests(tmp_path) if stage == "start"] == ["worker 0"] * 2, "one run each"


def test_a_process_that_never_begins_is_lost(start, monkeypatch):
    monkeypatch.setattr(cluster, "START_SECONDS", 4.0)
    plan = {"worker 1 #1": "never begin", "worker 0 #1": "wait"}
    team = start(_multi_worker(heartbeat_timeout_seconds=2), plan)
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == ["worker 1 gave no sign of life for 4 s"]


def test_a_worker_that_dies_after_its_part_disturbs_nothing(start):
    team = start(_multi_worker(max_restarts=0), {"worker 1 #1": "answer and die", "worker 0 #1": "take a while"})
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == []
    assert not team.usable


# Each: what members do, the error that is told.
FAILURES = [
    (
        {"worker 0 #1": "refuse in train in assist", "worker 1 #1": "refuse in train in assist"},
        UserError,
        "^train.epochs = 0$",
    ),
    (
        {"worker 0 #1": "fail in train in assist", "worker 1 #1": "refuse in train in assist"},
        UserError,
        "^train.epochs = 0$",
    ),
    ({"worker 0 #1": "fail in train in assist", "worker 1 #1": "wait"}, StratagemError, "^it broke$"),
    (
        {"worker 0 #1": "block", "worker 1 #1": "fail in train in assist"},
        StratagemError,
        "^worker 1: it broke; its log: mlruns/",
    ),
]


@pytest.mark.parametrize(("plan", "kind", "message"), FAILURES)
def test_a_mistake_is_not_a_lost_member(start, tmp_path, plan, kind, message):
    team = start(_multi_worker(), plan)
    with pytest.raises(StratagemError, match=message) as caught:
        team.call("train", ARGUMENTS)
    assert type(caught.value) is kind
    assert team.restarts == []
    waits = {"wait", "block"} & set(plan.values())
    assert team.usable == (not waits), "who waits for the others cannot be asked anything"
    # The run can still be ended: by the chief, or by another process in place of one that would never answer.
    assert team.first.alive == ("block" not in plan.values())
    if team.first.alive:
        assert team.call("finish", {})["name"] == "worker 0"


def test_a_death_while_the_chief_alone_works_does_not_disturb_it(start):
    team = start(_multi_worker(), {"worker 1 #1": "die"})
    os.kill(team._processes[1].pid, signal.SIGKILL)
    assert team.call("register", {})["stage"] == "register"
    assert not team.usable
    os.kill(team.first.pid, signal.SIGKILL)
    with pytest.raises(StratagemError, match=r"the process that ran register died \(SIGKILL\)"):
        team.call("register", {})


def test_what_does_not_train_needs_one_process(start, tmp_path):
    team = start(_multi_worker(workers=3), {}, whole=False)
    assert team.call("evaluate on one device", {})["name"] == "worker 0"
    assert [start.split()[1:] for start in _starts(tmp_path)["worker 0"]] == [["serve", "None"]]
    assert list(_starts(tmp_path)) == ["worker 0"]


def test_an_interrupted_training_leaves_a_chief_that_can_end_the_run(start, tmp_path, interrupted_when):
    team = start(_multi_worker(), {"worker 0 #1": "wait", "worker 1 #1": "wait"})
    with (
        interrupted_when(lambda: len(_requests(tmp_path)) == 2),
        pytest.raises(Interrupted, match="interrupted"),
    ):
        team.call("train", ARGUMENTS)
    assert team.first.alive
    assert not team.usable
    assert team.restarts == []


def test_a_lost_worker_of_parameter_servers_starts_again_alone_on_its_own_port(
    start, tmp_path, capfd, interrupted_when
):
    plan = {"worker 1 #1": "die", "worker 0 #1": "stop", "chief 0 #1": "wait"}
    team = start(_parameter_server(heartbeat_timeout_seconds=2), plan)
    with (
        interrupted_when(lambda: [len(lines) for lines in _starts(tmp_path).values()] == [1, 1, 2, 2]),
        pytest.raises(Interrupted, match="interrupted"),
    ):
        team.call("train", ARGUMENTS)
    assert sorted(team.restarts) == ["worker 0 gave no sign of life for 2 s", "worker 1 died (SIGKILL)"]
    starts = _starts(tmp_path)
    assert list(starts) == ["chief 0", "ps 0", "worker 0", "worker 1"]
    for name in ("worker 0", "worker 1"):
        assert len({line.split(" ", 2)[2] for line in starts[name]}) == 1, "the others know it by this port"
    err = capfd.readouterr().err
    assert "worker 1 died (SIGKILL); it is started again, restart 1 of 3; its log: mlruns/" in err


def test_a_training_goes_on_without_a_worker_that_may_not_start_again(start, tmp_path, capfd, interrupted_when):
    plan = {"worker 1 #1": "die", "chief 0 #1": "wait"}
    team = start(_parameter_server(max_restarts=0), plan)
    with interrupted_when(lambda: len(team._processes) == 3), pytest.raises(Interrupted, match="interrupted"):
        team.call("train", ARGUMENTS)
    told = "worker 1 died (SIGKILL); strategy.max_restarts = 0, so the training goes on without it"
    assert told in capfd.readouterr().err
    assert len(_starts(tmp_path)["worker 1"]) == 1


def test_without_any_worker_the_training_fails(start):
    plan = {"worker 0 #1": "die", "worker 1 #1": "die", "chief 0 #1": "wait"}
    with pytest.raises(
        StratagemError, match=r"worker \d died \(SIGKILL\), as all workers, and strategy.max_restarts = 0"
    ):
        start(_parameter_server(max_restarts=0), plan).call("train", ARGUMENTS)


@pytest.mark.parametrize("lost", ["ps 0", "chief 0"])
def test_a_lost_parameter_server_or_chief_is_the_loss_of_all(start, tmp_path, lost):
    team = start(_parameter_server(), {"chief 0 #1": "wait"} | {f"{lost} #1": "die"})
    before = {one.pid for one in team._processes}
    assert team.call("train", ARGUMENTS)["stage"] == "train"
    assert team.restarts == [f"{lost} died (SIGKILL)"]
    assert before.isdisjoint(one.pid for one in team._processes)
    assert not any(map(psutil.pid_exists, before))


def test_a_cluster_that_someone_else_started_is_not_started_again(start, monkeypatch):
    ports = local.free_ports(2)
    addresses = [f"localhost:{port}" for port in ports]
    monkeypatch.setenv("TF_CONFIG", _tf_config("worker", 1, worker=addresses))
    team = start(_multi_worker(), {"worker 1 #1": "lose a peer"})
    with pytest.raises(
        StratagemError, match=r"train ended: worker 1 lost its peers. .+ the same command for every member goes on"
    ):
        team.call("train", ARGUMENTS)
    assert not team.usable


def test_a_member_serves_as_long_as_the_chief_of_its_cluster(start, tmp_path, monkeypatch):
    ports = local.free_ports(4)
    addresses = [f"localhost:{port}" for port in ports]
    cluster_of = {"chief": addresses[:1], "worker": addresses[1:3], "ps": addresses[3:]}
    monkeypatch.setenv("TF_CONFIG", _tf_config("worker", 1, **cluster_of))
    member = start(_parameter_server(), {"worker 1 #1": "die"})
    monkeypatch.setenv("TF_CONFIG", _tf_config("chief", 0, **cluster_of))
    chief = start(_parameter_server(), {"worker 1 #1": "die"})

    def end_chief() -> None:
        while len(_starts(tmp_path).get("worker 1", ())) < 2:
            time.sleep(0.1)
        chief.close()

    thread = threading.Thread(target=end_chief)
    thread.start()
    member.stand_by()
    assert not chief.first.alive
    thread.join()
    assert member.restarts == ["worker 1 died (SIGKILL)"], "on this machine, whoever started the cluster"
    monkeypatch.setenv("TF_CONFIG", _tf_config("ps", 0, **cluster_of))
    with pytest.raises(StratagemError, match=r"ps 0 died \(SIGKILL\); its log: mlruns/logs/"):
        start(_parameter_server(), {"ps 0 #1": "die"}).stand_by()


def test_a_process_that_was_stopped_itself_does_not_take_the_others_for_lost(start):
    team = start(_multi_worker(heartbeat_timeout_seconds=2), {"worker 0 #1": "wait in train"})
    team.call("start", ARGUMENTS)
    # As after Ctrl-Z and fg: nobody has listened for longer than the time-out.
    time.sleep(3)
    assert team.call("start", ARGUMENTS)["name"] == "worker 0"
    assert team.restarts == []


def test_the_python_that_runs_this_runs_the_members(start):
    team = start(config.OneDevice(kind="one_device"), {})
    assert psutil.Process(team.first.pid).cmdline() == [sys.executable, "-m", "tasks", "serve"]


# A server that lets in everybody, as TensorFlow's, in a network of
# its own, and who reaches it.
STRANGER = r"""
import os, socket, subprocess, sys
import isolation
SERVER = "import socket; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); s.accept()"
REACH = "import os, socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])), 5); print(os.getuid())"
network = isolation.make()
inside = dict(stdout=subprocess.PIPE, text=True, pass_fds=network.descriptors)
with subprocess.Popen(network.command([sys.executable, "-c", SERVER]), **inside) as server:
    port = server.stdout.readline()
    listening = {int(line.split()[1].rpartition(":")[2], 16) for line in open("/proc/net/tcp").readlines()[1:]}
    stranger = subprocess.run([sys.executable, "-c", REACH, port], stderr=subprocess.PIPE, text=True)
    peer = subprocess.run(network.command([sys.executable, "-c", REACH, port]), check=True, **inside)
print(int(port) in listening, stranger.stderr.splitlines()[-1], int(peer.stdout) == os.getuid())
"""


@pytest.mark.parametrize("user", [None, 65534], ids=["this user", "nobody"])
def test_a_network_of_its_own_lets_in_only_members(user, run):
    command = [sys.executable, "-c", STRANGER]
    if user is not None:
        python = shutil.which("python3", path="/usr/bin")
        if os.getuid() or python is None:
            pytest.skip("this user is any user, or only root has a Python")
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", python, "-c", STRANGER]
    with tempfile.TemporaryDirectory() as folder:  # Not pytest's, which is this user's alone.
        Path(folder).chmod(0o755)
        shutil.copy(isolation.__file__, folder)
        Path(folder, "isolation.py").chmod(0o644)
        found = run(command, cwd="/", env={"PYTHONPATH": folder})
    assert found.stdout.startswith("False "), found.stderr
    assert "ConnectionRefusedError" in found.stdout
    assert found.stdout.endswith("True\n"), "a member is who it was"


def test_a_kernel_that_gives_no_network_is_told(run):
    # A user namespace in which the kernel counts no network namespace as allowed.
    refuse = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    command = [sys.executable, "-c", "from tasks.launchers import local; print(local.network())"]
    found = run(["unshare", "--user", "--map-root-user", "sh", "-c", refuse, "sh", *command])
    assert re.match(r"the kernel gives them no network of their own \(.*unshare: .+\)$", found.stdout), found.stderr


# Each: a variable, the launcher, and why others reach the cluster's servers.
OPEN = [
    ("MLFLOW_TRACKING_URI", "http://127.0.0.1:1", "the chief has to reach the server of MLFLOW_TRACKING_URI"),
    ("STRATAGEM_CLUSTER_NETWORK", "host", "STRATAGEM_CLUSTER_NETWORK = host"),
    ("TF_CONFIG", "127.0.0.1", "TF_CONFIG puts them on one that this machine shares"),
]


@pytest.mark.parametrize(("name", "value", "reason"), OPEN)
def test_a_cluster_that_others_reach_says_so_in_one_line(start, monkeypatch, capfd, name, value, reason):
    if name == "TF_CONFIG":
        addresses = [f"{value}:{port}" for port in local.free_ports(2)]
        value = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv(name, value)
    start(_multi_worker(), {})
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "whoever" in line]
    assert line.startswith(f"this cluster's servers let in whoever reaches this machine's ports, because {reason}: ")
    assert value not in line or name == "STRATAGEM_CLUSTER_NETWORK"


def test_the_members_of_a_local_cluster_share_a_network_of_their_own(start, capfd):
    team = start(_multi_worker(), {})
    team.call("start", ARGUMENTS)
    children = [child.pid for child in psutil.Process().children() if "tasks" in child.cmdline()]
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in children}
    assert len(children) == 2
    assert len(networks) == 1
    assert networks != {os.readlink("/proc/self/ns/net")}
    assert "whoever" not in capfd.readouterr().err

"""Launchers: which processes a cluster has, and who reaches them."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from tasks import config
from tasks.strategies import engines
from tasks.strategies.engines import isolation, local, ray, tf_config
from tasks.system.errors import UserError
from tests.tasks.clusters import TWO, data_parallel, model_parallel, multi_worker, parameter_server, place_of

pytestmark = pytest.mark.usefixtures("on_cpus")

CLUSTERS = [
    (multi_worker(workers=1), ["worker 0"]),
    (multi_worker(workers=3), ["worker 0", "worker 1", "worker 2"]),
    (parameter_server(workers=2, ps=1), ["chief 0", "worker 0", "worker 1", "ps 0"]),
    (parameter_server(workers=1, ps=2), ["chief 0", "worker 0", "ps 0", "ps 1"]),
    (data_parallel(workers=2), ["worker 0", "worker 1"]),
]


@pytest.mark.parametrize(("section", "names"), CLUSTERS)
def test_a_local_cluster_has_all_its_members_on_ports_of_their_own(section, names):
    members = local.members(section)
    assert [member.name for member in members] == names
    assert [member.is_chief for member in members] == [True] + [False] * (len(names) - 1)
    told = [json.loads(member.environment["TF_CONFIG"]) for member in members]
    assert [f"{one['task']['type']} {one['task']['index']}" for one in told] == names
    assert all(one["cluster"] == told[0]["cluster"] for one in told)
    addresses = [address for job in told[0]["cluster"].values() for address in job]
    assert len(set(addresses)) == len(names)
    again = json.loads(local.members(section)[0].environment["TF_CONFIG"])
    assert again["cluster"] != told[0]["cluster"], "a restart takes new ports"


def test_workers_share_the_cores(machine_with_cores, monkeypatch):
    machine_with_cores(16)
    for member in local.members(multi_worker(workers=3)):
        assert member.environment["TF_NUM_INTRAOP_THREADS"] == "5"
        assert member.environment["TF_NUM_INTEROP_THREADS"] == "5"
    (member, *_) = local.members(multi_worker(workers=32))
    assert (member.environment["TF_NUM_INTRAOP_THREADS"], member.environment["TF_NUM_INTEROP_THREADS"]) == ("1", "2")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "7")
    assert local.members(multi_worker())[1].environment["TF_NUM_INTRAOP_THREADS"] == "7", "what the user set stays"


# Each: the strategy, the GPUs of the machine, what each member sees.
SHARES = [
    (multi_worker(workers=2), [], [None, None]),
    (multi_worker(workers=2), ["0", "1", "2", "3"], ["0,1", "2,3"]),
    (multi_worker(workers=2), ["4", "7", "9"], ["4", "7"]),
    (multi_worker(workers=2, devices=1), ["0", "1", "2", "3"], ["0", "1"]),
    (parameter_server(workers=2), ["0", "1"], ["", "0", "1", ""]),
    (data_parallel(workers=2, devices=4), [], [None, None]),  # CPU devices are made.
    (data_parallel(workers=2), ["0", "1", "2", "3"], ["0,1", "2,3"]),
    (model_parallel(workers=2, mesh_shape=[1, 2]), ["0", "1", "2", "3"], ["0", "1"]),
]
TOO_FEW = [
    (multi_worker(workers=2, devices=1), [], "strategy.devices = 1: 2 workers need 2 GPUs, and this machine has 0"),
    (multi_worker(workers=2, devices=2), ["0", "1", "2"], "strategy.devices = 2: 2 workers need 4 GPUs"),
    (multi_worker(workers=3), ["0", "1"], "strategy.workers = 3: this machine has 2 GPUs"),
    (parameter_server(workers=2), ["0"], "strategy.workers = 2: this machine has 1 GPU,"),
    (data_parallel(workers=2), ["0"], "strategy.workers = 2: this machine has 1 GPU,"),
    (model_parallel(workers=2, mesh_shape=[2, 2]), ["0", "1"], "strategy.devices = 2: 2 workers need 4 GPUs"),
]


@pytest.mark.parametrize(("section", "shown", "seen"), SHARES)
def test_workers_share_the_gpus(gpus, section, shown, seen):
    gpus(10, ",".join(shown))
    assert [member.environment.get("CUDA_VISIBLE_DEVICES") for member in local.members(section)] == seen


@pytest.mark.parametrize(("section", "shown", "message"), TOO_FEW)
def test_more_gpus_than_there_are_are_refused(gpus, section, shown, message):
    gpus(10, ",".join(shown))
    with pytest.raises(UserError, match=message):
        local.members(section)


def test_tf_config_is_used_where_it_is_set(monkeypatch):
    assert engines.find_launcher(multi_worker()) is local
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert engines.find_launcher(multi_worker()) is tf_config
    assert engines.find_launcher(multi_worker(launcher="local")) is local
    one_device = config.OneDevice(kind="one_device")
    assert [member.is_chief for member in engines.members(one_device)] == [True], "no cluster at all"


def test_on_jax_it_is_the_settings_that_say_how_many_processes_there_are(monkeypatch):
    (alone,) = engines.members(data_parallel())
    assert alone is engines.ALONE, "one process is not a cluster"
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=TWO))
    (member,) = engines.members(data_parallel(workers=2, devices=8))
    assert (member.name, member.is_chief) == ("worker 1", False)
    with pytest.raises(UserError, match=r"strategy.workers = 3: TF_CONFIG has 2 processes. Set strategy.workers=2"):
        engines.members(data_parallel(workers=3))


PLACES = [
    ("multi_worker", place_of("worker", 0, worker=TWO), "worker 0", True, None),
    ("multi_worker", place_of("worker", 1, worker=TWO), "worker 1", False, None),
    ("multi_worker", place_of("chief", 0, chief=["a:1024"], worker=TWO), "chief 0", True, None),
    ("multi_worker", place_of("worker", 0, chief=["a:1024"], worker=TWO), "worker 0", False, None),
    ("parameter_server", place_of("chief", 0, chief=["a:2000"], worker=TWO, ps=["b:1024"]), "chief 0", True, ""),
    ("parameter_server", place_of("worker", 1, chief=["a:1"], worker=TWO, ps=["b:1024"]), "worker 1", False, None),
    ("parameter_server", place_of("ps", 0, chief=["a:1"], worker=TWO, ps=["b:2000"]), "ps 0", False, ""),
]


@pytest.mark.parametrize(("kind", "text", "name", "is_chief", "gpus"), PLACES)
def test_a_process_takes_its_place_in_a_cluster(monkeypatch, kind, text, name, is_chief, gpus):
    monkeypatch.setenv("TF_CONFIG", text)
    section = config.strategy_kinds()[kind](kind=kind)
    (member,) = engines.members(section)
    assert (member.name, member.is_chief) == (name, is_chief)
    assert member.environment["TF_CONFIG"] == text
    assert member.environment.get("CUDA_VISIBLE_DEVICES") == gpus, "only who trains takes GPUs"


MALFORMED = [
    ("multi_worker", "worker 0", r"TF_CONFIG = 'worker 0': Invalid JSON.+ Write it as \{\"cluster\""),
    ("multi_worker", place_of("worker", 0, worker=["a"]), "cluster.worker.0: String should match"),
    ("multi_worker", place_of("worker", 2, worker=TWO), "the cluster has no worker 2"),
    ("multi_worker", place_of("wroker", 0, worker=TWO), "the cluster has no wroker 0"),
    ("multi_worker", place_of("ps", 0, worker=TWO, ps=["b:1"]), "multi_worker needs a cluster of workers and at most"),
    ("multi_worker", place_of("worker", 0, worker=TWO, chief=["b:1", "b:2"]), "at most one chief"),
    ("parameter_server", place_of("worker", 0, worker=TWO), "parameter_server needs a cluster of one chief"),
    ("parameter_server", place_of("chief", 0, worker=TWO, chief=["a:1"]), "one chief, workers and ps"),
    ("parameter_server", place_of("chief", 0, ps=TWO, chief=["a:1"]), "one chief, workers and ps"),
]


@pytest.mark.parametrize(("kind", "text", "message"), MALFORMED)
def test_a_tf_config_that_cannot_be_used_is_refused(monkeypatch, kind, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match=message):
        engines.members(config.strategy_kinds()[kind](kind=kind))


def test_a_launcher_without_its_variable_is_refused():
    with pytest.raises(UserError, match=r"strategy.launcher = 'tf_config': TF_CONFIG is not set"):
        engines.members(multi_worker(launcher="tf_config"))


def test_a_port_that_is_taken_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=["localhost:40001", f"localhost:{port}"]))
        with pytest.raises(UserError, match=f"worker 1 must serve at localhost:{port}, .+ in use"):
            engines.members(multi_worker())
    engines.members(multi_worker())


@pytest.mark.parametrize(("devices", "seen"), [(None, None), (1, "3"), (2, "3,5")])
def test_a_member_takes_as_many_of_its_own_gpus_as_the_settings_say(monkeypatch, gpus, devices, seen):
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 0, worker=TWO))
    gpus(8, "3,5")
    (member,) = engines.members(multi_worker(devices=devices))
    assert member.environment.get("CUDA_VISIBLE_DEVICES") == seen
    with pytest.raises(UserError, match=r"strategy.devices = 3: this machine has 2 GPUs"):
        engines.members(multi_worker(devices=3))


# What a Ray cluster's address must not be, and what is said of it.
NO_CLUSTER = [
    ("ray://10.0.0.1:10001", r"no Ray cluster answers there \(not host:port\)"),
    ("head", r"no Ray cluster answers there \(not host:port\)"),
    ("127.0.0.1:99999", "no Ray cluster answers there"),
    ("127.0.0.1:1", "no Ray cluster answers there .*ray start --head"),
]


@pytest.mark.parametrize(("address", "message"), NO_CLUSTER)
def test_an_address_without_a_ray_cluster_is_refused(monkeypatch, tmp_path, address, message):
    (tmp_path / "ray").mkdir()  # As where Ray is installed.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"RAY_ADDRESS = '{address}': {message}"):
        engines.members(multi_worker(launcher="ray"))


def test_without_ray_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # Python then finds no such module.
    with pytest.raises(UserError, match=r"strategy.launcher = 'ray': the package ray is not installed.+'\.\[ray\]'"):
        engines.members(multi_worker(launcher="ray"))


# Each: the strategy, the places, what the members are called; with a worker fewer than asked for.
AT_PLACES = [
    (multi_worker(launcher="ray", workers=3), 2, ["worker 0", "worker 1"]),
    (parameter_server(launcher="ray", workers=2), 4, ["chief 0", "worker 0", "worker 1", "ps 0"]),
    (parameter_server(launcher="ray", workers=2, ps=2), 4, ["chief 0", "worker 0", "ps 0", "ps 1"]),
]


@pytest.mark.parametrize(("section", "number", "names"), AT_PLACES)
def test_members_are_where_ray_placed_them(section, number, names):
    places = [f"10.0.0.{place}:{40_000 + place}" for place in range(number)]
    members = ray.members_at(section, places, 3)
    assert [member.name for member in members] == names
    assert [member.is_chief for member in members] == [True] + [False] * (number - 1)
    for member, place in zip(members, places, strict=True):
        told = json.loads(member.environment["TF_CONFIG"])
        assert told["cluster"][member.job][member.index] == place
        assert sum(len(addresses) for addresses in told["cluster"].values()) == number
        assert member.environment["TF_NUM_INTRAOP_THREADS"] == "3"
        assert member.environment.get("CUDA_VISIBLE_DEVICES") == ("" if member.job in ("chief", "ps") else None)


# Each: cores and GPUs of the nodes, the processes, what each is to have, and how many there is room for.
ROOMS = [
    ([(4, 0), (4, 0), (4, 0)], 3, {"CPU": 4}, 3),
    ([(0, 0), (4, 0), (8, 0)], 2, {"CPU": 4}, 3),  # A head without cores to give, as Kubernetes' operator starts it.
    ([(8, 0)], 3, {"CPU": 2}, 4),
    ([(8, 2), (8, 2)], 2, {"CPU": 8, "GPU": 1}, 2),
    ([(8, 1), (8, 0)], 2, {"CPU": 8}, 2),
    ([], 2, {"CPU": 1}, 0),
]


@pytest.mark.parametrize(("nodes", "processes", "bundle", "room"), ROOMS)
def test_processes_share_the_cores_and_gpus_of_rays_nodes(nodes, processes, bundle, room):
    have = [{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]
    assert ray.find_bundle(multi_worker(launcher="ray"), None, have, processes) == bundle
    assert ray.count_places(have, bundle) == room


# Each: a strategy of two workers, the GPUs of two nodes of eight cores, and the GPUs that each worker is to have.
GPUS_OF_RAY = [
    (multi_worker(launcher="ray", devices=2), (2, 2), 2),
    (multi_worker(launcher="ray", devices=2), (0, 0), 2),  # What is asked for is waited for, and refused.
    (config.DataParallel(kind="data_parallel", workers=2, launcher="ray", devices=2), (2, 2), 2),
    (config.DataParallel(kind="data_parallel", workers=2, launcher="ray", devices=2), (4, 0), 2),
    (config.DataParallel(kind="data_parallel", workers=2, launcher="ray", devices=2), (3, 1), 0),
    (config.DataParallel(kind="data_parallel", workers=2, launcher="ray", devices=2), (0, 0), 0),
    (config.DataParallel(kind="data_parallel", workers=2, launcher="ray"), (2, 2), 1),
    (config.ModelParallel(kind="model_parallel", workers=2, launcher="ray", mesh_shape=[2, 2]), (2, 2), 2),
    (config.ModelParallel(kind="model_parallel", workers=2, launcher="ray", mesh_shape=[2, 2]), (1, 1), 0),
]


@pytest.mark.parametrize(("section", "gpus_of_nodes", "each"), GPUS_OF_RAY)
def test_a_worker_on_jax_has_rays_gpus_only_where_there_are_as_many_as_it_wants(section, gpus_of_nodes, each):
    """Where there are not, it forces as many CPU devices."""
    have = [{"CPU": 8.0, "GPU": float(gpus)} for gpus in gpus_of_nodes]
    assert ray.find_bundle(section, None, have, 2).get("GPU", 0) == each


WORK = """
import json, os, signal, sys
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
found = [sys.argv[1], os.environ["TMPDIR"], os.environ["OTHER"], str(blocked)]
print(json.dumps(found), flush=True)
print("for the terminal", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(line.strip(), flush=True)
"""


def test_an_actor_runs_a_member_hears_it_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    actor = ray.MemberActor()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # As Ray's threads have it.
    actor.start(["work.py", "member"], str(tmp_path), {"OTHER": "given"}, None)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_SETMASK, before)
    actor.tell("send", {"id": 1})
    heard = []
    while {"reply": {"id": 1}} not in heard or len(heard) < 3:
        heard.append(actor.read())
    first, folder, other, blocked = next(one["reply"] for one in heard if "reply" in one)
    assert (first, other, blocked) == ("member", "given", "set()")
    assert {"stderr": "for the terminal\n"} in heard
    assert folder == str(tmp_path), "the node's own"
    actor.tell("send_signal", signal.SIGKILL)
    assert actor.read() == {"ended": "SIGKILL"}
    actor.start(["work.py", "again"], str(tmp_path), {"OTHER": ""}, str(tmp_path / "log"))
    assert actor.read()["reply"][0] == "again"
    actor.tell("close_input")
    assert actor.read() == {"ended": "exit code 0"}
    assert (tmp_path / "log").read_text() == "for the terminal\n"
    tempfile.tempdir = None


def test_an_actor_reports_a_member_that_cannot_be_started(tmp_path):
    actor = ray.MemberActor()
    actor.start(["work.py"], str(tmp_path), {}, str(tmp_path / "missing" / "log"))
    assert actor.read()["ended"].startswith("it could not be started (FileNotFoundError: ")


ACTOR_WITHOUT_TASKS = """
import sys
place, folder = sys.argv[1:]
sys.path.insert(0, place)
from tasks.strategies.engines.ray import MemberActor
sys.path.remove(place)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
for name in [name for name in sys.modules if name.partition(".")[0] == "tasks"]:
    del sys.modules[name]
actor = MemberActor()
actor.start(["-c", "print(1)"], folder, {"PYTHONPATH": place}, None)
print(actor.read())
"""


def test_an_actor_finds_its_code_where_the_command_does(tmp_path, run):
    """As in a project made from the wheel, whose folder does not contain `tasks`."""
    (tmp_path / "actor.py").write_text(ACTOR_WITHOUT_TASKS)
    place = str(Path(ray.__file__).parents[3])
    found = run(["python", "-P", tmp_path / "actor.py", place, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": ""})
    assert found.stdout == "{'reply': 1}\n", found.stderr


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
    command = [sys.executable, "-c", "from tasks.strategies.engines import local; print(local.make_network())"]
    found = run(["unshare", "--user", "--map-root-user", "sh", "-c", refuse, "sh", *command])
    assert re.match(r"the kernel does not allow a private network \(.*unshare: .+\)$", found.stdout), found.stderr

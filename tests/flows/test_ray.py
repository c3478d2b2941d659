"""`strategy.launcher=ray` on a real Ray cluster of three nodes, all on this machine; one of them is killed."""

import calendar
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.runs import entries
from tasks.training import checkpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray: pip install -e '.[ray]'"),
]
# Of 1,293 examples, 48 at once.
STEPS_IN_EPOCH = 27
SAME = (
    "train.deterministic=true",
    "train.per_replica_batch_size=null",
    "train.global_batch_size=48",
    "schedule.kind=constant",
    "model.name=mlp",
    "model.options={units: [16], dropout: 0.5}",
)
THREE_OR_TWO = (
    "strategy.kind=multi_worker",
    "strategy.launcher=ray",
    "strategy.workers=3",
    "strategy.min_workers=2",
    "strategy.cpus=1",
)


class Nodes:
    """The nodes of a cluster, by their numbers; the first is the head."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.address = self._answer()

    def remove(self, number: int) -> None:
        """Kill a node, with all that runs there."""
        self._tell(f"remove {number}")

    def add(self, cpus: int) -> None:
        self._tell(f"add {cpus}")

    def _tell(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def three_nodes() -> Iterator[Nodes]:
    """Three nodes of one processor each, on which Ray is started in this environment."""
    # The path of a socket in it has at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    script = Path(__file__).with_name("ray_nodes.py")
    with (
        open(f"{folder}.log", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-P", script, folder, "1", "1", "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            found = Nodes(process)
            assert found.address, Path(f"{folder}.log").read_text()
            yield found
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):  # What it left behind.
                os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.log").unlink()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A cluster of a test's own, which may lose nodes."""
    with three_nodes() as found:
        monkeypatch.setenv("RAY_ADDRESS", found.address)
        yield found


@pytest.fixture(scope="module")
def shared_nodes() -> Iterator[Nodes]:
    with three_nodes() as found:
        found.add(1)  # Four places: two trials of two processes each.
        yield found


@pytest.fixture
def lasting_nodes(shared_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """A cluster of four nodes, which tests that end none of them share."""
    monkeypatch.setenv("RAY_ADDRESS", shared_nodes.address)
    return shared_nodes


def newest(folder: Path) -> int:
    """Return the step of a run's newest checkpoint."""
    return max(int(path.name) for path in folder.glob("[0-9]*"))


def words(*settings: str) -> list[str]:
    return [f"--set={one}" for one in settings]


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "same bits"])
def test_a_training_goes_on_with_fewer_workers_when_a_node_is_lost(
    prepared_project: Path, nodes: Nodes, start: Callable, compared: bool
):
    training = start("stratagem", "train", "--json", *words(*SAME, *THREE_OR_TWO, "train.epochs=30"))
    training.wait_until(" 4/30 ")
    nodes.remove(2)
    training.wait_until("all 2 processes restart, 1 fewer (1 of 3); logs: mlruns/runs/")
    assert training.process.wait(1000) == 0, training.err.read_text()
    err, result = training.err.read_text(), json.loads(training.out.read_text())
    (told,) = result["restarts"]
    assert told.startswith("worker "), told
    assert "Traceback" not in err
    assert result["num_replicas"] == 2
    assert result["global_batch_size"] == 48
    assert result["steps"] == 30 * STEPS_IN_EPOCH
    with checkpoints.Checkpoints(Path(result["checkpoints"]), read_only=True) as saved:
        arrays, _ = saved.restore(result["steps"])
    assert arrays["optimizer/0000"] == result["steps"], "each step was done once, by one optimizer"
    run_id = result["run_id"]
    logs = {path.name for path in Path(f"mlruns/runs/{run_id}/logs").glob("*/*")}
    assert "worker-1.log" in logs, "written on another node"
    assert training.survivors() == []

    if not compared:
        return
    # Nothing disturbs these: three workers to the same step, then two.
    _, _, after = err.partition("resuming at step ")
    epochs = int(after.split(",")[0]) // STEPS_IN_EPOCH
    local = (*SAME, "strategy.kind=multi_worker", "strategy.launcher=local")
    one_thread_each = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
    for resume, workers, until in (([], 3, epochs), (["--resume", "latest"], 2, 30)):
        settings = words(*local, f"strategy.workers={workers}", f"train.epochs={until}")
        part = start("stratagem", "train", "--json", *(resume or ["--fresh"]), *settings, **one_thread_each)
        assert part.process.wait(1000) == 0, part.err.read_text()
    undisturbed = json.loads(part.out.read_text())
    assert undisturbed["run_id"] != run_id
    assert undisturbed["weights_digest"] == result["weights_digest"]


@pytest.mark.exhaustive
def test_too_few_nodes_end_a_training_with_one_message(prepared_project: Path, nodes: Nodes, start: Callable):
    nodes.remove(2)
    two = ("strategy.workers=2", "strategy.min_workers=null", "train.epochs=2000")
    training = start("stratagem", "train", *words(*SAME, *THREE_OR_TWO, *two))
    training.wait_until(" 2/2000 ")
    nodes.remove(1)
    assert training.process.wait(1000) == 1, training.err.read_text()
    (*_, told) = training.err.read_text().splitlines()
    assert told.startswith("error: train failed: worker "), told
    assert "2 processes of 1 CPU each are needed, but the 1 nodes of the cluster have room for 1. Start more" in told
    assert ". The same command continues from the latest checkpoint; the logs: mlruns/runs/" in told
    assert training.survivors() == []


@pytest.mark.exhaustive
def test_parameter_servers_go_on_without_a_worker_whose_node_is_lost_and_the_command_stops_as_elsewhere(
    prepared_project: Path, nodes: Nodes, start: Callable
):
    nodes.add(2)
    sizes = ("strategy.kind=parameter_server", "strategy.launcher=ray", "strategy.workers=2", "strategy.cpus=1")
    settings = words(*sizes, "train.loop=custom", "model.name=mlp", "model.options={units: [16]}", "train.epochs=1000")
    # As many places as there are.
    training = start("stratagem", "train", *settings, "--set=strategy.ps=2")
    training.wait_until(" 2/1000 ")
    nodes.remove(1)
    training.wait_until("worker 0 died (Ray has lost its place on node 127.0.0.3); the training continues without it")
    folder = Path(entries.newest("digits").folder, "checkpoints")
    reached = newest(folder)
    training.wait_until(lambda: newest(folder) >= reached + 200)
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(300) == 143, training.err.read_text()
    assert "is saved. The same command continues" in training.err.read_text()
    assert training.survivors() == []

    command = ["stratagem", "train", *settings, "--set=strategy.ps=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "5 processes of 1 CPU each are needed, but the 3 nodes of the cluster have room for 4" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_the_trials_of_a_sweep_train_side_by_side_on_rays_nodes(
    prepared_project: Path, lasting_nodes: Nodes, run: Callable
):
    (prepared_project / "ray.yaml").write_text(
        "set: {strategy.kind: multi_worker, strategy.launcher: ray, strategy.workers: 2, strategy.cpus: 1,\n"
        "      train.epochs: 2, model.name: mlp, tracking.system_metrics: false, register.minimum: null}\n"
        "space:\n"
        "  model.options.units: [[8], [16]]\n"
    )
    done = run(["stratagem", "sweep", "ray.yaml", "--trials", "2", "--parallel", "2", "--json"], cwd=prepared_project)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [one["state"] for one in result["trials"]] == ["complete", "complete"]
    began, ended = [], []
    for one in result["trials"]:
        (log,) = (prepared_project / "mlruns" / "runs" / one["run_id"] / "logs").glob("*/worker-1.log")
        began.append(calendar.timegm(time.strptime(log.parent.name[:15], "%Y%m%d-%H%M%S")))
        ended.append(log.stat().st_mtime)
    assert max(began) < min(ended), "both were at work at once"
    assert result["final"]["num_replicas"] == 2

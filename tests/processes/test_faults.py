"""A training that is killed, stopped or robbed of what it needs, and given again by the same command.

Each row is a real command, a real fault at a moment that is seen from outside, and what must hold. Then the same
command comes to the end that it would have had alone: the same bits in the weights, and one MLflow run, FINISHED.
docs/reliability.md is the same table for readers.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from tasks import prepared_data, records
from tasks.checkpoints import Checkpoints
from tasks.machine import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS_IN_EPOCH = 21
EPOCHS = 12
STEPS = EPOCHS * STEPS_IN_EPOCH

# Dropout, whose seeds have to be restored, and checkpoints in the middle of epochs.
SAME = (
    "train.deterministic=true",
    f"train.epochs={EPOCHS}",
    "train.per_replica_batch_size=null",
    "train.global_batch_size=64",
    "model.options={units: [16], dropout: 0.5}",
    "checkpoint.every_steps=4",
)
ONE = ("strategy.kind=one_device", "strategy.device=cpu")
LATE = (*ONE, "checkpoint.every_steps=99", "checkpoint.every_epochs=null")
# The writing of 40 MB can be seen.
LARGE = (*ONE, "model.options={units: [1500, 1500], dropout: 0.5}")
LAYOUTS = {
    "one_device fit": ONE,
    "one_device custom": (*ONE, "train.loop=custom", "train.steps_per_execution=3"),
    "mirrored custom": ("strategy.kind=mirrored", "strategy.devices=2", "train.loop=custom"),
    "multi_worker fit": ("strategy.kind=multi_worker",),
    "multi_worker custom": ("strategy.kind=multi_worker", "train.loop=custom"),
    "model_parallel": (
        "strategy.kind=model_parallel", "strategy.mesh_shape=[1, 2]", "strategy.layout={.*kernel: [null, model]}"
    ),
}  # fmt: skip


def newest(command) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max(command.checkpoints(), default=0)


def after(step: int) -> Callable:
    return lambda command: newest(command) >= step


def trains(command) -> bool:
    """Whether the training has begun, and no checkpoint is written yet."""
    return "strategy " in command.err.read_text() and not newest(command)


def kill_leader(command) -> None:
    command.process.kill()


def stop_and_wait(command, process) -> None:
    """Stop a process, which takes it a moment to do on a busy machine."""
    process.suspend()
    command.wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def kill_inside(file: str) -> Callable:
    """Kill a command, and the process that writes its checkpoint, while that one is at a file of it."""

    def kill(command) -> None:
        (stage,) = command.members("serve")
        while True:
            command.wait_until(lambda: inside_of_checkpoint(command, file))
            stop_and_wait(command, stage)
            if inside_of_checkpoint(command, file):  # Still, now that it stands.
                break
            stage.resume()
        command.process.kill()
        stage.kill()

    return kill


def inside_of_checkpoint(command, file: str) -> bool:
    """Whether a checkpoint is being written, after one that is whole: its arrays, or what comes after them."""
    whole = next(command.project.glob("mlruns/runs/*/checkpoints/[0-9]*/arrays.npz"), None)
    found = list(command.project.glob("mlruns/runs/*/checkpoints/.*.partial"))
    if whole is None or not found or (found[0] / "state.json").exists():
        return False
    with contextlib.suppress(FileNotFoundError):
        arrays_are_there = (found[0] / "arrays.npz").stat().st_size == whole.stat().st_size
        return arrays_are_there if file == "state.json" else not arrays_are_there
    return False


def kill_stage(command) -> None:
    (stage,) = command.members("serve")
    stage.kill()


def tell(number: int) -> Callable:
    return lambda command: command.process.send_signal(number)


def tell_stage(command) -> None:
    (stage,) = command.members("serve")
    stage.terminate()


@dataclass(frozen=True)
class Fault:
    name: str
    when: Callable
    fault: Callable
    exit_code: int
    status: str
    """Of the run in MLflow and in its folder, before the same command is given again."""
    overrides: tuple[str, ...] = ONE


KILL = -signal.SIGKILL
FAULTS = [
    Fault("kill -9 before the first checkpoint", trains, kill_leader, KILL, "RUNNING", LATE),
    Fault("kill -9 while a checkpoint is written", trains, kill_inside("arrays.npz"), KILL, "RUNNING", LARGE),
    Fault("kill -9 between weights and state", trains, kill_inside("state.json"), KILL, "RUNNING", LARGE),
    Fault("kill -9 of the stage process", after(30), kill_stage, 1, "FAILED"),
    Fault("SIGTERM of the stage process", after(30), tell_stage, 143, "KILLED"),
    Fault("Ctrl-C", after(30), tell(signal.SIGINT), 130, "KILLED"),
    Fault("SIGTERM", after(30), tell(signal.SIGTERM), 143, "KILLED"),
    # tests/flows/test_own_data.py kills whole runs of the others: mirrored fit, multi_worker fit and data_parallel.
    *(
        Fault(f"kill -9, {name}", after(30), kill_leader, KILL, "RUNNING", layout)
        for name, layout in LAYOUTS.items()
        if name != "multi_worker fit"
    ),
    *(
        Fault(f"SIGTERM, {name}", after(30), tell(signal.SIGTERM), 143, "KILLED", LAYOUTS[name])
        for name in ("multi_worker fit", "multi_worker custom")
    ),
]  # fmt: skip

FRESH = ("--fresh",)
whole_digests: dict[tuple[str, ...], str] = {}


@pytest.fixture
def whole(stratagem, cluster_project):
    """Return the weights_digest of a training that nothing disturbs, with a run folder of its own that is gone then."""

    def whole(*overrides):
        # When checkpoints are written must not change a bit.
        overrides = tuple(override for override in overrides if not override.startswith("checkpoint."))
        if overrides not in whole_digests:
            command = stratagem(
                "train", *SAME, *overrides, "checkpoint.every_steps=null", "tracking.experiment=whole", options=FRESH
            )
            assert command.end() == 0, command.err.read_text()
            whole_digests[overrides] = command.result["weights_digest"]
        return whole_digests[overrides]

    return whole


def epochs_in_mlflow(project: Path) -> int:
    """How many points of train/loss the one run in the project's store has, without those of `whole`."""
    query = (
        "SELECT count(*) FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
        "WHERE key = 'train/loss' AND experiments.name != 'whole'"
    )
    with closing(sqlite3.connect(project / "mlruns" / "mlflow.db")) as database:
        (found,) = database.execute(query).fetchone()
    return found


def status_of_folder(project: Path, run_id: str) -> str:
    return json.loads((project / "mlruns" / "runs" / run_id / "status.json").read_text())["status"]


def check_whole(command, digest: str, resumed: bool = True, epochs: int = EPOCHS) -> None:
    """The command came to the end of the training that nothing disturbed."""
    err = command.err.read_text()
    assert command.end() == 0, err
    result = command.result
    assert result["weights_digest"] == digest
    assert result["steps"] == epochs * STEPS_IN_EPOCH
    assert [len(values) for values in result["history"].values()] == [epochs] * len(result["history"])
    assert (f"resuming run {result['run_id']}, which is unfinished; --fresh starts a new one" in err) is resumed
    with Checkpoints(command.project / result["checkpoints"], read_only=True) as saved:
        arrays, _ = saved.restore(result["steps"])
    assert arrays["optimizer/0000"] == result["steps"], "each step was done once"


@pytest.mark.parametrize("row", FAULTS, ids=[row.name for row in FAULTS])
def test_the_same_command_comes_to_the_same_end(stratagem, mlflow_runs, whole, row):
    command = stratagem("train", *SAME, *row.overrides)
    command.wait_until(lambda: row.when(command))
    command.members("serve")
    row.fault(command)
    assert command.end() == row.exit_code, command.err.read_text()
    assert command.survivors() == []
    assert "Traceback" not in command.err.read_text()
    (run,) = mlflow_runs()
    (folder,) = (command.project / "mlruns" / "runs").iterdir()
    assert run["status"] == row.status
    assert status_of_folder(command.project, folder.name) == row.status
    reached = newest(command)
    if row.exit_code in (130, 143):
        assert f"stopped at step {reached}, which is saved. The same command goes on" in command.err.read_text()
        assert f"stopped at step {reached}" in run["reason"]

    again = stratagem("train", *SAME, *row.overrides)
    again.end()
    (run,) = mlflow_runs()
    assert run["status"] == "FINISHED"
    assert run["weights_digest"] == again.result["weights_digest"]
    assert status_of_folder(command.project, again.result["run_id"]) == "FINISHED"
    assert epochs_in_mlflow(command.project) == EPOCHS, "no point is missing, and none is there twice"
    assert ("resuming at step" in again.err.read_text()) == (reached > 0)
    check_whole(again, whole(*row.overrides))


def test_a_training_that_is_killed_at_ten_random_moments_ends_with_the_same_bits(stratagem, mlflow_runs, whole):
    draw, reached = random.Random(os.environ.get("STRATAGEM_TEST_SEED", "0")), []
    # Long enough for ten kills, however many steps a fast machine does until a kill arrives.
    overrides = (*ONE, "checkpoint.every_steps=1", f"train.epochs={4 * EPOCHS}")
    for _ in range(10):
        command = stratagem("train", *SAME, *overrides)
        before = newest(command)
        goal = before + draw.randint(1, 5)
        command.wait_until(lambda command=command, goal=goal: newest(command) >= goal)
        command.members("serve")
        time.sleep(draw.random() / 20)  # Anywhere between two checkpoints, or inside of one.
        command.process.kill()
        assert command.survivors() == []
        reached.append(newest(command))
        assert reached[-1] >= before, "nothing that was saved is lost"
    assert reached[-1] < 4 * STEPS, "each was killed before its end"
    command = stratagem("train", *SAME, *overrides)
    command.end()
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"]
    check_whole(command, whole(*overrides), epochs=4 * EPOCHS)


def is_pending(number: int, pid: int) -> bool:
    """Whether a signal was sent to a process that has not taken it yet."""
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) & 1 << (number - 1))


def test_a_second_sigterm_stops_at_once_and_damages_nothing(stratagem, mlflow_runs, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    (stage,) = command.members("serve")
    stop_and_wait(command, stage)  # It can save nothing now.
    command.process.send_signal(signal.SIGTERM)
    # Two signals that come before the first is taken are one signal.
    command.wait_until(lambda: is_pending(signal.SIGINT, stage.pid))
    command.process.send_signal(signal.SIGTERM)
    assert command.end(60) == 143, command.err.read_text()
    assert "stopped at once" in command.err.read_text()
    assert command.survivors() == []
    (run,) = mlflow_runs()
    assert run["status"] == "RUNNING"
    reconciling = stratagem("reconcile")
    assert reconciling.end() == 0, reconciling.err.read_text()
    (run,) = mlflow_runs()
    assert run["status"] == "KILLED"
    assert "died" in run["reason"]
    again = stratagem("train", *SAME, *ONE)
    again.end()
    check_whole(again, whole(*ONE))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Other damage to single files is for tests/tasks/test_checkpoints.py and test_prepared_data.py.
@pytest.mark.parametrize("every", [False, True], ids=["the newest", "all"])
def test_damaged_checkpoints(stratagem, whole, every):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    command.members("serve")
    command.process.kill()
    assert command.survivors() == []
    (folder,) = command.project.glob("mlruns/runs/*/checkpoints")
    steps = command.checkpoints()
    for step in steps if every else steps[-1:]:
        flip_a_bit(folder / str(step) / "arrays.npz")
    files = sorted(folder.rglob("*"))
    again = stratagem("train", *SAME, *ONE)
    if every:
        assert again.end() == 2
        (message,) = [line for line in again.err.read_text().splitlines() if line.startswith("error: ")]
        assert f"no checkpoint in {folder} is whole" in message
        assert "Nothing was deleted" in message
        assert [path for path in sorted(folder.rglob("*")) if ".partial" not in str(path)] == [
            path for path in files if ".partial" not in str(path)
        ]
        fresh = stratagem("train", *SAME, *ONE, options=("--fresh",))
        fresh.end()
        check_whole(fresh, whole(*ONE), resumed=False)
        return
    again.end()
    check_whole(again, whole(*ONE))
    assert f"checkpoint {steps[-1]} is damaged; it now lies in " in " ".join(again.err.read_text().split())
    assert (folder.parent / "damaged_checkpoints" / str(steps[-1])).is_dir()


def test_damaged_data_are_refused_and_nothing_is_trained(stratagem, mlflow_runs):
    project = Path.cwd()
    flip_a_bit(project / "data/digits/prepared/train_images.npy")
    command = stratagem("train", *SAME, *ONE)
    assert command.end() == 2
    (message,) = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
    assert "train_images.npy" in message
    assert "Traceback" not in command.err.read_text()
    assert not (project / "mlruns" / "mlflow.db").exists() or mlflow_runs() == []


def test_two_of_the_same_at_once(stratagem, mlflow_runs):
    first = stratagem("train", *SAME, *ONE, "train.epochs=9999")
    first.wait_until(lambda: newest(first) > 0)
    (folder,) = (first.project / "mlruns" / "runs").iterdir()
    for options, what in (((), "one_device fit on digits"), (("--resume", folder.name), f"run {folder.name}")):
        overrides = ("train.epochs=9998",) if options else ("train.epochs=9999",)
        second = stratagem("train", *SAME, *ONE, *overrides, options=options)
        assert second.end() == 2
        said = f"error: {what} with these settings is being done by process {first.process.pid} on "
        assert said in second.err.read_text()
    before = newest(first)
    first.wait_until(lambda: newest(first) > before)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    assert [run["status"] for run in mlflow_runs()] == ["KILLED"]


def test_a_run_that_is_named_is_resumed_only_as_the_same_training(stratagem, mlflow_runs):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    command.members("serve")
    command.process.kill()
    assert command.survivors() == []
    (folder,) = (command.project / "mlruns" / "runs").iterdir()
    refused = stratagem(
        "train", *SAME, *ONE, "train.seed=7", "schedule.learning_rate=0.1", options=("--resume", folder.name)
    )
    assert refused.end() == 2
    said = refused.err.read_text()
    assert "schedule.learning_rate was 0.01 and is 0.1; train.seed was 0 and is 7" in said
    assert "--allow-changes" in said
    # Two devices share the batch, and it is cut into smaller ones.
    changes = (*LAYOUTS["mirrored custom"], "schedule.learning_rate=0.1", "train.global_batch_size=32")
    options = ("--resume", folder.name, "--allow-changes")
    allowed = stratagem("train", *SAME, *changes, options=options)
    assert allowed.end() == 0, allowed.err.read_text()
    assert allowed.result["run_id"] == folder.name
    assert allowed.result["epochs"] == EPOCHS
    assert allowed.result["history"]["train/learning_rate"][-1] == pytest.approx(0.1)
    (run,) = mlflow_runs()
    assert run["status"] == "FINISHED"
    assert run["changed.schedule.learning_rate"] == "0.01 -> 0.1"


NAN = ("optimizer={kind: sgd}", "schedule.learning_rate=1.0e+30", "train.deterministic=false")


def test_a_loss_that_is_no_number_stops_the_training_and_marks_the_run(stratagem, mlflow_runs):
    command = stratagem("train", *SAME, *ONE, *NAN)
    assert command.end() == 1
    (message,) = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
    assert "train/loss is nan at step" in message
    assert "train.on_nonfinite=rollback" in message
    (run,) = mlflow_runs()
    assert run["status"] == "FAILED"
    assert "train/loss is nan" in run["reason"]
    assert int(run["nonfinite_steps"]) > 0


@pytest.mark.parametrize("layout", ["one_device fit", "multi_worker custom"])
def test_a_training_rolls_back_and_goes_on_with_a_lower_learning_rate(stratagem, mlflow_runs, layout):
    options = (
        "optimizer={kind: sgd}",
        "schedule.learning_rate=1.0e+30",
        "train.on_nonfinite=rollback",
        "train.rollback_factor=1.0e-31",
    )
    command = stratagem("train", *SAME, *LAYOUTS[layout], *options)
    assert command.end() == 0, command.err.read_text()
    (step,) = command.result["nonfinite_steps"]
    assert command.result["steps"] == STEPS
    assert all(np.isfinite(command.result["history"]["train/loss"]))
    assert command.result["history"]["train/learning_rate"][-1] == pytest.approx(0.1)
    assert "Back to the last checkpoint, with 1e-31 times the learning rate, rollback 1 of 3" in " ".join(
        command.err.read_text().split()
    )
    (run,) = mlflow_runs()
    assert (run["status"], run["nonfinite_steps"]) == ("FINISHED", str(step))


def records_of(command) -> list[str]:
    return [path.name for path in command.project.glob("mlruns/runs/*/records/*.json")]


def is_there(pattern: str) -> Callable:
    return lambda command: list(command.project.glob(pattern))


def has(record: str) -> Callable:
    return lambda command: record in records_of(command)


def flow_runs() -> dict[str, str]:
    """The state of every flow run in Prefect's own database, by id."""
    path = Path(os.environ["PREFECT_HOME"], "prefect.db")
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=60)) as database:
        return {str(uuid.UUID(run)): state for run, state in database.execute("SELECT id, state_type FROM flow_run")}


def registers(command) -> bool:
    """Whether the model's files are in the store. The flow, which would end the run a tenth of a second later, stands
    still from the moment when its registration has begun."""
    if "evaluation.json" not in records_of(command):
        return False
    with closing(sqlite3.connect(command.project / "mlruns" / "mlflow.db", timeout=60)) as database:
        ((begun,),) = database.execute("SELECT count(*) FROM logged_models").fetchall()
    if begun:
        command.process.send_signal(signal.SIGSTOP)
    return bool(begun) and is_there("mlruns/artifacts/**/MLmodel")(command)


# Each: where a whole run is when its flow's process is killed, and whether an MLflow run has begun by then.
PLACES = [
    ("download", is_there("data/digits/.scratch.*"), False),
    ("prepare", is_there("data/digits/.prepared.*"), False),
    ("evaluation", has("training.json"), True),
    ("registration", registers, True),
]
WHOLE = (*SAME, *ONE, "register.minimum=0")


@pytest.mark.parametrize(("place", "when", "begun"), PLACES, ids=[place for place, _, _ in PLACES])
def test_a_whole_run_whose_flow_is_killed(stratagem, cluster_project, mlflow_runs, whole, place, when, begun):
    if not begun:
        for part in ("raw", "prepared"):
            shutil.rmtree(cluster_project / "data" / "digits" / part)
    known = set(flow_runs())
    command = stratagem("run", *WHOLE)
    command.wait_until(lambda: when(command))
    command.members("serve")
    assert len(command.seen) >= (2 if begun else 1), "the API, and the stage process"
    command.process.kill()
    assert command.end() == KILL
    assert command.survivors() == []
    (killed,) = set(flow_runs()) - known
    assert flow_runs()[killed] == "RUNNING", "what Prefect says for ever, if nobody ends it"
    if begun:
        assert [run["status"] for run in mlflow_runs()] == ["RUNNING"]

    again = stratagem("run", *WHOLE)
    assert again.end() == 0, again.err.read_text()
    result = again.result
    assert result["flow_run_id"] != killed
    assert (flow_runs()[killed], flow_runs()[result["flow_run_id"]]) == ("CRASHED", "COMPLETED")
    runs = mlflow_runs()
    assert [run["status"] for run in runs] == ["FINISHED"]
    assert runs[0]["flow_run_id"] == result["flow_run_id"]
    assert result["weights_digest"] == whole(*ONE)
    assert result["model_version"] == "digits-mlp/1", "one version a run"
    assert result["aliases"] == ["challenger"]
    assert runs[0]["weights_digest"] == result["weights_digest"]
    assert epochs_in_mlflow(cluster_project) == EPOCHS
    with closing(sqlite3.connect(cluster_project / "mlruns" / "mlflow.db")) as database:
        query = "SELECT DISTINCT value FROM metrics WHERE key = 'test/accuracy' AND run_uuid = ?"
        assert database.execute(query, (result["run_id"],)).fetchall() == [(result["metrics"]["test/accuracy"],)]
    leftovers = [*cluster_project.glob("data/digits/.scratch.*"), *cluster_project.glob("data/digits/.prepared.*")]
    assert leftovers == []
    assert [path.name for path in (cluster_project / "mlruns" / "active").glob("*.json")] == []


def test_a_download_that_is_killed_while_it_extracts(stratagem, cluster_project, archives):
    options = ("dataset.name=mnist", f"dataset.downloads={archives}")
    command = stratagem("prepare", *options)
    command.wait_until(lambda: list(cluster_project.glob("data/mnist/.scratch.*/extracted/*")))
    command.process.kill()
    folder = cluster_project / "data" / "mnist"
    assert not (folder / "raw" / "manifest.json").exists()
    again = stratagem("prepare", *options)
    assert again.end() == 0, again.err.read_text()
    prepared = records.load(records.PreparedDataset, folder / "prepared" / "manifest.json")
    prepared_data.verify(prepared)
    assert {name: split.num_examples for name, split in prepared.splits.items()} == {"train": 60_000, "test": 10_000}
    assert list(folder.glob(".scratch.*")) == []


def test_a_whole_run_that_is_told_to_stop_is_cancelled_everywhere(stratagem, mlflow_runs, whole):
    command = stratagem("run", *WHOLE)
    command.wait_until(lambda: newest(command) >= 30)
    command.members("serve")
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130
    assert command.survivors() == []
    said = command.err.read_text()
    assert "interrupted: the training was stopped at step " in said
    assert "interrupted" in said.splitlines()[-1]
    assert "Traceback" not in said
    (run,) = mlflow_runs()
    assert run["status"] == "KILLED"
    assert flow_runs()[run["flow_run_id"]] == "CANCELLED"
    again = stratagem("run", *WHOLE)
    assert again.end() == 0, again.err.read_text()
    assert again.result["weights_digest"] == whole(*ONE)


def test_reconcile_ends_a_killed_run(stratagem, mlflow_runs):
    command = stratagem("run", *WHOLE, "train.epochs=9999")
    command.wait_until(lambda: newest(command) > 0)
    command.members("serve")
    reconciling = stratagem("reconcile")
    assert reconciling.end() == 0, reconciling.err.read_text()
    assert reconciling.result == {"ended": [], "undelivered": []}, "a run that is at work is left alone"
    command.process.kill()
    assert command.survivors() == []
    # Some kills meet a checkpoint half-written; here every one does.
    (checkpoints,) = Path("mlruns").glob("runs/*/checkpoints")
    (checkpoints / ".9999.partial").mkdir()
    reconciling = stratagem("reconcile")
    assert reconciling.end() == 0, reconciling.err.read_text()
    (run,) = mlflow_runs()
    assert (run["status"], flow_runs()[run["flow_run_id"]]) == ("KILLED", "CRASHED")
    ended = {record["what"].rpartition(" ")[0]: record["status"] for record in reconciling.result["ended"]}
    assert ended == {"MLflow run": "KILLED", "Prefect flow run": "CRASHED", "": "removed"}
    assert [*Path("mlruns").rglob("*.partial")] == []
    again = stratagem("reconcile")
    assert again.end() == 0
    assert again.result == {"ended": [], "undelivered": []}


def test_without_prefects_server_a_run_is_refused_at_once(stratagem):
    (port,) = free_ports(1)
    command = stratagem("run", *WHOLE, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
    assert command.end() == 2
    assert f"PREFECT_API_URL = http://127.0.0.1:{port}/api: no Prefect server answers" in command.err.read_text()
    assert not (Path.cwd() / "mlruns" / "runs").exists()


@contextlib.contextmanager
def mlflow_server(port: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Serve the store in a folder until the block ends."""
    serve = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    serve += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "served")]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield server
    finally:
        server.terminate()
        server.wait()


def served_runs(folder: Path) -> list[tuple[str, int]]:
    """The status of each run in a server's store, and how many points of train/loss it has."""
    points = "SELECT count(*) FROM metrics WHERE key = 'train/loss' AND run_uuid = runs.run_uuid"
    with closing(sqlite3.connect(folder / "server.db")) as database:
        return database.execute(f"SELECT status, ({points}) FROM runs").fetchall()


def test_without_a_tracking_server_a_run_comes_to_its_end_and_tells_later(stratagem, whole, tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "server.db")
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    command = stratagem("run", *WHOLE, MLFLOW_TRACKING_URI=uri)
    assert command.end() == 0, command.err.read_text()
    result = command.result
    assert result["weights_digest"] == whole(*ONE)
    assert result["model_version"] is None
    assert "no MLflow server answers" in result["reason"]
    assert f"stratagem register --run {result['run_id']}" in result["reason"]
    assert command.err.read_text().count("MLflow cannot be told of this run now") == 1

    with mlflow_server(port, tmp_path):
        reconciling = stratagem("reconcile", MLFLOW_TRACKING_URI=uri)
        assert reconciling.end() == 0, reconciling.err.read_text()
        assert reconciling.result["undelivered"] == []
        registering = stratagem("register", options=("--run", result["run_id"]), MLFLOW_TRACKING_URI=uri)
        assert registering.end() == 0, registering.err.read_text()
        assert registering.result["model_version"] == "1"
    assert served_runs(tmp_path) == [("FINISHED", EPOCHS)], "no point is missing, and none is there twice"


def test_a_tracking_server_that_hangs_and_dies_disturbs_no_step(stratagem, whole, tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "server.db")
    (port,) = free_ports(1)
    environment = {
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "2",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    with mlflow_server(port, tmp_path) as server:
        command = stratagem("train", *SAME, *ONE, **environment)
        command.wait_until(lambda: newest(command) >= 20)
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        for process in family:
            process.suspend()
        command.wait_until(lambda: "MLflow cannot be told of this run now" in command.err.read_text())
        for process in family:
            process.kill()
    assert command.end() == 0, command.err.read_text()
    check_whole(command, whole(*ONE), resumed=False)
    assert command.err.read_text().count("MLflow cannot be told of this run now") == 1
    with mlflow_server(port, tmp_path):
        # A server that has just started may take longer than the one that hung was given.
        reconciling = stratagem("reconcile", **environment | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"})
        assert reconciling.end() == 0, reconciling.err.read_text()
        assert reconciling.result["undelivered"] == []
    assert served_runs(tmp_path) == [("FINISHED", EPOCHS)], "no point is missing, and none is there twice"


@pytest.fixture
def small_disk(cluster_project):
    """mlruns, with MLflow's store in it, on a file system of a few megabytes."""
    folder = cluster_project / "mlruns"
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounting.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounting.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_keeps_the_last_checkpoint(stratagem, mlflow_runs, small_disk, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()
    assert command.end() == 1
    said = command.err.read_text()
    (message,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "the checkpoint of step" in message
    assert "Make room, and give the same command again" in message
    assert not re.search("sqlalchemy|sqlite|Traceback", said), "MLflow's store is full, too, and no library tells of it"
    assert newest(command) >= 30
    filler.unlink()
    again = stratagem("train", *SAME, *ONE)
    again.end()
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"]
    check_whole(again, whole(*ONE))


def test_data_that_changed_are_made_again_and_a_damaged_cache_is_noticed(stratagem, cluster_project, run):
    """DVC trusts what lies in its cache; the manifest has the sha256 of each array."""
    overrides = (*SAME, *ONE, "train.epochs=1")
    done = run(["stratagem", "prepare"])  # Through DVC, which then has them in its cache.
    assert done.returncode == 0, done.stderr
    images = cluster_project / "data/digits/prepared/train_images.npy"
    whole = images.read_bytes()
    os.chmod(images, 0o644)
    flip_a_bit(images)
    command = stratagem("run", *overrides)
    assert command.end() == 0, command.err.read_text()
    assert images.read_bytes() == whole

    (cached,) = [path for path in cluster_project.glob(".dvc/cache/files/md5/*/*") if path.read_bytes() == whole]
    os.chmod(cached, 0o644)
    flip_a_bit(cached)
    os.chmod(cached, 0o444)
    shutil.rmtree(images.parent)
    delivered = run(["dvc", "checkout", "data/digits/dvc.yaml:prepare"])
    assert delivered.returncode == 0, delivered.stderr
    refused = stratagem("run", *overrides)
    assert refused.end() == 2
    (message,) = [line for line in refused.err.read_text().splitlines() if line.startswith("error: ")]
    assert "train_images.npy: damaged, its sha256 is" in message
    assert "Rebuild it: stratagem prepare --set dataset.name=digits --force" in message
    done = run(["stratagem", "prepare", "--set", "dataset.name=digits", "--force"])
    assert done.returncode == 0, done.stderr
    assert images.read_bytes() == whole


def test_two_dvc_repro_at_once_leave_whole_data(cluster_project):
    for part in ("raw", "prepared"):
        shutil.rmtree(cluster_project / "data" / "digits" / part)
    target = [sys.executable, "-m", "dvc", "repro", "data/digits/dvc.yaml:prepare"]
    both = [subprocess.Popen(target, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes, said
    for code, text in zip(codes, said, strict=True):
        # The one is said of a stage's files, the other of the whole project, after three seconds.
        assert code == 0 or "is busy" in text or "Unable to acquire lock" in text, text
    again = subprocess.run([*target, "--quiet"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    prepared_data.verify(records.load(records.PreparedDataset, cluster_project / "data/digits/prepared/manifest.json"))


def test_a_run_that_is_stopped_for_a_while_goes_on(stratagem, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    family = [psutil.Process(command.process.pid), *command.members("serve")]
    for process in family:
        process.suspend()
    time.sleep(3)
    for process in family:
        process.resume()
    command.end()
    check_whole(command, whole(*ONE), resumed=False)


def test_a_place_that_cannot_be_written_is_refused(stratagem, cluster_project):
    folder = cluster_project / "mlruns"
    mounting = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]
    mounted = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        for command in ("train", "run"):
            refused = stratagem(command, *SAME, *ONE)
            assert refused.end() == 2
            (message,) = [line for line in refused.err.read_text().splitlines() if line.startswith("error: ")]
            assert f"{folder} cannot be written (Read-only file system)" in message
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

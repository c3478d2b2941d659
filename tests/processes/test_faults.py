"""A training that is killed, stopped or robbed of what it needs, and given again by the same command.

Each row is a real command, a real fault at a moment that is seen from outside, and what must hold. Then the same
command comes to the end that it would have had alone: the same bits in the weights, and one MLflow run, FINISHED.
docs/reliability.md is the same table for readers.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.processes.trainings import (
    EPOCHS,
    KILL,
    LAYOUTS,
    ONE,
    SAME,
    check_whole,
    epochs_in_mlflow,
    flip_a_bit,
    newest,
    status_of_folder,
    stop_and_wait,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

LATE = (*ONE, "checkpoint.every_steps=99", "checkpoint.every_epochs=null")
# The writing of 40 MB can be seen.
LARGE = (*ONE, "model.options={units: [1500, 1500], dropout: 0.5}")


def after(step: int) -> Callable:
    return lambda command: newest(command) >= step


def trains(command) -> bool:
    """Whether the training has begun, and no checkpoint is written yet."""
    return "strategy " in command.err.read_text() and not newest(command)


def kill_leader(command) -> None:
    command.process.kill()


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


@dataclass(frozen=True)
class Fault:
    name: str
    when: Callable
    fault: Callable
    exit_code: int
    status: str
    """Of the run in MLflow and in its folder, before the same command is given again."""
    overrides: tuple[str, ...] = ONE


FAULTS = [
    Fault("kill -9 before the first checkpoint", trains, kill_leader, KILL, "RUNNING", LATE),
    Fault("kill -9 while a checkpoint is written", trains, kill_inside("arrays.npz"), KILL, "RUNNING", LARGE),
    Fault("kill -9 between weights and state", trains, kill_inside("state.json"), KILL, "RUNNING", LARGE),
    Fault("kill -9 of the stage process", after(30), kill_stage, 1, "FAILED"),
    # Ctrl-C, and signals to the stage process or to all: tests/flows/test_signals.py.
    Fault("SIGTERM", after(30), tell(signal.SIGTERM), 143, "KILLED"),
    # Below, one_device fit is killed at random moments. tests/flows/test_own_data.py kills whole runs of mirrored fit,
    # multi_worker fit and data_parallel.
    *(
        Fault(f"kill -9, {name}", after(30), kill_leader, KILL, "RUNNING", layout)
        for name, layout in LAYOUTS.items()
        if name != "one_device fit"
    ),
    Fault("SIGTERM, multi_worker", after(30), tell(signal.SIGTERM), 143, "KILLED", LAYOUTS["multi_worker custom"]),
]  # fmt: skip


# Another kill at the same place, or the same kill of another layout.
MORE = (
    "kill -9 before the first checkpoint", "kill -9 between weights and state", "kill -9, mirrored custom",
    "kill -9, multi_worker custom", "SIGTERM, multi_worker", "SIGTERM",
)  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=pytest.mark.exhaustive if row.name in MORE else ()) for row in FAULTS],
)
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
    if row.exit_code == 1:
        told = "the process that ran train died (SIGKILL). The machine may have run out of memory. The same command"
        assert f"error: {told} continues\n" in command.err.read_text()
    if row.exit_code == 143:
        assert f"stopped at step {reached}, which is saved. The same command continues" in command.err.read_text()
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


KILLS = int(os.environ.get("STRATAGEM_TEST_KILLS", "2"))
"""Of each strategy; docs/reliability.md has the result of 14."""
LONGEST_SECONDS = 25.0
"""Until the next kill: long enough to start, to build the model and to train for a while."""


EPOCHS_OF_A_KILL = {"one_device fit": 200, "mirrored custom": 100, "multi_worker custom": 40}
"""More than a fast machine does until the next kill."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_training_that_is_killed_at_random_moments_ends_with_the_same_bits(stratagem, mlflow_runs, whole, name):
    draw, killed = random.Random(f"{os.environ.get('STRATAGEM_TEST_SEED', '0')} {name}"), []
    epochs = EPOCHS_OF_A_KILL[name] * KILLS
    overrides = (*LAYOUTS[name], f"train.epochs={epochs}")
    command = stratagem("train", *SAME, *overrides)
    while len(killed) < KILLS:
        before, end = newest(command), time.monotonic() + draw.uniform(0, LONGEST_SECONDS)
        while time.monotonic() < end and command.process.poll() is None:
            time.sleep(0.005)
        members = [*command.members("serve"), *command.members("assist")]
        if command.process.poll() is None:
            victim = draw.randrange(1 + len(members))
            killed.append((victim, newest(command)))
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(command.process.pid).kill() if victim == 0 else members[victim - 1].kill()
            # A cluster starts its members again by itself, as long as strategy.max_restarts allows it.
            if victim > 0 and "multi_worker" in name:
                continue
        assert command.end() in (KILL, 1), command.err.read_text()
        assert command.survivors() == []
        assert newest(command) >= before, "nothing that was saved is lost"
        command = stratagem("train", *SAME, *overrides)
    print(f"{name}: killed (0 is the command, the others are its processes; at which step): {killed}")
    if command.end() == 1:  # The last kill was one more than strategy.max_restarts allows.
        command = stratagem("train", *SAME, *overrides)
        command.end()
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"]
    check_whole(command, whole(*overrides), "resuming run" in command.err.read_text(), epochs)


def is_pending(number: int, pid: int) -> bool:
    """Whether a signal was sent to a process that has not taken it yet."""
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) & 1 << (number - 1))


def test_a_second_ctrl_c_stops_at_once_and_damages_nothing(stratagem, mlflow_runs, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    (stage,) = command.members("serve")
    stop_and_wait(command, stage)  # It can save nothing now.
    command.process.send_signal(signal.SIGINT)
    # Two signals that come before the first is taken are one signal.
    command.wait_until(lambda: is_pending(signal.SIGINT, stage.pid))
    command.process.send_signal(signal.SIGINT)
    assert command.end(60) == 130, command.err.read_text()
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
        said = f"error: {what} with these settings is already running in process {first.process.pid} on "
        assert said in second.err.read_text()
    before = newest(first)
    first.wait_until(lambda: newest(first) > before)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 143
    assert [run["status"] for run in mlflow_runs()] == ["KILLED"]


NAN = ("optimizer={kind: sgd}", "schedule.learning_rate=1.0e+30", "train.deterministic=false")


@pytest.mark.exhaustive
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

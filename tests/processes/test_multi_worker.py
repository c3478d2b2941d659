"""multi_worker in real processes: a death or a hang in the middle of a training; and clusters of someone else's, of
data_parallel, too."""

import json
import os
import signal
import socket

import pytest

pytestmark = pytest.mark.slow

# Of 1,293 examples, 64 at once.
STEPS_IN_EPOCH = 21

CHIEF, OTHER = "serve", "assist"
# Each: whose process, the signal, what is told. The chief and the other worker get each signal, one after another.
LOSSES = {
    "custom": [
        (CHIEF, signal.SIGKILL, "worker 0 died (SIGKILL)"),
        (OTHER, signal.SIGSTOP, "worker 1 "),
        (CHIEF, signal.SIGTERM, "worker 0 received a signal to stop"),
    ],
    "fit": [
        (OTHER, signal.SIGKILL, "worker 1 died (SIGKILL)"),
        (CHIEF, signal.SIGSTOP, "worker "),  # The other one may notice first.
        (OTHER, signal.SIGTERM, "worker 1 received a signal to stop"),
    ],
}
LONG_EPOCHS = 60


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("loop", LOSSES)
def test_a_training_survives_the_loss_of_each_worker(stratagem, cluster_project, mlflow_runs, loop):
    training = stratagem(
        "train",
        "strategy.kind=multi_worker",
        f"train.loop={loop}",
        f"train.epochs={LONG_EPOCHS}",
        "train.steps_per_execution=1",
        "strategy.heartbeat_timeout_seconds=15",
    )
    training.wait_until(lambda: "strategy " in training.err.read_text())  # All have found each other.
    assert training.reached_by() == (set(), {"lo"})
    assert training.open_servers() == []
    reached = 0
    for number_of_loss, (entry, number, _) in enumerate(LOSSES[loop], 1):
        training.wait_until(lambda step=reached: max(training.checkpoints(), default=0) > step)
        (victim,) = training.members(entry)
        reached = max(training.checkpoints())
        victim.send_signal(number)
        told = f"all 2 processes restart ({number_of_loss} of 3)"
        training.wait_until(lambda told=told: told in training.err.read_text())
        training.wait_until(lambda entry=entry: training.members(entry))
        # A signal to stop saves its step.
        reached = max(training.checkpoints())
    assert training.end() == 0, training.err.read_text()
    result = training.result
    assert result["steps"] == LONG_EPOCHS * STEPS_IN_EPOCH
    assert result["num_replicas"] == 2
    assert [len(values) for values in result["history"].values()] == [LONG_EPOCHS] * 5
    assert len(result["restarts"]) == 3
    (run,) = mlflow_runs()
    assert (run["status"], run["restarts"], run["restart_reasons"]) == ("FINISHED", "3", "; ".join(result["restarts"]))
    err = training.err.read_text()
    for place, (told, (_, _, reason)) in enumerate(zip(result["restarts"], LOSSES[loop], strict=True), 1):
        assert told.startswith(reason)
        logs = f"logs: mlruns/runs/{result['run_id']}/logs/"
        assert f"{told}; all 2 processes restart ({place} of 3); {logs}" in err
    assert err.count("resuming at step") == 3, "not from the beginning"
    assert "Traceback" not in err
    assert "UNAVAILABLE" not in err
    logs = list((cluster_project / "mlruns" / "runs" / result["run_id"] / "logs").glob("*/worker-1.log"))
    assert len(logs) == 1
    assert training.survivors() == []


def _tf_config(index: int, addresses: list[str]) -> str:
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def _addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


TENSORFLOW, JAX = ("strategy.kind=multi_worker",), ("strategy.kind=data_parallel", "strategy.workers=2")


@pytest.mark.parametrize("strategy", [TENSORFLOW, pytest.param(JAX, marks=pytest.mark.exhaustive)], ids=str)
def test_a_cluster_of_someone_elses_ends_everywhere_when_one_dies(stratagem, mlflow_runs, strategy):
    addresses = _addresses(2)
    overrides = (*strategy, "train.epochs=1000", "strategy.heartbeat_timeout_seconds=15")
    chief, other = (stratagem("train", *overrides, TF_CONFIG=_tf_config(index, addresses)) for index in range(2))
    chief.wait_until(chief.checkpoints)
    # On JAX the chief alone serves at an address of TF_CONFIG.
    assert chief.open_servers() == addresses[: None if strategy is TENSORFLOW else 1], "it is seen who lets in"
    assert (
        "accept everyone who can reach this machine's ports, because the machines of TF_CONFIG" in chief.err.read_text()
    )
    chief.members("serve")
    other.wait_until(lambda: other.members("assist"))
    other.members("assist")[0].kill()
    for command in (chief, other):
        assert command.end() == 1
        (message,) = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
        assert "Start all members again: the same command for each continues from the latest checkpoint" in message
        assert "Traceback" not in command.err.read_text()
        assert command.survivors() == []
    assert "worker 1 died (SIGKILL)" in other.err.read_text()
    assert [run["status"] for run in mlflow_runs()] == ["FAILED"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [TENSORFLOW, JAX], ids=str)
def test_a_cluster_of_someone_elses_that_is_preempted_is_started_again_from_the_step_it_saved(
    stratagem, mlflow_runs, strategy
):
    overrides = (*strategy, "train.epochs=300", "checkpoint.every_epochs=null")

    def start():
        addresses = _addresses(2)
        return [stratagem("train", *overrides, TF_CONFIG=_tf_config(index, addresses)) for index in range(2)]

    chief, other = start()
    other.wait_until(lambda: "  7/300  " in chief.err.read_text())
    other.process.terminate()
    for command in (chief, other):
        assert command.end() == os.EX_TEMPFAIL, command.err.read_text()
        assert command.survivors() == []
    (step,) = chief.checkpoints()
    assert f"the training was stopped at step {step}, which is saved" in chief.err.read_text()
    (run,) = mlflow_runs()
    assert run["status"] == "KILLED"
    chief, other = start()
    chief.wait_until(lambda: "/300  " in chief.err.read_text())  # Before its first step it may not stop within 15 s.
    assert f"resuming at step {step}" in chief.err.read_text()
    chief.process.terminate()
    for command in (chief, other):
        assert command.end() == os.EX_TEMPFAIL, command.err.read_text()
    assert chief.checkpoints()[-1] >= step
    assert len(mlflow_runs()) == 1


# Holds worker 1 where it builds the model, as long as a file says so.
HELD = """
import json, os, time
from pathlib import Path
import keras

def build(input_shape, num_classes):
    worker = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index")
    while worker == 1 and Path("hold").exists():
        Path("held").touch()
        time.sleep(0.1)
    images = keras.Input(input_shape)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))
"""


def test_an_evaluation_survives_the_loss_of_a_worker(stratagem, cluster_project):
    (cluster_project / "held.py").write_text(HELD)
    model = ("model.name=held:build", "model.options={}")
    training = stratagem("train", "strategy.kind=multi_worker", "train.epochs=1", *model)
    assert training.end() == 0, training.err.read_text()
    named = (training.result["run_id"],)

    (cluster_project / "hold").touch()
    evaluation = stratagem("evaluate", options=named)
    evaluation.wait_until((cluster_project / "held").exists)
    (victim,) = evaluation.members("assist")
    victim.kill()
    (cluster_project / "hold").unlink()
    assert evaluation.end() == 0, evaluation.err.read_text()
    err = evaluation.err.read_text()
    assert "worker 1 died (SIGKILL); all 2 processes restart (1 of 3); logs: mlruns/logs/" in err
    assert "Traceback" not in err
    found = evaluation.result
    assert list(found["examples_by_device"].values()) == [180, 180]
    assert found["strategy"] == "multi_worker"
    assert evaluation.survivors() == []

    # Where its cluster is not to be had, as on a laptop that TF_CONFIG makes another cluster's chief.
    alone = stratagem("evaluate", options=named, TF_CONFIG=_tf_config(0, _addresses(2)))
    assert alone.end() == 0, alone.err.read_text()
    assert "evaluating on one device: someone else starts the members" in alone.err.read_text()
    assert alone.members("assist") == []
    assert alone.result["strategy"] == "one_device"
    assert alone.result["confusion_matrix"] == found["confusion_matrix"]
    assert alone.result["metrics"]["test/loss"] == pytest.approx(found["metrics"]["test/loss"], abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [TENSORFLOW, JAX], ids=str)
def test_the_members_of_someone_elses_cluster_train_and_evaluate_with_the_chief(stratagem, mlflow_runs, strategy):
    addresses = _addresses(2)
    chief, other = (
        stratagem("run", *strategy, "train.epochs=2", TF_CONFIG=_tf_config(index, addresses)) for index in range(2)
    )
    assert chief.end() == 0, chief.err.read_text()
    assert other.end() == 0, other.err.read_text()
    assert chief.result["num_replicas"] == 2
    assert chief.result["steps"] == 2 * STEPS_IN_EPOCH
    assert other.out.read_text() == ""
    assert "worker 1 has finished, and so has the chief" in other.err.read_text()
    record = chief.project / "mlruns" / "runs" / chief.result["run_id"] / "records" / "evaluation.json"
    assert list(json.loads(record.read_text())["examples_by_device"].values()) == [180, 180]
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"], "the chief alone tracks"
    assert chief.survivors() == other.survivors() == []

"""data_parallel and model_parallel in several processes: the bits of one process, a death, a signal, clusters of
someone else's, and checkpoints of a model that no one process holds."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from tasks.training.checkpoints import Checkpoints
from tests.processes.test_multi_worker import _addresses, _tf_config
from tests.processes.trainings import SAME, STEPS, STEPS_IN_EPOCH, check_whole, flip_a_bit

pytestmark = pytest.mark.slow

COPIES = ("strategy.kind=data_parallel", "strategy.workers=2")
# The kernels lie on both processes, the rest on each.
CUT = "strategy.layout={dense1/kernel: [null, model], logits/kernel: [model, null]}"
PIECES = ("strategy.kind=model_parallel", "strategy.workers=2", "strategy.mesh_shape=[1, 2]", CUT, "train.loop=custom")


def _restored(command):
    with Checkpoints(command.project / command.result["checkpoints"], read_only=True) as saved:
        arrays, _ = saved.restore(command.result["steps"])
    return {key: np.asarray(array) for key, array in arrays.items()}


def test_a_lost_process_ends_all_and_the_training_ends_with_the_same_bits_as_one_process(stratagem, whole):
    training = stratagem("train", *SAME, *COPIES)
    training.wait_until(lambda: "strategy " in training.err.read_text())  # All have found each other.
    assert training.reached_by() == (set(), {"lo"})
    assert training.open_servers() == []
    training.wait_until(lambda: len(training.checkpoints()) > 1)
    (victim,) = training.members("assist")
    victim.kill()
    training.wait_until(lambda: "worker 1 died (SIGKILL); all 2 processes start again" in training.err.read_text())
    check_whole(training, whole("strategy.kind=data_parallel", "strategy.devices=2"), resumed=False)
    assert training.result["restarts"] == ["worker 1 died (SIGKILL)"]
    assert training.result["num_replicas"] == 2
    assert "Traceback" not in training.err.read_text()
    assert training.survivors() == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [COPIES, PIECES, ("strategy.kind=model_parallel", "strategy.mesh_shape=[1, 2]", CUT)],
    ids=["copies in two processes", "pieces in two processes", "pieces in one process"],
)
def test_where_a_step_goes_is_seen_with_the_wait_for_the_other_devices(stratagem, options):
    training = stratagem("train", *SAME, *options, "train.epochs=1", "train.traced_steps=8")
    assert training.end() == 0, training.err.read_text()
    step = training.result["step_time"]
    assert step["num_steps"] >= 8
    assert step["compute_ms"] > 0
    assert step["collectives_ms"] > 0
    assert step["host_ms"] > 0
    assert step["input_wait_ms"] == 0, "a step gathers its batch itself"


def test_a_model_in_pieces_is_stopped_damaged_resumed_and_read_by_any_other_layout(stratagem, whole, cluster_project):
    training = stratagem("train", *SAME, *PIECES, "checkpoint.keep=9")
    # After the first validation, whose compiling a signal would wait for.
    training.wait_until(lambda: max(training.checkpoints(), default=0) > STEPS_IN_EPOCH)
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == 143, training.err.read_text()
    assert training.survivors() == []
    before, last = training.checkpoints()[-2:]
    assert f"stopped at step {last}, which is saved" in training.err.read_text()
    (run,) = (cluster_project / "mlruns" / "runs").glob("*/checkpoints")
    run = run.parent
    assert sorted(path.name for path in (run / "checkpoints" / str(last)).iterdir()) == [
        "arrays.npz", "pieces-0.npz", "pieces-1.npz", "state.json"
    ]  # fmt: skip
    lying = {one["path"]: one for one in json.loads((run / "records" / "placement.json").read_text())["variables"]}
    assert lying["dense1/kernel"]["sharding"] == "(None, model)"
    assert lying["dense1/kernel"]["bytes_per_device"] == 64 * 8 * 4

    flip_a_bit(run / "checkpoints" / str(last) / "pieces-1.npz")
    resumed = stratagem("train", *SAME, *PIECES, "checkpoint.keep=9")
    check_whole(resumed, whole("strategy.kind=model_parallel", "strategy.mesh_shape=[1, 2]", CUT))
    assert f"checkpoint {last} is damaged" in resumed.err.read_text()
    assert f"resuming at step {before}," in resumed.err.read_text()

    # The same checkpoint under another layout, on another backend.
    arrays = _restored(resumed)
    assert arrays["model/0000"].shape == (64, 16)
    named = ("--run", resumed.result["run_id"])
    pieces, one = (
        stratagem("evaluate", *options, options=named) for options in ((), ("evaluate.strategy=one_device",))
    )
    for evaluation in (pieces, one):
        assert evaluation.end() == 0, evaluation.err.read_text()
    assert pieces.result["strategy"] == "model_parallel"
    assert one.result["strategy"] == "one_device"
    assert one.result["confusion_matrix"] == pieces.result["confusion_matrix"]
    assert one.result["metrics"]["test/loss"] == pytest.approx(pieces.result["metrics"]["test/loss"], abs=1e-6)
    longer = stratagem(
        "train",
        *SAME,
        "train.epochs=13",
        "strategy.kind=one_device",
        "strategy.device=cpu",
        options=("--resume", run.name),
    )
    assert longer.end() == 0, longer.err.read_text()
    assert f"resuming at step {STEPS}, epoch 13" in longer.err.read_text()
    assert longer.result["strategy"] == "one_device"


@pytest.mark.exhaustive
def test_a_cluster_of_someone_elses_trains_evaluates_and_ends_everywhere(stratagem, mlflow_runs):
    def start(command, *overrides):
        addresses = _addresses(2)
        return [stratagem(command, *COPIES, *overrides, TF_CONFIG=_tf_config(index, addresses)) for index in range(2)]

    chief, other = start("run", "train.epochs=2")
    assert chief.end() == 0, chief.err.read_text()
    assert other.end() == 0, other.err.read_text()
    assert chief.result["num_replicas"] == 2
    assert "worker 1 has done its part; the chief has ended" in other.err.read_text()
    record = chief.project / "mlruns" / "runs" / chief.result["run_id"] / "records" / "evaluation.json"
    assert list(json.loads(record.read_text())["examples_by_device"].values()) == [180, 180]
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"]
    shutil.rmtree(chief.project / "mlruns" / "runs" / chief.result["run_id"])

    chief, other = start("train", "train.epochs=1000", "strategy.heartbeat_timeout_seconds=15")
    chief.wait_until(chief.checkpoints)
    chief.members("serve")
    other.members("assist")[0].kill()
    for command in (chief, other):
        assert command.end() == 1
        (message,) = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
        assert "Have all members started again: the same command for each goes on from the latest checkpoint" in message
        assert "Traceback" not in command.err.read_text()
        assert command.survivors() == []

    before = chief.checkpoints()[-1]
    chief, other = start("train", "train.epochs=1000")
    chief.wait_until(lambda: chief.checkpoints()[-1] > before)
    other.process.terminate()
    for command in (chief, other):
        assert command.end() == os.EX_TEMPFAIL, command.err.read_text()
    assert f"stopped at step {chief.checkpoints()[-1]}, which is saved" in chief.err.read_text()


# A model whose second worker has another Keras, as far as it says so itself.
OTHER = """
import json, os
import keras
from tasks.system import machine

if json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index") == 1:
    here = machine.surroundings()
    machine.surroundings = lambda: here | {"keras": "3.14.0"}

def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))
"""


@pytest.mark.exhaustive
def test_a_worker_of_other_packages_and_a_batch_that_does_not_divide_are_refused(stratagem, cluster_project):
    addresses = _addresses(2)
    (cluster_project / "own.py").write_text(OTHER)
    model = ("model.name=own:build", "model.options={}")
    chief, other = (stratagem("train", *COPIES, *model, TF_CONFIG=_tf_config(index, addresses)) for index in range(2))
    assert other.end() == 2, other.err.read_text()
    assert chief.end() != 0
    (message,) = [line for line in other.err.read_text().splitlines() if line.startswith("error: ")]
    assert "worker 1 was started with keras 3.14.0, and the chief with keras " in message
    assert "the same code and packages" in message

    refused = stratagem("train", *COPIES, "train.per_replica_batch_size=null", "train.global_batch_size=63")
    assert refused.end() == 2
    assert "train.global_batch_size = 63 does not divide by 2 replicas" in refused.err.read_text()
    assert refused.survivors() == []

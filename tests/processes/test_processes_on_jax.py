"""data_parallel and model_parallel in several processes: the bits of one process, a death, a signal, and checkpoints of
a model that no one process holds. Clusters of someone else's: test_multi_worker.py."""

import json
import signal

import numpy as np
import pytest

from tasks.training.checkpoints import Checkpoints
from tests.processes.trainings import SAME, STEPS_IN_EPOCH, check_whole, flip_a_bit

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
    training.wait_until(lambda: "worker 1 died (SIGKILL); all 2 processes restart" in training.err.read_text())
    check_whole(training, whole("strategy.kind=data_parallel", "strategy.devices=2"), resumed=False)
    assert training.result["restarts"] == ["worker 1 died (SIGKILL)"]
    assert training.result["num_replicas"] == 2
    assert "Traceback" not in training.err.read_text()
    assert training.survivors() == []


def test_a_model_in_pieces_is_stopped_damaged_and_resumed(stratagem, whole, cluster_project):
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
    assert sorted(path.name for path in (run / "checkpoints" / str(last)).iterdir()) == ["arrays.npz", "state.json"]
    lying = {one["path"]: one for one in json.loads((run / "records" / "placement.json").read_text())["variables"]}
    assert lying["dense1/kernel"]["sharding"] == "(None, model)"
    assert lying["dense1/kernel"]["bytes_per_device"] == 64 * 8 * 4

    flip_a_bit(run / "checkpoints" / str(last) / "arrays.npz")
    resumed = stratagem("train", *SAME, *PIECES, "checkpoint.keep=9")
    check_whole(resumed, whole("strategy.kind=model_parallel", "strategy.mesh_shape=[1, 2]", CUT))
    assert f"checkpoint {last} is damaged" in resumed.err.read_text()
    assert f"resuming at step {before}," in resumed.err.read_text()
    arrays = _restored(resumed)
    assert arrays["model/0000"].shape == (64, 16), "whole, for any other layout: see test_checkpoints_between.py"

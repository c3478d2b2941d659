"""Evaluation under each strategy is that of one device, and its work really lies on the strategy's devices."""

import json
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# A model of the user's own, with BatchNorm and a loss of its own.
OWN = """
import keras

def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = keras.layers.Flatten()(images)
    x = keras.layers.Dense(24, kernel_regularizer=keras.regularizers.L2(0.01), name="d1")(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(images, keras.layers.Dense(num_classes, name="d2")(x))
"""
NUM_EXAMPLES = 53  # Of the test split: two batches and a last one that no number of replicas divides.
SAME = {
    "dataset.name": "tiny", "model.name": "own:build", "model.options": {}, "train.epochs": 2,
    "train.per_replica_batch_size": 20, "schedule.learning_rate": 0.01, "evaluate.global_batch_size": 25,
    "tracking.system_metrics": False, "checkpoint.keep": 2,
}  # fmt: skip
CPU = "/job:localhost/replica:0/task:0/device:CPU:"
WORKER = "/job:worker/replica:0/task:{}/device:CPU:0"
# Each: the settings of the strategy, and how many examples lie on which device.
STRATEGIES = {
    # 51 at once; of the last two the first replica has none.
    "mirrored": (
        {"strategy.kind": "mirrored", "strategy.devices": 3, "evaluate.global_batch_size": 52},
        {f"{CPU}0": 17, f"{CPU}1": 18, f"{CPU}2": 18},
    ),
    # 24 at once; of the last five one worker has two and the other three.
    "multi_worker": ({"strategy.kind": "multi_worker"}, {WORKER.format(0): 26, WORKER.format(1): 27}),
    "parameter_server": ({"strategy.kind": "parameter_server", "train.loop": "custom"}, None),
    # A quarter of each 24, and the whole of the last five.
    "data_parallel": ({"strategy.kind": "data_parallel", "strategy.devices": 4}, {f"cpu:{i}": 17 for i in range(4)}),
    # A half of each 24 in each row of the mesh, and the whole of the last five.
    "model_parallel": (
        {
            "strategy.kind": "model_parallel", "strategy.mesh_shape": [2, 2],
            "strategy.layout": {"d1/kernel": [None, "model"]},
        },
        {f"cpu:{i}": 29 for i in range(4)},
    ),
}  # fmt: skip

# Trains, then evaluates where the run says, and on one device: each checkpoint.
WORK = """
import json, sys
from tasks import config
from tasks.operations import dvc_data
from tasks.process import client, stages

overrides, checkpoints = json.loads(sys.argv[1])
prepared = dvc_data.load_prepared("tiny")
settings = config.load(None, overrides)
run = stages.start_run(settings, prepared=prepared)
training = client.train(settings, prepared, run)
found = {"pids": [client.start_processes(settings).first.pid], "run_id": run.run_id}
for where in ("run", "one_device"):
    found[where] = [
        client.evaluate(
            config.load(None, overrides | {"evaluate.strategy": where, "evaluate.checkpoint": checkpoint}),
            prepared,
            training,
            run,
        ).model_dump(mode="json")
        for checkpoint in checkpoints
    ]
    found["pids"].append(client.start_processes(settings).first.pid)
stages.end_run(settings, run=run, status="FINISHED")
print(json.dumps(found))
"""


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name == "model_parallel" else ()) for name in STRATEGIES],
)
def test_metrics_are_those_of_one_device(tiny, project, run, name):
    overrides, devices = STRATEGIES[name]
    (project / "own.py").write_text(OWN)
    work = json.dumps([SAME | overrides, ["latest", "best"]])
    done = run([sys.executable, "-c", WORK, work], env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["pids"])) == 1, "the processes that trained also evaluate"
    for there, here in zip(found["run"], found["one_device"], strict=True):
        assert there["strategy"] == ("one_device" if name == "parameter_server" else name)
        assert here["strategy"] == "one_device"
        assert here["num_examples"] == there["num_examples"] == sum(here["examples_by_device"].values()) == NUM_EXAMPLES
        assert len(here["examples_by_device"]) == 1
        for exact in ("checkpoint", "confusion_matrix", "classes"):
            assert there[exact] == here[exact]
        assert there["metrics"].pop("test/loss") == pytest.approx(here["metrics"].pop("test/loss"), abs=1e-6, rel=0)
        assert there["metrics"] == here["metrics"]
        if devices is not None:
            assert there["examples_by_device"] == devices

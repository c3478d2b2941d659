"""Both loops on JAX, on two CPU devices; with compiled loops of many steps as on an accelerator, and without."""

import json
import sys

import pytest

from tasks import config
from tasks.strategies.environment import stage_environment

pytestmark = pytest.mark.slow

# 147 examples in batches of 8: 18 steps and a short one of 3, which two devices do not share evenly.
SAME = {
    "model.name": "mlp", "model.options": {"units": [16], "dropout": 0.5}, "optimizer": {"kind": "adam"},
    "schedule.kind": "constant", "schedule.learning_rate": 0.01, "input.validation": 53, "train.global_batch_size": 8,
    "train.per_replica_batch_size": None, "train.epochs": 2, "train.class_weights": "balanced",
    "train.metrics": ["macro_f1"], "input.augmentation.flip": True, "input.augmentation.crop_padding": 1,
    "checkpoint.every_steps": 11, "checkpoint.keep": 99, "register.enabled": False,
}  # fmt: skip
COPIES = {"strategy.kind": "data_parallel", "strategy.devices": 2}
CUT = {
    "strategy.kind": "model_parallel", "strategy.mesh_shape": [1, 2],
    "strategy.layout": {"dense1/kernel": [None, "model"], "logits/kernel": ["model", None]},
}  # fmt: skip
CUSTOM = {"train.loop": "custom"}
NO_CHECKPOINTS = {"checkpoint.every_steps": None}
MIXED = {"input.augmentation.mixup": 0.2, "input.augmentation.cutmix": 1.0, "train.class_weights": None}
ACCUMULATED = {"train.gradient_accumulation_steps": 3, "optimizer": {"kind": "adam", "global_clipnorm": 0.1}}
# What runs as on an accelerator has `many`.
RUNS = {
    "fit": COPIES,
    "single": COPIES | {"train.steps_per_execution": 1},
    "custom": COPIES | CUSTOM,
    "host": COPIES | {"input.memory_budget_bytes": 1},
    "many": COPIES | {"train.steps_per_execution": 7},
    "many custom": COPIES | CUSTOM,
    "cut": CUT,
    "cut many custom": CUT | CUSTOM,
    "read many": COPIES | NO_CHECKPOINTS | {"train.steps_per_execution": 7},
    "read many custom": COPIES | NO_CHECKPOINTS | CUSTOM,
    "accumulated": COPIES | ACCUMULATED,
    "accumulated many custom": COPIES | CUSTOM | ACCUMULATED,
    "mixed": COPIES | MIXED,
    "mixed many custom": COPIES | MIXED | CUSTOM,
}
# What CI trains; `make test-exhaustive` trains all.
OFTEN = {
    "fit", "single", "custom", "many custom", "cut", "cut many custom", "read many", "read many custom", "accumulated",
    "accumulated many custom", "mixed",
}  # fmt: skip
LIKE = {
    "fit": ["single", "custom", "host", "many", "many custom"],
    "cut": ["cut many custom"],
    "accumulated": ["accumulated many custom"],
    "mixed": ["mixed many custom"],
}
DIVERGING = {
    "optimizer": {"kind": "sgd"}, "schedule.learning_rate": 1e30, "model.options": {"units": [16]},
    "checkpoint.every_steps": 1,
}  # fmt: skip

# A process of its own: the backend and its devices cannot change.
PROGRAM = """
import json, shutil
from pathlib import Path
import keras, numpy as np
from tasks import config, records
from tasks.strategies import Strategy
from tasks.train import train
from tasks.training import loops, steps_on_jax
from tasks.training.callbacks.stopping import NonFiniteLoss
from tasks.training.checkpoints import Checkpoints

task = json.loads(Path("task.json").read_text())
prepared = records.load(records.PreparedDataset, Path("data/tiny/prepared/manifest.json"))
trace = records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None)
on_cpus, steps_on_jax.LENGTHS = Strategy.on_cpus, (4, 1)

# How often the host reads a number of the devices' between the first and the last call of an epoch. On CPUs JAX'
# transfer_guard sees no transfer, because there is none.
array, reads, calls = type(keras.ops.zeros(())), 0, []
value, convert = array._value, keras.src.backend.convert_to_numpy

def read(self):
    global reads
    reads += 1
    return value.fget(self)

def converted(one):
    global reads
    reads += 1
    return convert(one)

class Listeners(loops.Listeners):
    def on_epoch_begin(self, epoch, logs=None):
        global reads
        super().on_epoch_begin(epoch, logs)
        calls.append([0, 0])
        reads = 0

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        calls[-1] = [calls[-1][0] + 1, reads]

array._value, keras.src.backend.convert_to_numpy, loops.Listeners = property(read), converted, Listeners

class Lax:
    # Notes which loops are compiled.

    lengths = []

    def __getattr__(self, name):
        return getattr(lax, name)

    def scan(self, step, state, numbers):
        self.lengths.append(len(numbers))
        return lax.scan(step, state, numbers)

lax, steps_on_jax.lax = steps_on_jax.lax, Lax()

def run(run_id, overrides, name=""):
    Strategy.on_cpus = False if "many" in (name or run_id) else on_cpus
    settings = config.load(None, {**task["same"], **overrides})
    folder = f"mlruns/runs/{run_id}"
    one = records.Run(
        run_id=run_id, experiment="tests", name="tests", folder=folder, lineage=trace, settings=settings.to_json()
    )
    calls.clear()
    Lax.lengths.clear()
    result = train(settings, prepared, one, lambda step, metrics: None)
    with Checkpoints(Path(folder, "checkpoints"), read_only=True) as saved:
        arrays, _ = saved.restore(result.steps)
        steps = saved.steps()
    weights = [array.tolist() for key, array in sorted(arrays.items()) if "model/" in key]
    told = {"calls": list(calls), "steps": list(steps), "loops": sorted(set(Lax.lengths))}
    return {"result": result.model_dump(mode="json"), "weights": weights, **told}

def diverge(run_id, overrides):
    try:
        run(run_id, {**task["diverging"], **overrides})
    except NonFiniteLoss as error:
        folders = Path(f"mlruns/runs/{run_id}/checkpoints").glob("[0-9]*")
        return [str(error), error.step, [int(folder.name) for folder in folders]]

found = {name: run(name, overrides) for name, overrides in task["runs"].items()}
for name in ("fit", "custom", "many custom"):
    shutil.copytree(f"mlruns/runs/{name}/checkpoints/11", f"mlruns/runs/resumed {name}/checkpoints/11")
    found[f"resumed {name}"] = run(f"resumed {name}", task["runs"][name])
for name in ("fit", "many custom"):
    found[f"diverging {name}"] = diverge(f"diverging {name}", task["runs"][name])
    back = {"train.on_nonfinite": "rollback", "train.rollback_factor": 1e-31, "checkpoint.every_steps": None}
    found[f"back {name}"] = run(f"back {name}", {**task["runs"][name], **task["diverging"], **back})
print(json.dumps(found))
"""


@pytest.fixture(
    params=[pytest.param(OFTEN, id="often"), pytest.param(set(RUNS), id="all", marks=pytest.mark.exhaustive)]
)
def found(tiny, project, run, request):
    runs = {name: overrides for name, overrides in RUNS.items() if name in request.param}
    (project / "task.json").write_text(json.dumps({"same": SAME, "runs": runs, "diverging": DIVERGING}))
    done = run([sys.executable, "-c", PROGRAM], env=stage_environment(config.load(None, SAME | COPIES)))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_loops_train_alike_resume_roll_back_and_do_not_wait_for_numbers(found):
    for name, others in LIKE.items():
        one = found[name]
        for other in found.keys() & others:
            same = found[other]
            # With a number of one's own they wait for a call's end.
            assert same["steps"] == ([14, 19, 26, 33, 38] if other == "many" else [11, 19, 22, 33, 38]), other
            for metric, values in one["result"]["history"].items():
                assert same["result"]["history"][metric] == pytest.approx(values, rel=1e-4, abs=1e-6), (other, metric)
            for weights, others_weights in zip(one["weights"], same["weights"], strict=True):
                for row, others_row in zip(weights, others_weights, strict=True):
                    assert others_row == pytest.approx(row, rel=1e-3, abs=1e-5), other
            # XLA computes a loop on one thread of a CPU, and a loop of one step too if it sums between devices.
            assert same["loops"] == ([4] if "many" in other else []), other
    assert found["mixed"]["weights"] != found["fit"]["weights"] != found["accumulated"]["weights"]

    # To the bit: one step a call, and a resume in the middle of an epoch.
    resumed = [(name, f"resumed {name}") for name in ("fit", "custom", "many custom")]
    for one, again in [("fit", "single"), *resumed]:
        assert found[again]["result"]["weights_digest"] == found[one]["result"]["weights_digest"], again
        assert found[again]["result"]["history"] == found[one]["result"]["history"], again

    for name in found.keys() & {"read many", "read many custom"}:
        for calls, reads in found[name]["calls"]:
            assert reads <= calls < 19, name

    for name in ("fit", "many custom"):
        message, step, saved = found[f"diverging {name}"]
        assert "train/loss is " in message
        assert f"at step {step}, in epoch 1" in message
        assert step == found["diverging fit"][1] < 19, "the step itself, not its call"
        assert max(saved, default=0) < step, "nothing of it is saved"
        back = found[f"back {name}"]["result"]
        assert back["nonfinite_steps"] == [step]
        assert (back["steps"], back["epochs"]) == (38, 2)
        assert back["history"]["train/learning_rate"] == pytest.approx([0.1] * 2)

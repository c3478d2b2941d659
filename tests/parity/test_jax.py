"""data_parallel and model_parallel against one device on TensorFlow, and what really lies where."""

import json
import re
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tasks import config
from tasks.evaluate import evaluate
from tasks.modeling import models
from tasks.records import TrainingResult
from tasks.strategies.environment import stage_environment
from tasks.training import model_state
from tasks.training.checkpoints import Checkpoints

# 147 examples are 4 * 32 + 19: the last batch of a pass divides by no mesh, nor does that of the 53 held out.
# An epoch of one step, so that the history has the loss of each. On TensorFlow, Keras rounds the optimizers' constants
# to float32 (Adam's 0.9: losses differ by 4e-6): 0.5 and 0.0625 are the same in both.
STEPS, FIRST = 12, 2
SAME = {
    "model.name": "dense200", "model.options": {}, "input.validation": 53, "input.augmentation.crop_padding": 0,
    "optimizer": {"kind": "sgd", "momentum": 0.5}, "schedule.kind": "constant", "schedule.learning_rate": 0.0625,
    "train.global_batch_size": 32, "train.dtype_policy": "float64",
    "train.steps_per_epoch": 1, "train.epochs": STEPS,
    "checkpoint.every_epochs": FIRST, "checkpoint.keep": STEPS, "register.enabled": False,
}  # fmt: skip
# Summed up by batch, on each backend's own operations.
METRICS = {"train.metrics": ["auc", "macro_f1", "top_3_accuracy"]}
MEASURED = SAME | METRICS
RULES = {"d1/kernel": [None, "model"], "d2/output": ["batch", None]}
MESHES = [(4, 2), (2, 4), (1, 8)]

# One process: JAX' devices and precision are those of its environment.
JAX = """
import json, logging, shutil, sys
from pathlib import Path
import jax, keras, numpy as np
from tasks import config, records, strategies
from tasks.training import model_state
from tasks.modeling import models
from tasks.training.checkpoints import Checkpoints
from tasks.system.errors import UserError
from tasks.evaluate import evaluate
from tasks.strategies import data_parallel
from tasks.train import check, train

task = json.loads(Path("task.json").read_text())
prepared = records.load(records.PreparedDataset, Path("data/tiny/prepared/manifest.json"))
trace = records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None)
cuts = []
ask = data_parallel.EveryExample.get_data_layout

def asked(self, shape):
    layout = ask(self, shape)
    cuts.append([shape[0], layout.axes[0]])
    return layout

data_parallel.EveryExample.get_data_layout = asked

def run(run_id, overrides):
    settings = config.load(None, {**task["same"], **overrides})
    folder = f"mlruns/runs/{run_id}"
    one = records.Run(
        run_id=run_id, experiment="tests", name="tests", folder=folder, lineage=trace, settings=settings.to_json()
    )
    cuts.clear()
    result = train(settings, prepared, one, lambda step, metrics: None)
    assert keras.distribution.distribution() is None
    placement = records.load(records.Placement, Path(folder, "records", "placement.json"))
    training_cuts = sorted(set(map(tuple, cuts)), key=str)
    cuts.clear()
    evaluation = evaluate(settings, prepared, result)
    return {
        "result": result.model_dump(mode="json"),
        "placement": placement.model_dump(mode="json"),
        "evaluation": evaluation.model_dump(mode="json"),
        "cuts": {"training": training_cuts, "evaluation": sorted(set(map(tuple, cuts)), key=str)},
    }

def logits(path):
    with Checkpoints(Path(path).parent, read_only=True) as saved:
        arrays, _ = saved.restore(int(Path(path).name))
    settings = config.load(None, task["same"])
    model = models.build(settings.model, prepared, settings.input.normalization)
    model_state.assign(model, arrays, ("model",))
    return model.predict_on_batch(np.load(prepared.splits["test"].features["image"])).tolist()

def output_axes(overrides):
    settings = config.load(None, {**task["same"], **overrides})
    strategy = strategies.build(settings.strategy)
    with strategy.scope():
        model = models.build(settings.model, prepared, "scale")
        batch = np.zeros([32, 8, 8, 1], "uint8")
        layout = data_parallel.keras.distribution.distribution().get_data_layout(batch.shape).backend_layout
        states = [[v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)]
        out, _ = jax.jit(model.stateless_call)(*states, jax.device_put(batch, layout))
    spec = list(out.sharding.spec) + [None, None]
    return [spec[:2], out.addressable_shards[0].data.nbytes]

def refusal(section):
    try:
        check(config.load(None, {**task["same"], "strategy": section}), prepared)
    except UserError as error:
        return [str(error), error.exit_code]

try:
    run("refused", {**task["runs"]["mesh_4_2"], "train.global_batch_size": 30})
except UserError as error:
    refused = str(error)
found = {name: run(name, overrides) for name, overrides in task["runs"].items()}
found["whole"] = run("whole", task["whole"])
for step in (3, 8):
    shutil.copytree(f"mlruns/runs/whole/checkpoints/{step}", f"mlruns/runs/from_{step}/checkpoints/{step}")
    found[f"from_{step}"] = run(f"from_{step}", task["whole"])
found["first"] = run("first_on_jax", task["first"])
found["logits"] = {path: logits(path) for path in [task["reference"], found["mesh_2_4"]["result"]["checkpoint"]]}
found["offered"] = {name: run(name, overrides) for name, overrides in task["offered"].items()}
found["unnamed"] = run("unnamed", task["unnamed"])

# As if the second device were the one that is too small for the whole model.
build, found["checked on"] = models.build, []

def built(*arguments):
    model = build(*arguments)
    found["checked on"] += {str(device) for variable in model.variables for device in variable.value.devices()}
    return model

models.build = built
with jax.default_device(jax.devices()[1]):
    check(config.load(None, {**task["same"], **task["runs"]["mesh_4_2"]}), prepared)
models.build = build
found["outputs"] = {name: output_axes(overrides) for name, overrides in task["outputs"].items()}
found["refusals"] = [refusal(section) for section in task["refusals"]]
said = []
listener = logging.Handler()
listener.emit = lambda record: said.append(record.getMessage())
logging.getLogger("tasks").addHandler(listener)
found["unmatched"] = run("unmatched", task["unmatched"])
found["warnings"] = said
found["refused"] = [refused, Path("mlruns/runs/refused").exists()]
found["tensorflow"] = sorted(name for name in sys.modules if name == "tensorflow")
print(json.dumps(found))
"""


def mesh(shape, layout=None, **more):
    values = {
        "kind": "model_parallel",
        "devices": 8,
        "mesh_shape": shape,
        "layout": RULES if layout is None else layout,
    }
    return {f"strategy.{key}": value for key, value in (values | more).items()}


RUNS = {
    "data_parallel": {"strategy.kind": "data_parallel", "strategy.devices": 8},
    **{f"mesh_{a}_{b}": mesh((a, b)) for a, b in MESHES},
}
# Epochs of five steps with Dropout; resumed in the middle of each.
RESUMED = {
    "train.steps_per_epoch": None, "train.epochs": 2, "train.dtype_policy": "float32", "checkpoint.every_steps": 1,
    "train.deterministic": True, "model.options": {"dropout": 0.5}, "optimizer": {"kind": "adam"},
}  # fmt: skip
# A model of the user's own whose layers have no names.
OWN = """
import keras

def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = keras.layers.Flatten()(images)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Dense(16)(x)))
"""
UNNAMED = mesh((4, 2), {"dense/kernel": [None, "model"]}) | {"model.name": "unnamed:build", "train.epochs": 1}
# The layout of Keras' guide, whose d1 has no bias either.
GUIDE = {"d1/kernel": [None, "model"], "d1/bias": ["model"], "d2/output": ["data", None]}
UNMATCHED = mesh((2, 4), GUIDE, axis_names=["data", "model"])
# What Keras does under keras.distribution: gradients of three steps, of which the first two lie before the resume.
OFFERED = {
    "accumulation": {"train.gradient_accumulation_steps": 3},
    "mixed_bfloat16": {"train.dtype_policy": "mixed_bfloat16"},
}
SIX_STEPS = {"train.epochs": 6, "checkpoint.every_epochs": 1}
# What d2 gives without and with a rule.
OUTPUTS = {
    "no rule": mesh((2, 4), {"d1/kernel": [None, "model"]}),
    "by batch": mesh((2, 4)),
    "replicated": mesh((2, 4), {**RULES, "d2/output": [None, None]}),
    "by model": mesh((4, 2), {**RULES, "d2/output": [None, "model"]}),
}
EIGHT = ", ".join(f"cpu:{i}" for i in range(8))
NOTHING = "matches no variable and no layer's output"
PATHS = (
    "The paths are: d1/kernel, d2/kernel, d2/bias, normalization/output, flatten/output, d1/output, d2/output, "
    "dense200/output"
)


def rules(**more):
    return {"kind": "model_parallel", "devices": 8, "mesh_shape": [2, 4], **more}


REFUSALS = [
    ({"kind": "data_parallel", "devices": 9}, f"strategy.devices = 9: JAX has 8 here ({EIGHT})"),
    ({"kind": "data_parallel", "devices": ["cpu:0", "cpu:8"]}, f"['cpu:0', 'cpu:8']: JAX has {EIGHT} here"),
    ({"kind": "data_parallel", "devices": ["gpu:0"]}, "strategy.devices = ['gpu:0']: JAX has cpu:0, "),
    ({"kind": "data_parallel", "devices": ["cpu:1", "cpu:1"]}, "a device may be named only once"),
    (rules(devices=None, mesh_shape=[2, 8]), "mesh_shape = [2, 8] needs 16 devices: JAX has 8 here"),
    (rules(layout={"d1/kernl": [None, "model"]}), f"'d1/kernl' {NOTHING}. {PATHS}"),
    (rules(layout={"1/kernel": [None, "model"]}), f"'1/kernel' {NOTHING}. {PATHS}"),
    (rules(layout={"d3/output": [None, "model"]}), f"'d3/output' {NOTHING}. {PATHS}"),
    (
        rules(layout={"d1/kernel": [None, "model"], "d./kernel": [None, None]}),
        f"'d1/kernel' and 'd./kernel' both match d1/kernel: keep one of them. {PATHS}",
    ),
    (
        rules(layout={"d2/output": [None, "model"], "(d1|d2)/output": ["batch", None]}),
        f"'d2/output' and '(d1|d2)/output' both match d2/output: keep one of them. {PATHS}",
    ),
    (
        rules(layout=GUIDE, axis_names=["data", "model"]),
        f"'d1/bias' {NOTHING}. {PATHS}. Fix or remove the rule, or set strategy.unmatched_rules=warn",
    ),
    (rules(layout={"d1/kernel": ["model"]}), "'d1/kernel' names 1 axes, and d1/kernel has the shape (64, 200)"),
    (
        rules(layout={"d2/kernel": [None, "model"]}),
        "'d2/kernel' splits dimension 1 of d2/kernel, of shape (200, 10), over the 4 devices of the axis 'model': "
        "10 is not divisible by 4",
    ),
    (rules(layout={"d2/output": ["batch", None, None]}), "{'d2/output': ['batch', None, None]} names more axes"),
]  # fmt: skip


def logits(prepared, path):
    """The logits of a checkpoint for the test split, on this process's backend."""
    with Checkpoints(Path(path).parent, read_only=True) as saved:
        arrays, _ = saved.restore(int(Path(path).name))
    settings = config.load(None, SAME)
    model = models.build(settings.model, prepared, settings.input.normalization)
    model_state.assign(model, arrays, ("model",))
    return model.predict_on_batch(np.load(prepared.splits["test"].features["image"]))


@pytest.fixture
def found(tiny, train, run):
    """The reference on TensorFlow, and what one process on JAX makes of its first checkpoint."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in MEASURED.items()]
    reference = train(tiny, *overrides, run_id="reference")
    for name in RUNS:
        shutil.copytree(f"{reference.checkpoints}/{FIRST}", f"mlruns/runs/{name}/checkpoints/{FIRST}")
    offered, references = {}, {}
    for name, more in OFFERED.items():
        more = SIX_STEPS | more
        options = [f"{key}={json.dumps(value)}" for key, value in (SAME | more).items()]
        references[name] = train(tiny, *options, run_id=f"{name}_on_tensorflow")
        for where in ("data_parallel", "mesh_2_4"):
            offered[f"{name} {where}"] = RUNS[where] | more
            target = f"mlruns/runs/{name} {where}/checkpoints/{FIRST}"
            shutil.copytree(f"{references[name].checkpoints}/{FIRST}", target)
    Path("unnamed.py").write_text(OWN)
    task = {
        "same": SAME,
        "runs": {name: overrides | METRICS for name, overrides in RUNS.items()},
        "first": {**RUNS["mesh_2_4"], "train.epochs": 1, "optimizer": {"kind": "adam"}},
        "whole": {**RUNS["mesh_2_4"], **RESUMED},
        "offered": offered,
        "unnamed": UNNAMED,
        "unmatched": UNMATCHED | {"strategy.unmatched_rules": "warn", "train.epochs": FIRST + 1},
        "reference": reference.checkpoint,
        "outputs": OUTPUTS,
        "refusals": [section for section, _ in REFUSALS],
    }
    Path("task.json").write_text(json.dumps(task))
    environment = stage_environment(config.load(None, {**SAME, **RUNS["data_parallel"]}))
    done = run([sys.executable, "-c", JAX], env=environment)
    assert done.returncode == 0, done.stderr
    yield reference, references, json.loads(done.stdout.splitlines()[-1])
    models.set_precision("float32")


def check_placement(one, parts, slots):
    """All variables lie on all devices, in so many parts where they belong to d1."""
    # Keras numbers an optimizer's name anew for each one in a process.
    variables = {re.sub(r"_\d+/", "/", variable["path"]): variable for variable in one["placement"]["variables"]}
    assert {path for path in variables if "d1" in path} == {"d1/kernel", *slots}
    for path, variable in variables.items():
        assert variable["devices"] == one["result"]["devices"] == [f"cpu:{i}" for i in range(8)], path
        cut = "d1" in path and parts > 1
        assert variable["sharding"] == ("(None, model)" if cut else "replicated"), path
        whole = np.prod(variable["shape"], dtype=int) * np.dtype(variable["dtype"]).itemsize
        assert variable["bytes_per_device"] == whole // (parts if cut else 1), path
    assert {variables[path]["bytes_per_device"] for path in ("d1/kernel", *slots)} == {64 * 200 * 8 // parts}


def weights(result):
    """The model's arrays in each checkpoint, by step."""
    with Checkpoints(Path(result["checkpoints"])) as saved:
        found = {step: saved.restore(step)[0] for step in saved.steps()}
    return {step: {key: array for key, array in arrays.items() if "model/" in key} for step, arrays in found.items()}


def check_offered(references, found):
    """Gradient accumulation and mixed precision do what they do on one device, and do it at all."""
    for name, one in found.items():
        what, _, where = name.partition(" ")
        expected, tolerance = references[what], 1e-12 if what == "accumulation" else 2e-3
        assert len(expected.history["train/loss"]) == 6
        for metric, values in expected.history.items():
            assert one["result"]["history"][metric] == pytest.approx(values, abs=tolerance, rel=0), (name, metric)
        arrays, theirs = weights(one["result"]), weights(expected.model_dump())
        assert list(arrays) == [2, 3, 4, 5, 6]
        for step, after in arrays.items():
            for key, array in after.items():
                np.testing.assert_allclose(array, theirs[step][key], atol=tolerance, rtol=0, err_msg=f"{name} {key}")
        moved = [step for step in range(3, 7) if any((arrays[step][k] != arrays[step - 1][k]).any() for k in arrays[2])]
        assert moved == ([3, 6] if what == "accumulation" else [3, 4, 5, 6]), name
        variables = {variable["path"]: variable for variable in one["placement"]["variables"]}
        assert variables["d1/kernel"]["sharding"] == ("(None, model)" if where == "mesh_2_4" else "replicated")
        model = keras.models.load_model(one["result"]["final_model"], compile=False).get_layer("dense200")
        assert model.get_layer("d1").compute_dtype == ("float64" if what == "accumulation" else what[6:]), name
        assert {weight.dtype for weight in model.weights} == {"float64" if what == "accumulation" else "float32"}


@pytest.mark.slow
def test_jax(tiny, found):
    reference, references, on_jax = found
    with Checkpoints(Path(reference.checkpoints)) as saved:
        expected, _ = saved.restore(STEPS)

    assert {f"validation/{name}" for name in METRICS["train.metrics"]} < reference.history.keys()
    for name in RUNS:
        one = on_jax[name]
        result = one["result"]
        assert (result["num_replicas"], len(result["devices"])) == (8 if name == "data_parallel" else int(name[5]), 8)
        assert result["history"].keys() == reference.history.keys()
        for metric, values in reference.history.items():
            tolerance = 1e-6 if metric.endswith("macro_f1") else 1e-12  # Keras counts it in float32.
            assert result["history"][metric] == pytest.approx(values, abs=tolerance, rel=0), (name, metric)
        with Checkpoints(Path(result["checkpoints"])) as saved:
            arrays, _ = saved.restore(STEPS)
        assert arrays.keys() == expected.keys()
        for key in arrays:
            if not key.startswith("seed/"):
                np.testing.assert_allclose(arrays[key], expected[key], atol=1e-12, rtol=0, err_msg=f"{name} {key}")

        # A batch that divides is cut, a short one is not; Keras asked while it trained and while it evaluated the 53
        # test examples, so the distribution was there both times.
        replicas = result["num_replicas"]
        for stage, sizes in {"training": (19, 21, 32), "evaluation": (53,)}.items():
            expected_cuts = [[size, "batch" if size % replicas == 0 else None] for size in sizes]
            assert one["cuts"][stage] == expected_cuts, (name, stage)
        assert one["evaluation"]["metrics"] == pytest.approx(
            evaluate(config.load(None, MEASURED), tiny, TrainingResult.model_validate(result)).metrics, abs=1e-12, rel=0
        )

        # What lies on one device: a part of d1 and of its slots, all of everything else.
        check_placement(one, 1 if name == "data_parallel" else int(name[-1]), {"sgd/d1_kernel_momentum"})
    check_placement(on_jax["first"], 4, {"adam/d1_kernel_momentum", "adam/d1_kernel_velocity"})

    check_offered(references, on_jax["offered"])
    placed = {variable["path"]: variable["sharding"] for variable in on_jax["unnamed"]["placement"]["variables"]}
    assert placed["dense/kernel"] == "(None, model)", "the rule is about the model that was trained"
    assert placed["dense_1/kernel"] == "replicated"
    assert on_jax["warnings"] == [f"strategy.layout: 'd1/bias' {NOTHING}. {PATHS}"], "once a process"
    check_placement(on_jax["unmatched"], 4, ["sgd/d1_kernel_momentum"])  # The other rules hold.
    assert on_jax["checked on"] == ["cpu:0"], "a model that is only looked at costs no device anything"

    # A resumed run is the whole run to the bit.
    for step in (3, 8):
        assert on_jax[f"from_{step}"]["result"]["weights_digest"] == on_jax["whole"]["result"]["weights_digest"], step
        assert on_jax[f"from_{step}"]["result"]["history"] == on_jax["whole"]["result"]["history"], step

    # The rule of d2's output decides how it lies.
    assert on_jax["outputs"] == {
        "no rule": [["batch", None], 32 * 10 * 8 // 2],
        "by batch": [["batch", None], 32 * 10 * 8 // 2],
        "replicated": [[None, None], 32 * 10 * 8],
        "by model": [[None, "model"], 32 * 10 * 8 // 2],
    }

    # A checkpoint means the same on both backends, whichever wrote it.
    for path, values in on_jax["logits"].items():
        np.testing.assert_allclose(logits(tiny, path), values, atol=1e-12, rtol=0)
    exported = keras.models.load_model(on_jax["mesh_2_4"]["result"]["final_model"])
    images = np.load(tiny.splits["test"].features["image"])
    values = on_jax["logits"][on_jax["mesh_2_4"]["result"]["checkpoint"]]
    np.testing.assert_allclose(exported.predict_on_batch(images), values, atol=1e-12, rtol=0)
    assert on_jax["tensorflow"] == [], "the array source needs no TensorFlow"
    assert "train.global_batch_size = 30 is not divisible by 4 replicas: 30 = 4 * 7 + 2" in on_jax["refused"][0]
    assert on_jax["refused"][1] is False, "nothing is left behind"
    for (section, said), refusal in zip(REFUSALS, on_jax["refusals"], strict=True):
        assert refusal is not None, section
        assert said in refusal[0]
        assert refusal[1] == 2
        assert "\n" not in refusal[0]

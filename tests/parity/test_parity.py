"""Every synchronous strategy on TensorFlow, in both loops, is one device that runs `fit`: the loss of each step, the
weights, the optimizer's variables and the metrics.

The measured differences as a table: python -m pytest tests/parity/test_parity.py -rP | grep '^|'
"""

import contextlib
import itertools
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tasks import config, records, strategies
from tasks.training.checkpoints import Checkpoints

# The first row of a layout waits for all its runs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

NUM_EXAMPLES = 1437  # Of the digits' training split; what is not trained on validates.
GLOBAL_BATCH_SIZE = 24  # Divides by two and by three.
EPOCHS = 2
SHARED = {
    "train.deterministic": True,
    "train.global_batch_size": GLOBAL_BATCH_SIZE,
    "train.epochs": EPOCHS,
    "input.augmentation": {"flip": False, "crop_padding": 0},
    "schedule": {"kind": "constant", "learning_rate": 0.01},
}
SGD = {"optimizer": {"kind": "sgd", "momentum": 0.9}}
ADAM = {"optimizer": {"kind": "adam"}}
CLIPPED_ADAM = {"optimizer": {"kind": "adam", "global_clipnorm": 0.5}}
CLIPPED_ADAMW = {"optimizer": {"kind": "adamw", "weight_decay": 0.05, "global_clipnorm": 0.5}}
MLP = {"model": {"name": "mlp", "options": {"units": [24, 16]}}}
CONVNET = {"model": {"name": "convnet", "options": {}}}
# Of params.yaml, which has Dropout.
CONVNET2 = {"model": {"name": "convnet2", "options": {"dropout": 0.0, "padding": "same"}}}
AUGMENTED = {"input.augmentation": {"flip": True, "crop_padding": 1}}
STREAM = {"input.source": "stream", "input.shuffle_buffer": 200}
SQUARED_ERROR = {"train.loss": "mean_squared_error"}
FLOAT64 = {"train.dtype_policy": "float64"}
BFLOAT16 = {"train.dtype_policy": "mixed_bfloat16"}
FLOAT16 = {"train.dtype_policy": "mixed_float16"}
METRICS = {"train.metrics": ["auc", "macro_f1", "top_3_accuracy"]}

# Examples to train on, and what is trained. An epoch ends in a whole batch, or in one of: one example; two, so that one
# of three replicas has none; thirteen, cut into (6, 7) and (4, 4, 5); twenty. With 164 validation ends in one example.
WORK = {
    "mlp, sgd": (144, MLP | SGD | FLOAT64 | METRICS),
    "mlp, adam, rest 1": (145, MLP | ADAM | FLOAT64 | METRICS),
    "mlp, clipped adamw, rest 2": (146, MLP | CLIPPED_ADAMW | FLOAT64),
    "mlp, clipped adam, squared error, rest 20": (164, MLP | CLIPPED_ADAM | FLOAT64 | SQUARED_ERROR),
    "mlp, sgd, epochs of 9 steps, rest 13": (157, MLP | SGD | FLOAT64 | {"train.steps_per_epoch": 9}),
    "convnet, sgd, augmented, rest 1": (145, CONVNET | SGD | AUGMENTED | FLOAT64),
    "convnet2, clipped adam, augmented, rest 13": (157, CONVNET2 | CLIPPED_ADAM | AUGMENTED | FLOAT64),
    "convnet2, sgd, stream, augmented, rest 13": (157, CONVNET2 | SGD | STREAM | AUGMENTED | FLOAT64),
    # Fifty steps each.
    "mlp, sgd, float32": (588, MLP | SGD),
    "convnet2, adam, float32": (588, CONVNET2 | ADAM),
    # Replicas add up in another order, what has three digits (bfloat16) or four.
    "mlp, sgd, bfloat16": (144, MLP | SGD | BFLOAT16),
    "mlp, sgd, float16": (145, MLP | SGD | FLOAT16),
}  # fmt: skip
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "mixed_bfloat16": 1e-2, "mixed_float16": 2e-3}

# Work, loop, steps in one call, and what else is asked for.
RUNS = [
    ("mlp, sgd", "custom", 8, {}),
    ("mlp, adam, rest 1", "fit", 8, {}),
    ("mlp, clipped adamw, rest 2", "fit", 1, {}),
    ("mlp, clipped adam, squared error, rest 20", "custom", 1, {}),
    ("mlp, sgd, epochs of 9 steps, rest 13", "fit", 8, {}),
    ("convnet, sgd, augmented, rest 1", "custom", 1, {}),
    ("convnet2, clipped adam, augmented, rest 13", "fit", 8, {}),
    ("convnet2, sgd, stream, augmented, rest 13", "custom", 8, {}),
    ("mlp, sgd, float32", "custom", 1, {}),
    ("convnet2, adam, float32", "fit", 1, {}),
]
# The other loop for each. Mirrored replicas do the ones when they are two, the others when they are three; so do
# workers, of which three leave the convolutions to mirrored replicas.
OTHER_LOOP = [
    ("mlp, sgd", "fit", 1, {}),
    ("mlp, adam, rest 1", "custom", 1, {}),
    ("mlp, clipped adamw, rest 2", "custom", 8, {}),
    ("mlp, clipped adam, squared error, rest 20", "fit", 8, {}),
    ("mlp, sgd, epochs of 9 steps, rest 13", "custom", 1, {}),
    ("convnet, sgd, augmented, rest 1", "fit", 8, {}),
    ("convnet2, clipped adam, augmented, rest 13", "custom", 1, {}),
    ("convnet2, sgd, stream, augmented, rest 13", "fit", 1, {}),
    ("mlp, sgd, float32", "fit", 8, {}),
    ("convnet2, adam, float32", "custom", 8, {}),
]
MIXED = [("mlp, sgd, bfloat16", "custom", 8, {}), ("mlp, sgd, float16", "fit", 1, {})]
REFERENCES = [(work, "fit", 1, {}) for work in WORK]
# The runs of `RUNS` that do one step a call, with calls that grow.
GROWING = [("convnet2, adam, float32", "fit", "auto", {}), ("mlp, sgd, float32", "custom", "auto", {})]
HIERARCHICAL = ("mlp, adam, rest 1", "custom", 8, {"strategy.cross_device_ops": "hierarchical_copy"})
TO_ONE_DEVICE = ("convnet2, adam, float32", "fit", 8, {"strategy.cross_device_ops": "reduction_to_one_device"})

# What each process of a layout runs, one after the other: TensorFlow's devices cannot change after their first use.
LAYOUTS = {
    "one_device": (
        {"strategy.kind": "one_device", "strategy.device": "cpu"},
        [*REFERENCES, *(run for run in RUNS if run[1] == "custom"), *OTHER_LOOP[1:3], OTHER_LOOP[4], RUNS[1]],
    ),
    "mirrored x2": ({"strategy.kind": "mirrored", "strategy.devices": 2}, [*RUNS, *GROWING, HIERARCHICAL]),
    "mirrored x3": ({"strategy.kind": "mirrored", "strategy.devices": 3}, [*OTHER_LOOP, TO_ONE_DEVICE]),
    "multi_worker x2": ({"strategy.kind": "multi_worker", "strategy.workers": 2}, RUNS + GROWING + MIXED),
    "multi_worker x3": ({"strategy.kind": "multi_worker", "strategy.workers": 3}, OTHER_LOOP[:5]),
}  # fmt: skip

# What CI runs of each layout: both loops, growing calls, clipping, a stream with augmentation, half precision. The rest
# runs once a week.
OFTEN = {
    "one_device": [("mlp, clipped adam, squared error, rest 20", "custom", 1, {}), ("mlp, adam, rest 1", "fit", 8, {})],
    "mirrored x2": [
        ("mlp, adam, rest 1", "fit", 8, {}),
        ("mlp, clipped adam, squared error, rest 20", "custom", 1, {}),
        ("convnet2, sgd, stream, augmented, rest 13", "custom", 8, {}),
    ],
    "multi_worker x2": [
        ("mlp, adam, rest 1", "fit", 8, {}),
        ("mlp, clipped adam, squared error, rest 20", "custom", 1, {}),
        ("mlp, sgd, float32", "custom", 1, {}),
        ("mlp, sgd, float32", "custom", "auto", {}),
        ("mlp, sgd, bfloat16", "custom", 8, {}),
    ],
}
OFTEN_WORK = {run[0] for runs in OFTEN.values() for run in runs}


def is_often(layout, run):
    reference = layout == "one_device" and run in REFERENCES and run[0] in OFTEN_WORK
    return reference or run in OFTEN.get(layout, ())


def name_of(run):
    work, loop, steps_per_execution, more = run
    return ", ".join([work, loop, f"{steps_per_execution} a call", *map(str, more.values())])


def settings_of(layout, run):
    work, loop, steps_per_execution, more = run
    num_examples, options = WORK[work]
    values = SHARED | LAYOUTS[layout][0] | options | more
    values |= {
        "dataset.name": "digits",
        "input.validation": NUM_EXAMPLES - num_examples,
        "train.loop": loop,
        "train.steps_per_execution": steps_per_execution,
    }
    return config.load(None, values)


def folder_of(layout, run):
    return f"mlruns/runs/{layout} {name_of(run)}".replace(" ", "_")


def main(layout, often):
    """Do a layout's runs for CI, or the others; on a worker that is not the chief, help with them."""
    from tasks import train
    from tasks.training.callbacks.progress import Throughput

    class Losses(Throughput):
        """Also writes down the loss so far after each call, with the number of steps that were done."""

        def on_train_begin(self, logs=None):
            self.seen = []
            found.append(self.seen)

        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            self.seen.append((self.position.step, float(logs["loss"])))

    found = []
    train.Throughput = Losses  # The one callback that only the chief has and that comes after Position.
    prepared = records.load(records.PreparedDataset, Path("data/digits/prepared/manifest.json"))
    origin = records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None)
    cluster = json.loads(os.environ.get("TF_CONFIG", "null"))
    for run in LAYOUTS[layout][1]:
        if is_often(layout, run) != often:
            continue
        settings = settings_of(layout, run)
        if cluster and cluster["task"]["index"]:
            train.assist(settings, prepared)
            continue
        folder = folder_of(layout, run)
        one = records.Run(
            run_id="r", experiment="e", name="n", folder=folder, lineage=origin, settings=settings.to_json()
        )
        result = train.train(settings, prepared, one, lambda step, metrics: None)
        records.save(result, Path(folder, "result.json"))
        Path(folder, "losses.json").write_text(json.dumps(found.pop()))
    if not (cluster and cluster["task"]["index"]):
        import keras

        strategy = strategies.build(settings.strategy)
        Path(f"{layout}.json".replace(" ", "_")).write_text(json.dumps(strategy.locate(keras.Variable([1.0, 2.0]))))


@pytest.fixture(scope="module")
def measure(shared_project, start):
    """``measure(layout, run)`` gives a run's folder; the first call of a layout does its runs for CI, or the rest."""
    done = {}

    def measure(layout, run):
        key = layout, is_often(layout, run)
        with contextlib.chdir(shared_project):
            if key not in done:
                done[key] = False
                start("test_parity", [*key], LAYOUTS[layout][0].get("strategy.workers", 1))
                done[key] = True
            assert done[key], f"the runs of {layout} failed before"
        return shared_project / folder_of(layout, run)

    return measure


def content(folder):
    with Checkpoints(folder / "checkpoints", read_only=True) as saved:
        return saved.restore(saved.find("latest"))[0]


def losses_of(folder, work):
    """The sum of the losses of all examples that were seen, after each step that a call ended with."""
    num_examples, options = WORK[work]
    steps_in_pass = -(-num_examples // GLOBAL_BATCH_SIZE)
    steps = options.get("train.steps_per_epoch", steps_in_pass)
    sizes = [
        min(GLOBAL_BATCH_SIZE, num_examples - step % steps_in_pass * GLOBAL_BATCH_SIZE)
        for step in range(EPOCHS * steps)
    ]
    sums = {}
    for step, mean in json.loads((folder / "losses.json").read_text()):
        begin = (step - 1) // steps * steps  # Keras starts anew with each epoch.
        sums[step] = mean * sum(sizes[begin:step]) + (sums[begin] if begin else 0.0)
    assert max(sums) == EPOCHS * steps
    return sums, np.cumsum([0, *sizes])


def largest_difference(found, expected):
    """The largest difference, relative or absolute, whichever is smaller."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    difference = np.abs(found - expected)
    return float((difference / np.maximum(1.0, np.abs(expected))).max(initial=0.0)), float(difference.max(initial=0.0))


CASES = [
    pytest.param(
        layout,
        run,
        id=f"{layout} {name_of(run)}",
        marks=() if is_often(layout, run) else pytest.mark.exhaustive,
    )
    for layout, (_, runs) in LAYOUTS.items()
    for run in runs
    if (layout, run) not in [("one_device", reference) for reference in REFERENCES]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "run"),
    [
        pytest.param(
            layout, run, id=f"{layout} {name_of(run)}", marks=() if is_often(layout, run) else pytest.mark.exhaustive
        )
        for layout in ("mirrored x2", "multi_worker x2")
        for run in GROWING
    ],
)
def test_calls_that_grow_change_no_bit(measure, layout, run):
    work, loop, _, more = run
    single, growing = measure(layout, (work, loop, 1, more)), measure(layout, run)
    arrays = content(single)
    for key, array in content(growing).items():
        np.testing.assert_array_equal(array, arrays[key], err_msg=key)
    calls = [json.loads((folder / "losses.json").read_text()) for folder in (single, growing)]
    assert len(calls[1]) < len(calls[0]), "they grew"


@pytest.mark.in_ci(0, 2, 6)
@pytest.mark.parametrize(("layout", "run"), CASES)
def test_each_step_and_all_variables_are_those_of_one_device(measure, shared_project, layout, run):
    work, loop, steps_per_execution, _ = run
    reference = measure("one_device", (work, "fit", 1, {}))
    folder = measure(layout, run)
    dtype = WORK[work][1].get("train.dtype_policy", "float32")

    # The mean loss of the steps of each call.
    sums, examples = losses_of(folder, work)
    expected_sums, _ = losses_of(reference, work)
    ends = sorted(sums)
    assert len(ends) > 1
    if steps_per_execution == 1:
        assert ends == sorted(expected_sums), "every step"
    means, expected_means = (
        [
            (total[end] - total.get(begin, 0.0)) / (examples[end] - examples[begin])
            for begin, end in itertools.pairwise([0, *ends])
        ]
        for total in (sums, expected_sums)
    )
    arrays, expected_arrays = content(folder), content(reference)
    assert arrays.keys() == expected_arrays.keys()
    loss_difference = max(largest_difference(means, expected_means))
    weight_difference = max(
        max(largest_difference(arrays[key], array))
        for key, array in expected_arrays.items()
        if key.startswith("model/")
    )
    row = layout, loop, steps_per_execution, dtype, work, f"{loss_difference:.1e}", f"{weight_difference:.1e}"
    print(f"| {' | '.join(map(str, row))} |")

    tolerance = TOLERANCE[dtype]
    # In half precision the two best logits of an example may be equal but for rounding: one of 1,292 was, once.
    either_way = 2 if dtype.startswith("mixed_") else 0
    np.testing.assert_allclose(means, expected_means, rtol=tolerance, atol=tolerance)
    for key, array in expected_arrays.items():
        assert arrays[key].dtype == array.dtype
        # Adam divides by the root of a second moment: a gradient of nothing but rounding moves a weight like any other.
        allowed = max(tolerance, either_way) if key == "metric/0002" else tolerance  # The number of right answers.
        np.testing.assert_allclose(arrays[key], array, rtol=tolerance, atol=allowed, err_msg=key)
    result, expected = (records.load(records.TrainingResult, path / "result.json") for path in (folder, reference))
    assert result.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        num_examples = WORK[work][0] if name.startswith("train/") else NUM_EXAMPLES - WORK[work][0]
        allowed = max(tolerance, either_way / num_examples) if name.endswith("accuracy") else tolerance
        assert result.history[name] == pytest.approx(values, rel=tolerance, abs=allowed), name
    assert (result.steps, result.epochs, result.loop) == (expected.steps, EPOCHS, loop)
    if dtype.startswith("mixed_"):
        with zipfile.ZipFile(shared_project / result.final_model) as model:
            assert f'"{dtype}"' in model.read("config.json").decode(), "layers that computed in full would fit too"
        assert {array.dtype.name for key, array in arrays.items() if key.startswith("model/")} == {"float32"}
    # The last metrics are those of validation: every example of it was counted, once.
    num_validation = NUM_EXAMPLES - WORK[work][0]
    assert arrays["metric/0001"] == num_validation
    assert arrays["metric/0003"] == num_validation


DEVICES = {
    "one_device": ["/device:CPU:0"],
    "mirrored x2": [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)],
    "mirrored x3": [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(3)],
    "multi_worker x2": [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)],
    "multi_worker x3": [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(3)],
}


@pytest.mark.in_ci(0, 2, 6)
@pytest.mark.parametrize(("layout", "run"), CASES)
def test_every_variable_lies_where_it_should(measure, shared_project, layout, run):
    folder = measure(layout, run)
    placement = records.load(records.Placement, folder / "records" / "placement.json")
    devices = DEVICES[layout]
    assert list(placement.devices) == devices
    assert (placement.strategy, placement.backend) == (layout.partition(" ")[0], "tensorflow")
    assert placement.num_replicas == len(devices)
    assert placement.num_workers == LAYOUTS[layout][0].get("strategy.workers", 1)
    for variable in placement.variables:
        found = [device.replace("/job:localhost/replica:0/task:0", "") for device in variable.devices]
        assert found == [device.replace("/job:localhost/replica:0/task:0", "") for device in devices], variable.path
        assert variable.sharding == ("mirrored" if len(devices) > 1 else "whole")
    # What is made outside the strategy's scope is this process's own.
    devices, sharding, num_bytes = json.loads((shared_project / f"{layout}.json".replace(" ", "_")).read_text())
    assert (len(devices), sharding, num_bytes) == (1, "whole", 8)
    assert devices[0].endswith("task:0/device:CPU:0")
    arrays = [array for key, array in content(folder).items() if key.startswith(("model/", "optimizer/"))]
    assert [variable.shape for variable in placement.variables] == [array.shape for array in arrays]
    assert [variable.bytes_per_device for variable in placement.variables] == [array.nbytes for array in arrays]
    mirrored = {
        "auto": "CollectiveAllReduce",
        "hierarchical_copy": "HierarchicalCopyAllReduce",
        "reduction_to_one_device": "ReductionToOneDevice",
    }[run[3].get("strategy.cross_device_ops", "auto")]
    workers = "CollectiveAllReduce, RING over gRPC"
    expected = {"one_device": "none", "mirrored": mirrored, "multi_worker": workers}
    assert placement.collectives == expected[placement.strategy]

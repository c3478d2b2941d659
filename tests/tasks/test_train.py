import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from filelock import FileLock

from tasks import input_pipeline
from tasks.checkpoints import Checkpoints
from tasks.errors import UserError

# 147 examples are left to train on: the last batch of an epoch is a short one.
LAST_BATCH_SHORT = ("input.validation=53", "train.per_replica_batch_size=32")
STEPS = 5


def leave(prepared_by, run_id, step):
    """Make the run folder that a run killed after ``step`` leaves: its checkpoints up to then."""
    source, target = (Path(f"mlruns/runs/{name}/checkpoints") for name in (prepared_by, run_id))
    for folder in source.iterdir():
        if folder.name.isdigit() and int(folder.name) <= step:
            shutil.copytree(folder, target / folder.name)


def content(result):
    """Everything in the last checkpoint: weights, optimizer, Dropout's seeds, metrics."""
    with Checkpoints(Path(result.checkpoints)) as saved:
        return saved.restore(saved.find("latest"))


@pytest.mark.parametrize(
    ("overrides", "present", "starts"),
    [
        # The network of params.yaml: convolutions, Dropout, augmentation, a cosine.
        (
            [
                *LAST_BATCH_SHORT, "model.name=convnet2", "model.options={dropout: 0.4}",
                "input.augmentation={flip: true, crop_padding: 1}", "train.epochs=3",
                "schedule={kind: cosine, learning_rate: 0.003, warmup_epochs: 1.0}",
                "checkpoint.every_steps=2", "optimizer.global_clipnorm=1.0",
            ],
            [2, 4, 5, 6, 8, 10, 12, 14, 15],
            [2, 5, 8],
        ),
        # Calls of eight steps: an epoch of 37 ends in one of five.
        (
            [
                "input.validation=53", "train.per_replica_batch_size=4", "model.options={units: [16], dropout: 0.5}",
                "train.steps_per_execution=8", "checkpoint.every_steps=10", "optimizer={kind: sgd, momentum: 0.9}",
            ],
            [16, 24, 32, 37, 45, 53, 61, 74],
            [16, 37, 53],
        ),
    ],
    ids=["convnet2", "steps_per_execution"],
)  # fmt: skip
def test_a_resumed_run_is_the_whole_run_to_the_bit(tiny, train, overrides, present, starts):
    overrides = ["train.deterministic=true", "checkpoint.keep=100", *overrides]
    whole = train(tiny, *overrides, run_id="whole")
    with Checkpoints(Path(whole.checkpoints)) as saved:
        assert saved.steps() == present
    arrays, state = content(whole)
    assert any(key.startswith("seed/") for key in arrays)
    for step in starts:
        leave("whole", f"from_{step}", step)
        resumed = train(tiny, *overrides, run_id=f"from_{step}", resume=True)
        assert resumed.weights_digest == whole.weights_digest, step
        assert resumed.history == whole.history
        assert (resumed.epochs, resumed.steps) == (whole.epochs, whole.steps)
        assert Path(resumed.best_checkpoint).name == Path(whole.best_checkpoint).name
        resumed_arrays, resumed_state = content(resumed)
        assert resumed_state == state
        assert resumed_arrays.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, resumed_arrays[key], err_msg=key)


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_another_run(tiny, train):
    options = ("train.deterministic=true", "model.options={units: [16], dropout: 0.5}")
    first = train(tiny, *options)
    assert train(tiny, *options, run_id="second").weights_digest == first.weights_digest
    assert train(tiny, *options, "train.seed=1", run_id="third").weights_digest != first.weights_digest


def test_the_result_tells_what_happened(tiny, train):
    sent = []
    result = train(
        tiny,
        *LAST_BATCH_SHORT,
        "schedule={kind: piecewise, boundaries_epochs: [1, 2], learning_rates: [0.01, 0.001, 0.0001]}",
        "train.epochs=3",
        "train.tensorboard=true",
        send=lambda step, metrics: sent.append((step, metrics)),
    )
    assert (result.dataset, result.strategy, result.loop, result.num_replicas) == ("tiny", "one_device", "fit", 1)
    assert (result.epochs, result.steps, result.global_batch_size) == (3, 3 * STEPS, 32)
    assert result.num_parameters == (64 + 1) * 16 + (16 + 1) * 10
    assert result.examples_per_second > 0
    assert not result.stopped_early
    assert result.history.keys() == {
        "train/loss",
        "train/accuracy",
        "train/learning_rate",
        "validation/loss",
        "validation/accuracy",
    }
    assert all(len(values) == 3 for values in result.history.values())
    assert result.history["train/learning_rate"] == pytest.approx([0.01, 0.001, 0.0001]), "what the epoch was made with"
    assert result.history["train/loss"][2] < result.history["train/loss"][0]
    assert [step for step, _ in sent] == [STEPS, 2 * STEPS, 3 * STEPS]
    for epoch, (_, metrics) in enumerate(sent):
        assert metrics == {name: values[epoch] for name, values in result.history.items()}
    assert result.checkpoint == "mlruns/runs/first/checkpoints/15"
    for path in (result.checkpoint, result.best_checkpoint, result.final_model, result.best_model):
        assert Path(path).exists()
    for split in ("train", "validation"):
        assert list(Path("mlruns/runs/first/tensorboard", split).glob("events.out.tfevents.*"))


def held_out_metrics(prepared, validation, model):
    """Loss and accuracy over the validation examples, by hand."""
    split, rows = input_pipeline.carve(prepared, validation, 0)["validation"]
    images, labels = (np.load(path)[rows] for path in (prepared.splits[split].images, prepared.splits[split].labels))
    logits = keras.models.load_model(model).predict(images, verbose=0).astype("float64")
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(shares[range(validation), labels]).mean(), (logits.argmax(1) == labels).mean()


def test_the_metrics_of_validation_are_those_of_the_held_out_examples(tiny, train):
    result = train(tiny, *LAST_BATCH_SHORT)
    loss, accuracy = held_out_metrics(tiny, 53, result.final_model)
    assert result.history["validation/loss"][-1] == pytest.approx(loss, rel=1e-4)
    assert result.history["validation/accuracy"][-1] == pytest.approx(accuracy)


def test_without_validation(tiny, train):
    result = train(tiny, "input.validation=null", "checkpoint.monitor=train/loss", "train.epochs=1")
    assert result.history.keys() == {"train/loss", "train/accuracy", "train/learning_rate"}


# Nothing is better by 100 than the first epoch, so the second is the first of `patience_epochs` in vain.
HOPELESS = ("train.epochs=9", "train.early_stopping={monitor: validation/loss, patience_epochs: 3, min_delta: 100}")


def test_early_stopping_stops_and_survives_a_resume(tiny, train):
    options = (
        "train.deterministic=true",
        *LAST_BATCH_SHORT,
        *HOPELESS,
        "checkpoint.every_steps=4",
        "checkpoint.keep=99",
    )
    whole = train(tiny, *options, run_id="whole")
    assert (whole.epochs, whole.stopped_early) == (4, True)
    # At the end of the first epoch in vain, inside the last epoch, and when it was over.
    for step in (2 * STEPS, 3 * STEPS + 1, 4 * STEPS):
        leave("whole", f"from_{step}", step)
        resumed = train(tiny, *options, run_id=f"from_{step}", resume=True)
        assert (resumed.epochs, resumed.stopped_early, resumed.steps) == (4, True, 4 * STEPS), step
        assert resumed.weights_digest == whole.weights_digest
        assert resumed.history == whole.history


def test_a_training_that_improves_is_not_stopped(tiny, train):
    result = train(tiny, "train.early_stopping={monitor: train/accuracy, patience_epochs: 0}", "train.epochs=2")
    assert result.history["train/accuracy"][1] > result.history["train/accuracy"][0]
    assert (result.epochs, result.stopped_early) == (2, False)


def test_a_finished_run_goes_on_with_more_epochs(tiny, train):
    options = ("train.deterministic=true", "model.options={units: [16], dropout: 0.5}")
    whole = train(tiny, *options, "train.epochs=3", run_id="whole")
    train(tiny, *options, "train.epochs=2", run_id="shorter")
    longer = train(tiny, *options, "train.epochs=3", run_id="shorter", resume=True)
    assert longer.weights_digest == whole.weights_digest
    assert longer.history == whole.history
    over = train(tiny, *options, "train.epochs=3", run_id="shorter", resume=True)
    assert over.weights_digest == whole.weights_digest
    assert (over.steps, over.examples_per_second) == (whole.steps, None)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        # 180 examples are six batches of 32 as of 31.
        (["train.per_replica_batch_size=31"], "started with 32 examples a step .* these settings give 31"),
        (["train.global_batch_size=64"], r"these settings give 64: resume it with train.global_batch_size=32"),
        (
            ["input.validation=100"],
            "run first cannot be resumed as another training: input.validation was 0.1 and is 100",
        ),
        (["optimizer.kind=sgd"], "cannot be resumed as another training: .*optimizer.kind was 'adam' and is 'sgd'"),
        (["train.seed=5"], "train.seed was 0 and is 5"),
    ],
)
def test_a_resume_as_another_training_is_refused(tiny, train, overrides, said):
    first = train(tiny, "train.epochs=1")
    before = sorted(Path(first.checkpoints).rglob("*"))
    with pytest.raises(UserError, match=said) as error:
        train(tiny, "train.epochs=2", *overrides, resume=True)
    assert error.value.exit_code == 2
    assert sorted(Path(first.checkpoints).rglob("*")) == before


def test_one_process_trains_a_run(tiny, train):
    train(tiny, "train.epochs=1")
    with (
        FileLock("mlruns/runs/first/.lock"),
        pytest.raises(UserError, match="run first is being trained by another process"),
    ):
        train(tiny, resume=True)
    assert train(tiny, resume=True).epochs == 2


def test_a_resume_of_nothing_is_refused(tiny, train):
    with pytest.raises(UserError, match="holds no checkpoint"):
        train(tiny, resume=True)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.per_replica_batch_size=181"], "the global batch of 181 examples is larger than the training split"),
        (["input.validation=200"], "input.validation = 200: takes 200 of the 200 training examples"),
        (["input.validation=9999"], "input.validation = 9999"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(tiny, train, project, overrides, said):
    with pytest.raises(UserError, match=said) as error:
        train(tiny, *overrides)
    assert error.value.exit_code == 2
    assert [path.name for path in (project / "mlruns").rglob("*")] == [".gitkeep"]


def test_a_damaged_array_is_refused_before_anything_else(tiny, train, project):
    path = project / tiny.splits["train"].images
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        UserError,
        match=r"train_images.npy: damaged, its sha256 is .* stratagem prepare --set dataset.name=tiny --force",
    ):
        train(tiny)
    assert [path.name for path in (project / "mlruns").rglob("*")] == [".gitkeep"]


def test_mixed_precision_keeps_weights_and_logits_in_full(tiny, train):
    result = train(tiny, "train.dtype_policy=mixed_bfloat16")
    model = keras.models.load_model(result.final_model)
    assert model.get_layer("mlp").get_layer("dense1").compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert model.output.dtype == "float32"
    assert np.isfinite(result.history["train/loss"]).all()
    assert result.history["train/loss"][1] < result.history["train/loss"][0]


def test_loss_scaling_trains_and_resumes(tiny, train):
    options = ("train.deterministic=true", "train.dtype_policy=mixed_float16")
    whole = train(tiny, *options, "train.epochs=2", run_id="whole")
    train(tiny, *options, "train.epochs=1", run_id="shorter")
    resumed = train(tiny, *options, "train.epochs=2", run_id="shorter", resume=True)
    assert resumed.weights_digest == whole.weights_digest
    assert np.isfinite(whole.history["train/loss"]).all()


def test_a_compiled_step_learns_the_same(tiny, train):
    plain = train(tiny, run_id="plain")
    compiled = train(tiny, "train.jit_compile=true", run_id="compiled")
    for name, values in plain.history.items():
        assert compiled.history[name] == pytest.approx(values, rel=1e-3), name


# One process: TensorFlow's devices cannot change after their first use.
MIRRORED = """
import json, shutil, sys
from pathlib import Path
import keras, numpy as np
from tasks import config, records
from tasks import input_pipeline
from tasks.checkpoints import Checkpoints
from tasks.errors import UserError
from tasks.train import train

prepared = records.load(records.PreparedDataset, Path("data/tiny/prepared/manifest.json"))
trace = records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None)
BASE = {
    "strategy.kind": "mirrored", "strategy.devices": 2, "train.deterministic": True, "train.epochs": 2,
    "train.global_batch_size": 32, "input.augmentation.crop_padding": 0, "schedule.kind": "constant",
    "schedule.learning_rate": 0.01, "model.name": "mlp", "model.options": {"units": [16], "dropout": 0.5},
    "checkpoint.keep": 100,
}

def run(run_id, resume=False, **overrides):
    overrides = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = config.load(None, {**BASE, **overrides})
    folder = f"mlruns/runs/{run_id}"
    one = records.Run(
        run_id=run_id, experiment="tests", name="tests", folder=folder, lineage=trace, settings=settings.to_json()
    )
    result = train(settings, prepared, one, lambda step, metrics: None, resume)
    return settings, result

found = {}
try:
    run("refused", train__global_batch_size=33)
except UserError as error:
    found["refused"] = str(error)

# 146 examples: the last batch of 18 is short, and even.
even = {"input__validation": 54, "checkpoint__every_steps": 3}
settings, whole = run("whole", **even)
found["whole"] = whole.model_dump(mode="json")
for step in (3, 5, 8):
    for folder in Path("mlruns/runs/whole/checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) <= step:
            shutil.copytree(folder, f"mlruns/runs/from_{step}/checkpoints/{folder.name}")
    found[f"from_{step}"] = run(f"from_{step}", True, **even)[1].model_dump(mode="json")

plain = {"model__options": {"units": [16]}}
found["even"] = run("even", input__validation=54, **plain)[1].model_dump(mode="json")
# 161 = 5 * 32 + 1: one of the two replicas gets nothing of the last batch. 39 = 32 + 7 to validate on.
found["uneven"] = run("uneven", input__validation=39, **plain)[1].model_dump(mode="json")
print(json.dumps(found))
"""


def test_mirrored(tiny, train, run):
    done = run([sys.executable, "-c", MIRRORED])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "train.global_batch_size = 33 does not divide by 2 replicas: 33 = 2 * 16 + 1" in found["refused"]

    whole = found["whole"]
    assert (whole["strategy"], whole["num_replicas"], whole["steps"]) == ("mirrored", 2, 2 * STEPS)
    assert whole["devices"] == [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(2)]
    for step in (3, 5, 8):
        resumed = found[f"from_{step}"]
        assert resumed["weights_digest"] == whole["weights_digest"], step
        assert resumed["steps"] == whole["steps"]
        for name, values in whole["history"].items():
            # The replicas' parts of a metric are saved as one sum: added up again in another order.
            assert resumed["history"][name] == pytest.approx(values, rel=1e-6), name

    alone = {
        name: train(tiny, "train.deterministic=true", f"input.validation={held_out}", run_id=f"alone_{name}").history
        for name, held_out in (("even", 54), ("uneven", 39))
    }
    for name, values in alone["even"].items():
        assert found["even"]["history"][name] == pytest.approx(values, rel=1e-5), name
    # Keras averages the replicas' means, and that of an empty part is 0: such a last batch counts for half of its loss.
    uneven = found["uneven"]["history"]
    for name, values in alone["uneven"].items():
        if name.startswith("train/"):
            assert uneven[name][0] == pytest.approx(values[0], rel=1e-5), name
            assert uneven[name] == pytest.approx(values, rel=0.05), name
    loss, accuracy = held_out_metrics(tiny, 39, found["uneven"]["final_model"])
    assert uneven["validation/loss"][-1] == pytest.approx(loss, rel=1e-4)
    assert uneven["validation/accuracy"][-1] == pytest.approx(accuracy)

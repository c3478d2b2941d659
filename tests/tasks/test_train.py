import json
import shutil
import sys
import threading
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from filelock import FileLock
from tensorflow.core.util import event_pb2

from tasks import config, records, strategies, tracked
from tasks import train as stage
from tasks.input import sources
from tasks.input.order import carve
from tasks.modeling import models
from tasks.records import Limits
from tasks.runs import lineage, outcome
from tasks.system import machine
from tasks.system.errors import Interrupted, UserError
from tasks.train import assist, check
from tasks.training import initial, steps
from tasks.training.callbacks.stopping import NonFiniteLoss
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.setup import resumed_batch_size
from tests.tasks.written_runs import leave_checkpoints, write_run

# 147 examples are left to train on: the last batch of an epoch is a short one.
LAST_BATCH_SHORT = ("input.validation=53", "train.per_replica_batch_size=32")
STEPS = 5


def content(result):
    """Everything in the last checkpoint: weights, optimizer, Dropout's seeds, metrics."""
    with Checkpoints(Path(result.checkpoints)) as saved:
        return saved.restore(saved.find("latest"))


@pytest.mark.parametrize(
    ("overrides", "present", "starts"),
    [
        # The network of params.yaml: convolutions, Dropout, augmentation, a cosine.
        pytest.param(
            [
                *LAST_BATCH_SHORT, "model.name=convnet2", "model.options={dropout: 0.4, padding: same}",
                "input.augmentation={flip: true, crop_padding: 1}", "train.epochs=3",
                "schedule={kind: cosine, learning_rate: 0.003, warmup_epochs: 1.0}",
                "checkpoint.every_steps=2", "optimizer.global_clipnorm=1.0",
            ],
            [2, 4, 5, 6, 8, 10, 12, 14, 15],
            [2, 5, 8],
            marks=pytest.mark.exhaustive,
        ),
        (
            [
                "train.loop=custom", "input.validation=53", "train.per_replica_batch_size=4",
                "model.options={units: [16], dropout: 0.5}", "train.steps_per_execution=8", "checkpoint.every_steps=10",
                "optimizer={kind: sgd, momentum: 0.9}",
            ],
            [16, 24, 32, 37, 45, 53, 61, 74],
            [16, 53],
        ),
        # Epochs of twelve steps, more than two passes; gradients of three steps are gathered over both ends.
        pytest.param(
            [
                "train.loop=custom", *LAST_BATCH_SHORT, "train.steps_per_epoch=12", "train.steps_per_execution=5",
                "checkpoint.every_steps=5", "model.options={units: [16], dropout: 0.5}",
                "train.gradient_accumulation_steps=3", "input.source=array",
            ],
            [5, 10, 12, 17, 22, 24],
            [10, 17],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["convnet2", "steps_per_execution custom", "long epochs custom"],
)  # fmt: skip
def test_a_resumed_run_is_the_whole_run_to_the_bit(tiny, train, overrides, present, starts):
    overrides = ["train.deterministic=true", "checkpoint.keep=100", *overrides]
    whole = train(tiny, *overrides, run_id="whole")
    with Checkpoints(Path(whole.checkpoints)) as saved:
        assert saved.steps() == present
    arrays, state = content(whole)
    assert any(key.startswith("seed/") for key in arrays)
    for step in starts:
        leave_checkpoints("whole", f"from_{step}", step)
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
    assert result.optimizer == "FusedAdam"
    assert result.examples_per_second > 0
    assert result.setup_seconds > 0
    assert result.first_call_seconds > 0
    assert len(result.epoch_seconds) == 3
    assert sum(result.epoch_seconds) > result.first_call_seconds
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
    loss, accuracy = held_out_metrics(tiny, 53, result.final_model)
    assert result.history["validation/loss"][-1] == pytest.approx(loss, rel=1e-4)
    assert result.history["validation/accuracy"][-1] == pytest.approx(accuracy)
    placement = records.load(records.Placement, Path("mlruns/runs/first/records/placement.json"))
    assert (placement.strategy, placement.devices) == ("one_device", result.devices)
    names = [variable.path for variable in placement.variables]
    assert {"dense1/kernel", "logits/bias", "fused_adam/dense1_kernel_momentum"} <= set(names)


def scalars(folder):
    """The TensorBoard scalars of a run: {(split, tag, step): value}."""
    found = {}
    for path in folder.glob("*/events.out.tfevents.*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found[path.parent.name, value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return found


def test_both_loops_leave_the_same(tiny, train):
    # Nothing is better by 100 than the first epoch.
    options = [
        "train.steps_per_execution=3", *LAST_BATCH_SHORT, "train.epochs=9", "train.tensorboard=true",
        "train.deterministic=true",
        "train.early_stopping={monitor: validation/loss, patience_epochs: 2, min_delta: 100}",
        "model.options={units: [16], dropout: 0.5}", "checkpoint.every_steps=2", "checkpoint.keep=99",
    ]  # fmt: skip
    left = {}
    for loop in ("fit", "custom"):
        sent = []
        result = train(
            tiny,
            *options,
            f"train.loop={loop}",
            run_id=loop,
            send=lambda step, metrics, sent=sent: sent.append((step, dict(metrics))),
        )
        assert (result.loop, result.epochs, result.stopped_early) == (loop, 3, True)
        with Checkpoints(Path(result.checkpoints)) as saved:
            steps = saved.steps()
        left[loop] = result, sent, steps, scalars(Path(f"mlruns/runs/{loop}/tensorboard")), content(result)
    (kept, sent, steps, board, (arrays, state)) = left["fit"]
    (again, same_sent, same_steps, same_board, (same_arrays, same_state)) = left["custom"]
    assert same_steps == steps
    assert again.history.keys() == kept.history.keys()
    for name, values in kept.history.items():
        assert again.history[name] == pytest.approx(values, rel=1e-5), name
    assert [step for step, _ in same_sent] == [step for step, _ in sent]
    for (_, metrics), (_, same) in zip(sent, same_sent, strict=True):
        assert same == pytest.approx(metrics, rel=1e-5)
    assert {split for split, _, _ in board} == {"train", "validation"}
    assert {tag for _, tag, _ in board} >= {"epoch_loss", "epoch_accuracy", "epoch_learning_rate"}
    assert same_board.keys() == board.keys()
    assert same_board == pytest.approx(board, rel=1e-5)
    assert (same_state.step, same_state.epoch) == (state.step, state.epoch)
    assert same_state.callbacks["train.early_stopping"]["wait"] == 2
    assert same_arrays.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_allclose(same_arrays[key], array, rtol=1e-5, atol=1e-6, err_msg=key)


def test_a_run_goes_on_in_the_other_loop(tiny, train):
    options = ("train.deterministic=true", *LAST_BATCH_SHORT, "model.options={units: [16], dropout: 0.5}",
               "checkpoint.every_steps=3", "checkpoint.keep=9")  # fmt: skip
    whole = train(tiny, *options, "train.loop=fit", run_id="whole")
    leave_checkpoints("whole", "changed", 3)
    changed = train(tiny, *options, "train.loop=custom", run_id="changed", resume=True)
    assert changed.loop == "custom"
    for name, values in whole.history.items():
        assert changed.history[name] == pytest.approx(values, rel=1e-5), name


def test_an_epoch_may_have_fewer_or_more_steps_than_a_pass_over_the_data(tiny, train):
    options = (*LAST_BATCH_SHORT, "train.deterministic=true", "checkpoint.keep=1",
               "input.augmentation={flip: true, crop_padding: 1}")  # fmt: skip
    passes = train(tiny, *options, "train.epochs=2", run_id="passes")
    for steps_per_epoch, epochs in ((2, 5), (10, 1)):
        lengths = (f"train.steps_per_epoch={steps_per_epoch}", f"train.epochs={epochs}")
        result = train(tiny, *options, *lengths, run_id=f"epochs_of_{steps_per_epoch}")
        assert (result.epochs, result.steps) == (epochs, 2 * STEPS)
        assert len(result.history["train/loss"]) == epochs
        assert result.weights_digest == passes.weights_digest, "the same steps on the same examples"
        assert result.history["validation/loss"][-1] == passes.history["validation/loss"][-1]


OWN = """
import keras

@keras.saving.register_keras_serializable("mine")
class Mine(keras.Model):
    def __init__(self, classes, **options):
        super().__init__(**options)
        self.classes = classes
        self.hidden = [keras.layers.Dense(16, activation="relu") for _ in range(2)]
        self.dropout = keras.layers.Dropout(0.3)
        self.logits = keras.layers.Dense(classes)

    def call(self, images, training=False):
        x = keras.ops.reshape(images, [-1, 64])
        for layer in self.hidden:
            x = self.dropout(layer(x), training=training)
        return self.logits(x)

    def get_config(self):
        return super().get_config() | {"classes": self.classes}

def build(input_shape, num_classes):
    return Mine(num_classes)
"""


@pytest.mark.slow
def test_a_subclassed_model_of_the_users_own_trains_in_both_loops(tiny, train, own):
    options = (own(OWN), *LAST_BATCH_SHORT, "train.deterministic=true", "checkpoint.every_steps=3", "checkpoint.keep=9")
    results = {loop: train(tiny, *options, f"train.loop={loop}", run_id=loop) for loop in ("fit", "custom")}
    for name, values in results["fit"].history.items():
        assert results["custom"].history[name] == pytest.approx(values, rel=1e-5), name
    assert results["fit"].history["train/loss"][1] < results["fit"].history["train/loss"][0]
    for loop, result in results.items():
        leave_checkpoints(loop, f"{loop}_again", 3)
        again = train(tiny, *options, f"train.loop={loop}", run_id=f"{loop}_again", resume=True)
        assert again.weights_digest == result.weights_digest, loop
        loss, accuracy = held_out_metrics(tiny, 53, result.final_model)
        assert result.history["validation/loss"][-1] == pytest.approx(loss, rel=1e-4)
        assert result.history["validation/accuracy"][-1] == pytest.approx(accuracy)


ON_THE_HOST = """
import keras
import tensorflow as tf

@keras.saving.register_keras_serializable()
class OnTheHost(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), x.shape)

def build(input_shape, num_classes):
    images = keras.Input(input_shape)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(OnTheHost()(images))))
"""


def test_jit_compile_hands_the_step_to_xla(tiny, train, own):
    options = (own(ON_THE_HOST), "model.options={}", "train.epochs=1", "register.enabled=false")
    train(tiny, *options, run_id="plain")
    # XLA has no operation that calls Python.
    with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported operations"):
        train(tiny, *options, "train.jit_compile=true", run_id="compiled")


def outputs_of(model, images):
    """The outputs of an exported model; its ``predict`` would be compiled by XLA, which takes half a second."""
    return keras.models.load_model(model)(images).numpy().astype("float64")


def test_the_squared_error_is_that_of_the_shares(tiny, train):
    result = train(tiny, *LAST_BATCH_SHORT, "train.loss=mean_squared_error", "train.loop=custom")
    split, rows = carve(tiny, 53, 0)["validation"]
    images, labels = (np.load(path)[rows] for path in (tiny.splits[split].features["image"], tiny.splits[split].labels))
    logits = outputs_of(result.final_model, images)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert result.history["validation/loss"][-1] == pytest.approx(((shares - np.eye(10)[labels]) ** 2).mean(), rel=1e-4)
    assert result.history["train/loss"][1] < result.history["train/loss"][0]


@pytest.mark.slow
def test_a_model_is_loaded_where_this_project_is_not_installed(tiny, train, run):
    result = train(tiny, "train.loss=mean_squared_error", "train.loop=fit", "train.epochs=1")
    code = "import sys; sys.modules['tasks'] = None; import keras; keras.models.load_model(sys.argv[1])"
    done = run([sys.executable, "-c", code, result.final_model], env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr


def test_accumulated_gradients_are_those_of_a_larger_batch(tiny, train):
    # 160 examples: ten steps of 16, five of 32.
    options = ("input.validation=40", "train.loop=custom", "optimizer={kind: sgd, momentum: 0.9}",
               "train.steps_per_execution=4")  # fmt: skip
    large = train(tiny, *options, "train.per_replica_batch_size=32", run_id="large")
    small = train(
        tiny, *options, "train.per_replica_batch_size=16", "train.gradient_accumulation_steps=2", run_id="small"
    )
    assert (large.steps, small.steps) == (10, 20)
    for name, values in large.history.items():
        assert small.history[name] == pytest.approx(values, rel=1e-4), name
    (arrays, _), (same, _) = content(large), content(small)
    for key, array in arrays.items():
        if key.startswith("model/"):
            np.testing.assert_allclose(same[key], array, rtol=1e-4, atol=1e-6, err_msg=key)


def held_out_metrics(prepared, validation, model):
    """Loss and accuracy over the validation examples, by hand."""
    split, rows = carve(prepared, validation, 0)["validation"]
    images, labels = (
        np.load(path)[rows] for path in (prepared.splits[split].features["image"], prepared.splits[split].labels)
    )
    logits = outputs_of(model, images)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return -np.log(shares[range(validation), labels]).mean(), (logits.argmax(1) == labels).mean()


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
        leave_checkpoints("whole", f"from_{step}", step)
        resumed = train(tiny, *options, run_id=f"from_{step}", resume=True)
        assert (resumed.epochs, resumed.stopped_early, resumed.steps) == (4, True, 4 * STEPS), step
        assert resumed.weights_digest == whole.weights_digest
        assert resumed.history == whole.history


def test_a_trial_of_a_sweep_ends_where_it_is_below_its_limit_and_is_not_resumed_from_there(tiny, train, project):
    options = ("train.deterministic=true", "train.epochs=5", "checkpoint.keep=99")
    whole = train(tiny, *options, run_id="whole")
    values = whole.history["validation/loss"]
    # As good as the first limit is good enough; the second asks for more.
    limits = Limits(metric="validation/loss", lower_is_better=True, by_epoch={1: values[0], 3: values[2] / 2})
    steps = whole.steps // 5
    for run_id, step in (("trial", None), ("inside", 2 * steps), ("over", 3 * steps)):
        if step is not None:
            leave_checkpoints("trial", run_id, step)
        records.save(limits, project / "mlruns" / "runs" / run_id / "records" / "limits.json")
        ended = train(tiny, *options, run_id=run_id, resume=step is not None)
        assert (ended.epochs, ended.steps, ended.stopped_early) == (3, 3 * steps, True)
        assert ended.history["validation/loss"] == values[:3]


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


def test_a_resume_as_another_training_is_refused(tiny, train):
    others = [
        # 180 examples are six batches of 32 as of 31.
        (["train.per_replica_batch_size=31"], "train.per_replica_batch_size was 32 and is now 31"),
        (["train.global_batch_size=64"], r"train.global_batch_size was 32 and is now 64"),
        (
            ["input.validation=100"],
            "run first cannot be resumed with other values: input.validation was 0.1 and is now 100",
        ),
        (["optimizer.kind=sgd"], "cannot be resumed with other values: .*optimizer.kind was 'adam' and is now 'sgd'"),
        (["train.seed=5"], "train.seed was 0 and is now 5"),
    ]
    first = train(tiny, "train.epochs=1")
    before = sorted(Path(first.checkpoints).rglob("*"))
    for overrides, said in others:
        with pytest.raises(UserError, match=said) as error:
            train(tiny, "train.epochs=2", *overrides, resume=True)
        assert error.value.exit_code == 2
        assert sorted(Path(first.checkpoints).rglob("*")) == before


def test_one_process_trains_a_run(tiny, train, monkeypatch):
    monkeypatch.setattr(stage, "DYING_SECONDS", 0.1)
    train(tiny, "train.epochs=1")
    with (
        FileLock("mlruns/runs/first/.lock"),
        pytest.raises(UserError, match="run first is being trained by another process"),
    ):
        train(tiny, resume=True)
    assert train(tiny, resume=True).epochs == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_training_that_is_told_to_stop_is_carried_on_to_the_same_bits(tiny, train, at_step, loop):
    options = (f"train.loop={loop}", "train.deterministic=true", "model.options={units: [16], dropout: 0.5}",
               "train.steps_per_execution=1")  # fmt: skip
    whole = train(tiny, *options, run_id="whole")
    for step in (4, 6):
        run_id, stop = f"stopped_at_{step}", threading.Event()
        with (
            at_step(step, lambda model, stop=stop: stop.set()),
            pytest.raises(Interrupted, match=f"stopped at step {step}, which is"),
        ):
            train(tiny, *options, run_id=run_id, stop=stop)
        resumed = train(tiny, *options, run_id=run_id, resume=True)
        assert resumed.weights_digest == whole.weights_digest, step
        assert resumed.history == whole.history


def test_a_run_goes_on_with_another_batch_size_where_it_was(tiny, train):
    """180 examples are six steps of 32 or three of 64; a cosine ends with the last epoch, whatever the steps."""
    options = ("schedule={kind: cosine, learning_rate: 0.01, warmup_epochs: 0.0}", "checkpoint.every_steps=4")
    train(tiny, *options, "train.epochs=1", "checkpoint.keep=9")
    shutil.rmtree("mlruns/runs/first/checkpoints/6")
    resumed = train(tiny, *options, "train.global_batch_size=64")
    # From step 4, so example 128, of the first epoch: one step of 64 is left, then an epoch of three.
    assert (resumed.steps, resumed.epochs, resumed.global_batch_size) == (4 + 1 + 3, 2, 64)
    with Checkpoints(Path(resumed.checkpoints)) as saved:
        arrays, state = saved.restore(8)
    assert (state.step, state.epoch, state.step_in_epoch, state.global_batch_size) == (8, 2, 0, 64)
    assert arrays["optimizer/0000"] == 6, "as many as two epochs of three steps: what the schedule goes by"
    assert resumed.history["train/learning_rate"][-1] < 0.01 / 3


@pytest.mark.parametrize(
    ("overrides", "num_replicas", "size"),
    [
        (["train.per_replica_batch_size=16"], 2, 32),
        (["train.per_replica_batch_size=16"], 4, 32),
        (["train.per_replica_batch_size=16"], 1, 32),
        (["train.global_batch_size=64"], 2, 64),
        (["train.per_replica_batch_size=16"], 3, None),
    ],
)
def test_on_other_devices_a_run_keeps_its_global_batch(project, overrides, num_replicas, size):
    section = config.load(None, overrides).train
    state = State(step=3, step_in_epoch=3, global_batch_size=32)
    if size is not None:
        assert resumed_batch_size(section, state, num_replicas) == size
        return
    with pytest.raises(UserError, match="32 examples per step, which 3 replicas cannot share evenly"):
        resumed_batch_size(section, state, num_replicas)


DIVERGING = ("optimizer={kind: sgd}", "schedule.learning_rate=1.0e+9", "checkpoint.every_steps=1", "train.epochs=3")


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_loss_that_is_no_number_stops_the_training(tiny, train, loop):
    with pytest.raises(
        NonFiniteLoss, match=r"train/loss is (nan|inf) at step \d+, in epoch 1\. Lower schedule"
    ) as error:
        train(tiny, *DIVERGING, f"train.loop={loop}")
    assert not list(Path("mlruns/runs/first/checkpoints").glob(str(error.value.step))), "nothing of it is saved"
    assert json.loads(Path("mlruns/runs/first/records/nonfinite.json").read_text())["steps"] == [error.value.step]


def test_a_training_that_stopped_goes_on_with_the_learning_rate_that_it_is_given(tiny, train):
    options = (*DIVERGING, "checkpoint.every_steps=null")
    with pytest.raises(NonFiniteLoss):
        train(tiny, *options)
    mended = train(tiny, *options, "schedule.learning_rate=0.01")
    assert mended.history["train/learning_rate"] == pytest.approx((0.01,) * 3), "nothing was rolled back"


def test_a_last_step_that_ruins_the_weights_is_seen(tiny, train):
    last = ("train.epochs=1", "train.steps_per_epoch=1", "input.validation=null", "checkpoint.monitor=train/loss")
    options = ("optimizer={kind: adamw, weight_decay: 1.0e+3}", "schedule.learning_rate=3.0e+38", *last)
    with pytest.raises(NonFiniteLoss, match=r"kernel is not a finite number at step 1, in epoch 1"):
        train(tiny, *options)
    result = train(tiny, *options, "train.on_nonfinite=rollback", "train.rollback_factor=1.0e-39", run_id="back")
    assert (result.steps, result.nonfinite_steps) == (1, (1,))
    assert Path("mlruns/runs/back/damaged_checkpoints/1").is_dir()


def test_a_training_rolls_back_to_finite_weights_with_a_lower_learning_rate(tiny, train, caplog):
    options = (*DIVERGING, "train.on_nonfinite=rollback", "checkpoint.every_steps=null")
    with caplog.at_level("WARNING"):
        result = train(tiny, *options, "train.rollback_factor=1.0e-10")
    assert len(result.nonfinite_steps) == 1
    assert np.isfinite(result.history["train/loss"]).all()
    assert result.history["train/learning_rate"] == pytest.approx((0.1,) * 3)
    assert (result.steps, result.epochs) == (18, 3)
    assert "Back to the last checkpoint, with 1e-10 times the learning rate, rollback 1 of 3" in caplog.text
    # A process that is killed after the rollback goes on with the lower rate.
    resumed = train(tiny, *options, "train.rollback_factor=1.0e-10", "train.epochs=4")
    assert resumed.history["train/learning_rate"] == pytest.approx((0.1,) * 4)


@pytest.mark.slow
def test_a_checkpoint_that_leads_to_the_same_end_is_left_for_one_before(tiny, train):
    options = (*DIVERGING, "train.on_nonfinite=rollback", "train.max_rollbacks=9", "train.rollback_factor=1.0e-12")
    result = train(tiny, *options, "train.epochs=1")
    assert np.isfinite(result.history["train/loss"]).all()
    first, *_ = result.nonfinite_steps
    aside = {int(path.name) for path in Path("mlruns/runs/first/damaged_checkpoints").iterdir()}
    assert aside == set(range(first - 1, first - len(result.nonfinite_steps), -1)), "one further back each time"


def test_a_training_that_diverges_too_often_stops(tiny, train):
    options = (*DIVERGING, "train.on_nonfinite=rollback", "train.max_rollbacks=2", "train.rollback_factor=0.9")
    with pytest.raises(NonFiniteLoss):
        train(tiny, *options)
    assert len(json.loads(Path("mlruns/runs/first/records/nonfinite.json").read_text())["steps"]) == 3


def test_a_run_without_a_checkpoint_begins_at_its_first_step(tiny, train):
    resumed = train(tiny, resume=True)
    assert len(resumed.history["train/loss"]) == resumed.epochs == 2


RECORDED = "a" * 32


def leave_record():
    """Leave the record of a run, as its start does."""
    settings = config.load("../small.yaml")
    lineage = records.Lineage(
        git_commit=None, git_dirty=None, code_digest="", settings_digest=settings.digest(), data_version=None
    )
    folder = f"mlruns/runs/{RECORDED}"
    run = records.Run(
        run_id=RECORDED, experiment="e", name="n", folder=folder, lineage=lineage, settings=settings.to_json()
    )
    records.save(run, Path(folder, "records", "run.json"))


def test_a_new_run_begins_with_the_weights_of_another(tiny, train, project):
    worse_at_last = "schedule={kind: piecewise, boundaries_epochs: [1], learning_rates: [0.01, 10.0]}"
    first, initial = train(tiny, worse_at_last, run_id=RECORDED), f"model.initial={RECORDED}"
    leave_record()
    still = ("schedule={kind: constant, learning_rate: 1.0e-30}", "train.epochs=1", "train.seed=9")
    second = train(tiny, initial, *still, run_id="second")
    assert second.weights_digest == first.best_weights_digest != first.weights_digest
    assert second.steps == first.steps / 2
    # A resume goes on from its own checkpoint.
    shutil.rmtree(f"mlruns/runs/{RECORDED}")
    train(tiny, initial, *still, "train.epochs=2", run_id="second", resume=True)


def test_initial_weights_of_another_model_are_refused_before_a_run_exists(tiny, train, project):
    train(tiny, run_id=RECORDED)
    leave_record()
    settings = config.load(None, ["model={name: mlp, options: {units: [7]}}", f"model.initial={RECORDED}"])
    with pytest.raises(
        UserError,
        match=r"model.initial = a+ belongs to a different model: .*kernel has the shape \(64, 16\) there and "
        r"\(64, 7\) here",
    ):
        initial.find_weights(settings, tiny)
    settings = config.load(None, [f"model.initial={RECORDED}", "input.normalization=standardize"])
    with pytest.raises(UserError, match=r"that run was trained with input\.normalization = scale, and this one has"):
        initial.find_weights(settings, tiny)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["input.augmentation.crop_padding=8"],
            "have 8 x 8 pixels, so a crop could miss them completely. Use less than 8",
        ),
        (["train.per_replica_batch_size=181"], "the global batch of 181 examples is larger than the training split"),
        (["input.validation=200"], "input.validation = 200: takes 200 of the 200 training examples"),
        (["input.validation=9999"], "input.validation = 9999"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing_behind(tiny, train, project, overrides, said):
    with pytest.raises(UserError, match=said) as error:
        train(tiny, *overrides)
    assert error.value.exit_code == 2
    assert {path.name for path in (project / "mlruns").rglob("*")} == {".gitkeep", "code.json"}, "as before"


def pretend(monkeypatch, **fields):
    """Give every training here a strategy with other fields."""
    one = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    monkeypatch.setattr(strategies, "build", lambda section: replace(one, **fields))


def test_the_model_that_is_trained_is_checked_too(tiny, train, monkeypatch):
    checked = []
    pretend(monkeypatch, check_model=checked.append)
    train(tiny, "train.epochs=1")
    assert [model.compiled for model in checked] == [False, True]
    assert [variable.path for variable in checked[0].variables] == [variable.path for variable in checked[1].variables]


def test_a_batch_that_two_replicas_cannot_share_is_refused(tiny, train, monkeypatch):
    pretend(monkeypatch, num_replicas=2, distributed=True)
    with pytest.raises(
        UserError, match=r"train.global_batch_size = 33 is not divisible by 2 replicas: 33 = 2 \* 16 \+ 1"
    ):
        train(tiny, "train.global_batch_size=33")
    # A network that takes the mean of what each replica has.
    means = ["model={name: resnet, options: {filters: 2}}", "input.validation=39", "train.global_batch_size=32"]
    with pytest.raises(UserError, match="161 training examples leave 1 for the last batch of 2 replicas"):
        check(config.load("../small.yaml", means), tiny)


@pytest.mark.parametrize("override", ["train.loss=huber", "train.metrics=[mae]", "register.metric=test/r2"])
def test_what_is_of_another_task_is_refused_before_a_run_exists(tiny, override):
    with pytest.raises(UserError, match="tiny is a classification"):
        tracked.start_run(config.load(None, [override]), prepared=tiny)
    assert not list(Path("mlruns").glob("runs/*"))


def test_a_run_of_a_comparison_registers_nothing_and_needs_no_gate(tiny, monkeypatch):
    monkeypatch.setattr(tracked, "end_crashed", lambda key, run_id: [])
    monkeypatch.setattr(tracked.lifecycle, "start_run", lambda *given: written_run)
    written_run = write_run(1, parent_run_id="0" * 32)
    settings = config.load(None, ["register.metric=test/r2"])
    assert tracked.start_run(settings, prepared=tiny, parent_run_id="0" * 32) is written_run


@pytest.mark.parametrize("override", ["register.metric=test/r2", "register.floors={absent: 0.5}"])
def test_a_gate_of_another_task_is_refused_before_a_run_is_resumed(tiny, override):
    settings = config.load(None, [override])
    unfinished = write_run(1, "FAILED")
    with pytest.raises(UserError, match=r"register\.metric = 'test/r2'|register\.floors"):
        tracked.resume_run(settings, prepared=tiny, run_id=unfinished.run_id, allow_changes=True)
    assert outcome.status(unfinished).status == "FAILED"
    assert not Path("mlruns/mlflow.db").exists(), "MLflow was not asked"


def test_weights_of_classes_are_refused_before_a_run_exists_where_there_are_none(tiny):
    numbers = tiny.model_copy(update={"target": records.Target(task="regression", num_outputs=1)})
    records.save(numbers, Path(tiny.folder) / "manifest.json")
    with pytest.raises(UserError, match=r"train\.class_weights = 'balanced': tiny is a regression"):
        check(config.load(None, ["train.class_weights=balanced", "register.metric=test/r2"]), numbers)


def test_a_model_is_checked_where_the_backend_has_no_cpu(tiny, monkeypatch):
    def missing(name):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(keras, "device", missing)
    check(config.load(None, {"strategy.device": "cpu"}), tiny)


def test_a_worker_with_other_settings_or_data_than_the_chiefs_is_refused(tiny, train, monkeypatch):
    """A worker that someone started elsewhere by another command."""
    settings = config.load("../small.yaml", ["train.epochs=1"])
    sent = []
    pretend(monkeypatch, num_replicas=2, num_workers=2, broadcast=sent.append)
    train(tiny, "train.epochs=1")
    assert len(sent) == 2
    received = []

    def receive(payload):
        assert payload == b"", "a worker has nothing to say"
        received.append(sent[len(received)])
        return received[-1]

    pretend(monkeypatch, num_replicas=2, num_workers=2, worker=1, broadcast=receive)
    assist(settings, tiny)
    assert received == sent
    version = "0" * 32
    sgd = config.load("../small.yaml", ["train.epochs=1", "optimizer.kind=sgd"])

    def told(one):
        return one.digest("result", "speed")

    def refused(with_settings=settings, data=tiny):
        received.clear()
        with pytest.raises(UserError) as error:
            assist(with_settings, data)
        assert error.value.exit_code == 2
        assert len(received) == 1, "before a model is made"
        message, end = str(error.value).split(": start every member of the cluster ")
        assert end == "with the same command, the same code and packages, and the same data"
        return message.removeprefix("worker 1 was started with ").split(", but the chief with ")

    assert refused(with_settings=sgd) == [f"settings {told(sgd)}", f"settings {told(settings)}"]
    assert refused(data=tiny.model_copy(update={"data_version": version})) == [f"data {version}", "data None"]
    here = lineage.code_of(settings)[:12]
    with monkeypatch.context() as other:
        other.setattr(lineage, "code_of", lambda settings: "0123456789abcdef")
        other.setattr(machine, "surroundings", lambda: {"tensorflow": "2.0.1", "cores": "1"})
        keras, jax, numpy, tensorflow = (version_of(name) for name in ("keras", "jax", "numpy", "tensorflow"))
        assert refused() == [
            "code 0123456789ab, tensorflow 2.0.1, keras not installed, jax not installed, numpy not installed",
            f"code {here}, tensorflow {tensorflow}, keras {keras}, jax {jax}, numpy {numpy}",
        ]


def test_a_damaged_array_is_refused_before_anything_else(tiny, train, project):
    path = project / tiny.splits["train"].features["image"]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        UserError,
        match=r"train_images.npy is damaged: its sha256 is .* stratagem data prepare --set dataset.name=tiny --force",
    ):
        train(tiny)
    assert {path.name for path in (project / "mlruns").rglob("*")} == {".gitkeep", "code.json"}, "as before"


def test_mixed_precision_keeps_weights_and_logits_in_full(tiny, train):
    result = train(tiny, "train.dtype_policy=mixed_bfloat16")
    model = keras.models.load_model(result.final_model)
    assert model.get_layer("mlp").get_layer("dense1").compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert model.output.dtype == "float32"
    assert np.isfinite(result.history["train/loss"]).all()
    assert result.history["train/loss"][1] < result.history["train/loss"][0]


@pytest.mark.exhaustive
def test_loss_scaling_trains_and_resumes(tiny, train):
    options = ("train.deterministic=true", "train.dtype_policy=mixed_float16", "train.loop=custom")
    whole = train(tiny, *options, "train.epochs=2", run_id="whole")
    train(tiny, *options, "train.epochs=1", run_id="shorter")
    resumed = train(tiny, *options, "train.epochs=2", run_id="shorter", resume=True)
    assert resumed.weights_digest == whole.weights_digest
    assert np.isfinite(whole.history["train/loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("train.loop=fit",),
        (
            "train.loop=custom",
            "train.steps_per_execution=6",
            "input.augmentation={flip: true, rotation: 0.1, contrast: 0.2, rand_augment: {}, erasing: 0.5}",
            "input.augmentation={mixup: 0.4, cutmix: 1.0}",
        ),
    ],
    ids=["fit", "custom"],
)
def test_what_xla_compiles_learns_the_same(tiny, train, options, monkeypatch):
    together = []
    of = steps.compiled_steps
    monkeypatch.setattr(steps, "compiled_steps", lambda *args: together.append(args) or of(*args))
    plain = train(tiny, *LAST_BATCH_SHORT, *options, run_id="plain")
    assert together == []
    compiled = train(tiny, *LAST_BATCH_SHORT, *options, "train.jit_compile=true", run_id="compiled")
    assert len(together) == 1
    for name, values in plain.history.items():
        assert compiled.history[name] == pytest.approx(values, rel=1e-4), name


MIXED = "input.augmentation={flip: true, crop_padding: 0, mixup: 0.4, cutmix: 1.0}"


@pytest.mark.exhaustive
def test_mixed_images_are_learned_as_a_plain_keras_script_does(tiny, train):
    options = [
        MIXED, "train.label_smoothing=0.1", "train.epochs=2", "optimizer.kind=sgd",
        "optimizer.momentum=0", "schedule.kind=constant", "schedule.learning_rate=0.01",
    ]  # fmt: skip
    results = [train(tiny, *options, f"train.loop={loop}", run_id=loop) for loop in ("fit", "custom")]
    settings = config.load("../small.yaml", options)
    keras.utils.set_random_seed(settings.train.seed)
    model = models.build(settings.model, tiny, settings.input.normalization)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    accuracy = keras.metrics.CategoricalAccuracy("accuracy")
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=[accuracy], jit_compile=False)
    batches = sources.training_batches(settings, tiny, results[0].global_batch_size)
    for epoch in range(2):
        batches.epoch = epoch
        right = []  # Of each batch: Keras's train_on_batch begins its metrics anew.
        for images, shares in batches.arrays():
            assert shares.shape == (len(images), 10)
            logs = model.train_on_batch(images, shares, return_dict=True)
            right.append(len(images) * float(logs["accuracy"]))
    for result in results:
        assert result.history["train/accuracy"][1] == pytest.approx(sum(right) / 180, abs=1e-6)
        trained = keras.models.load_model(result.final_model, compile=False)
        for own, other in zip(trained.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-4, atol=2e-6)

"""Optimizers, schedules, callbacks and augmentation of the user's own, in a file beside params.yaml."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from tasks import config
from tasks.input import sources
from tasks.input.augment import augment_batch
from tasks.modeling import own_code
from tasks.process.serve import unexpected
from tasks.runs import lineage
from tasks.system.errors import UserError
from tasks.train import check
from tasks.training.checkpoints import Checkpoints
from tests.tasks.written_runs import leave_checkpoints

PARTS = '''
import keras


class Sign(keras.optimizers.Optimizer):
    """Steps by the sign of a momentum, with a slot of its own."""

    def __init__(self, learning_rate=0.001, decay=0.9, name="sign", **options):
        super().__init__(learning_rate=learning_rate, name=name, **options)
        self.decay = decay

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slots = [self.add_variable_from_reference(one, name="slot") for one in variables]

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        self.assign(slot, self.decay * slot + (1 - self.decay) * gradient)
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * keras.ops.sign(slot))


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, first, steps_per_epoch):
        self.first, self.steps_per_epoch = first, steps_per_epoch

    def __call__(self, step):
        return self.first * 0.5 ** (keras.ops.cast(step, "float32") // self.steps_per_epoch)


class Ramp(Halving):
    def __init__(self, first, steps_per_epoch):
        super().__init__(first / (steps_per_epoch - 1), steps_per_epoch)


class Broken(Sign):
    def update_step(self, gradient, variable, learning_rate):
        raise ZeroDivisionError("no slot")


def text(**options):
    return "not an optimizer"


class Calls(keras.callbacks.Callback):
    """Writes down each call."""

    calls = []

    def _called(self, name, *args):
        *place, logs = args
        assert logs is None or all(type(value) is float for value in logs.values()), (name, logs)
        self.calls.append((name, *place, {key: round(value, 4) for key, value in (logs or {}).items()}))

    def on_train_begin(self, logs=None): self._called("on_train_begin", logs)
    def on_train_end(self, logs=None): self._called("on_train_end", logs)
    def on_epoch_begin(self, epoch, logs=None): self._called("on_epoch_begin", epoch, logs)
    def on_epoch_end(self, epoch, logs=None): self._called("on_epoch_end", epoch, logs)
    def on_train_batch_begin(self, batch, logs=None): self._called("on_train_batch_begin", batch, logs)
    def on_batch_end(self, batch, logs=None): self._called("on_train_batch_end", batch, logs)
    def on_test_begin(self, logs=None): self._called("on_test_begin", logs)
    def on_test_end(self, logs=None): self._called("on_test_end", logs)
    def on_test_batch_begin(self, batch, logs=None): self._called("on_test_batch_begin", batch, logs)
    def on_test_batch_end(self, batch, logs=None): self._called("on_test_batch_end", batch, logs)


class Slower(keras.callbacks.Callback):
    """Lowers the rate by what it has seen, and adds a number to those of an epoch."""

    def __init__(self, factor=0.5, stop_after=None, key="seen"):
        super().__init__()
        self.factor, self.stop_after, self.key, self.seen = factor, stop_after, key, 0.0

    def on_train_batch_end(self, batch, logs):
        self.seen += logs["loss"]

    def on_epoch_end(self, epoch, logs):
        if self.factor is not None:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * self.factor / (1 + self.seen)
        logs[self.key] = self.seen
        if epoch + 1 == self.stop_after:
            self.model.stop_training = True


class Remembering(Slower):
    def state(self):
        return {"seen": self.seen, "rate": float(self.model.optimizer.learning_rate)}

    def restore(self, state):
        self.seen = state["seen"]
        self.model.optimizer.learning_rate = state["rate"]


class Failing(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        raise KeyError("nowhere")


class Leaving(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise SystemExit(3)


class Measuring(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = "0.25"


class Reading(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["read"] = logs["mine"] * 2


class Wordy(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = "text"


class Unlike(keras.callbacks.Callback):
    def on_epoch_end(self, logs):
        pass


class Half(keras.callbacks.Callback):
    def state(self):
        return {}


class Early(keras.callbacks.Callback):
    def set_model(self, model):
        raise KeyError("too early")


def loss(labels, outputs):
    if outputs.shape[0] != 2:
        raise KeyError("no example")
    return keras.ops.mean(outputs, axis=-1)


def metric(labels, outputs):
    return loss(labels, outputs)


class Matrices(Sign):
    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) > 1:
            raise KeyError("no matrix")


class Late(Halving):
    def __call__(self, step):
        if not hasattr(keras.ops.cast(step, "float32"), "numpy"):
            raise KeyError("too late")
        return self.first


@keras.saving.register_keras_serializable()
class Untrained(keras.layers.Dense):
    def call(self, inputs, training=False):
        if training:
            raise KeyError("no training")
        return super().call(inputs)


def build(input_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), Untrained(num_classes)])


class Unkept(keras.callbacks.Callback):
    def state(self):
        return {"seen": {1}}

    def restore(self, state):
        pass
'''
STEPS = 5
OPTIMIZER = ("optimizer.kind=parts:Sign", "optimizer.options={decay: 0.8}")
SCHEDULE = ("schedule.kind=parts:Halving", "schedule.options={first: 0.01}")


@pytest.fixture
def parts(project, own_imports):
    (project / "parts.py").write_text(PARTS)
    yield project / "parts.py"
    sys.modules.pop("parts", None)


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_resume_with_an_own_optimizer_and_schedule_ends_with_the_same_bits(tiny, train, parts, loop):
    options = (*OPTIMIZER, *SCHEDULE, f"train.loop={loop}", "train.deterministic=true", "checkpoint.every_steps=3",
               "checkpoint.keep=9")  # fmt: skip
    whole = train(tiny, *options, run_id="whole")
    assert whole.optimizer == "Sign"
    assert whole.history["train/learning_rate"] == pytest.approx([0.01, 0.005])
    with Checkpoints(Path(whole.checkpoints), read_only=True) as saved:
        arrays, _ = saved.restore(3)
    # Count, and a slot for each of the four variables; the rate is the schedule's.
    assert sum(key.startswith("optimizer/") for key in arrays) == 5
    leave_checkpoints("whole", "cut", 3)
    again = train(tiny, *options, run_id="cut", resume=True)
    assert (again.weights_digest, again.history) == (whole.weights_digest, whole.history)


def test_an_own_schedule_is_tried_with_the_steps_of_an_epoch(tiny, parts):
    check(config.load(None, ["schedule.kind=parts:Ramp", "schedule.options={first: 0.01}"]), tiny)


def test_a_model_needs_no_own_optimizer_to_be_loaded(tiny, train, parts):
    result = train(tiny, *OPTIMIZER, *SCHEDULE, "train.epochs=1")
    del sys.modules["parts"]
    parts.unlink()
    assert keras.saving.load_model(result.final_model).count_params() == result.num_parameters


def test_a_rollback_and_the_linear_scaling_rule_reach_an_own_schedule(tiny, train, parts):
    result = train(tiny, *OPTIMIZER, *SCHEDULE, "train.scale_learning_rate_from=64", "train.epochs=1")
    assert result.history["train/learning_rate"] == pytest.approx([0.005])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.kind=parts:Gone"], "optimizer.kind = 'parts:Gone': parts has no function or class 'Gone'"),
        (["optimizer.kind=gone:Sign"], "optimizer.kind = 'gone:Sign': there is no module 'gone'"),
        (["optimizer.kind=parts:text"], "returns a str, but must return a Keras Optimizer"),
        (
            ["optimizer.kind=parts:Sign", "optimizer.options={dekay: 1}"],
            "with dekay, learning_rate .ValueError.*parts.py line",
        ),
        (["optimizer.kind=parts:Sign", "optimizer.options={learning_rate: 1}"], "Set schedule.learning_rate"),
        (
            ["optimizer.kind=parts:Broken"],
            "its first step fails .ZeroDivisionError: no slot, parts.py line",
        ),
        (["schedule.kind=parts:Halving"], "schedule.kind = 'parts:Halving' cannot be created without options"),
        (["schedule.kind=parts:Sign"], "returns a Sign, but must return a Keras LearningRateSchedule"),
        (["optimizer.kind=lion"], "Allowed: adam, adamw, module:name, rmsprop, sgd"),
    ],
)
def test_what_is_wrong_with_an_own_optimizer_is_said_before_the_training(tiny, parts, overrides, said):
    with pytest.raises(UserError, match=said):
        check(config.load(None, overrides), tiny)


MODELS = """
import keras

accuracy = keras.metrics.SparseCategoricalAccuracy()
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

class Plain(keras.layers.Dense):
    pass

@keras.saving.register_keras_serializable()
class Known(keras.layers.Dense):
    pass

def double(x):
    return 2 * x

def built(shape, num_classes, layer):
    return keras.Sequential([keras.Input(shape), keras.layers.Flatten(), layer, keras.layers.Dense(num_classes)])

def plain(input_shape, num_classes): return built(input_shape, num_classes, Plain(4))
def known(input_shape, num_classes): return built(input_shape, num_classes, Known(4))
def anonymous(input_shape, num_classes): return built(input_shape, num_classes, keras.layers.Lambda(lambda x: 2 * x))
def named(input_shape, num_classes): return built(input_shape, num_classes, keras.layers.Lambda(double))
"""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["model.name=parts:plain"],
            "model.name = 'parts:plain'.* Could not locate class 'Plain'.* register.enabled=f",
        ),
        (["model.name=parts:anonymous"], "model.name = 'parts:anonymous'.* is a Python lambda"),
        (["model.name=parts:named"], "model.name = 'parts:named'.* Could not locate function 'double'"),
        (["train.metrics=[parts:accuracy]"], "'parts:accuracy': returns the shape .. for 2 examples"),
        (["train.metrics=[keras.metrics:MeanSquaredError]"], "Error': is a class, but must be a function"),
        (["train.loss=parts:crossentropy"], "'parts:crossentropy': returns the shape .. for 2 examples"),
    ],
)
def test_what_only_a_registration_would_notice_is_said_before_the_training(tiny, parts, overrides, said):
    parts.write_text(MODELS)
    check(config.load(None, ["model.name=parts:known"]), tiny)
    check(config.load(None, ["model.name=parts:plain", "register.enabled=false"]), tiny)
    with pytest.raises(UserError, match=said):
        check(config.load(None, overrides), tiny)


def test_other_code_starts_without_options(project):
    first = config.load(None, [*OPTIMIZER, "optimizer.global_clipnorm=1.0"]).to_json()
    assert config.parse(first).optimizer.options == {"decay": 0.8}
    (project / "params.yaml").write_text(yaml.safe_dump(first))
    other = config.load(None, ["optimizer.kind=parts:Broken"]).optimizer
    assert (other.options, other.global_clipnorm) == ({}, 1.0)
    assert config.load(None, ["optimizer.kind=adam"]).optimizer.global_clipnorm == 1.0
    first["input"]["augmentation"] |= {"custom": "parts:rows", "options": {"share": 1}}
    (project / "params.yaml").write_text(yaml.safe_dump(first))
    assert config.load().input.augmentation.options == {"share": 1}
    assert config.load(None, ["input.augmentation.custom=parts:others"]).input.augmentation.options == {}


def test_own_parts_are_in_the_digest_of_the_code(project, parts):
    settings = config.load(None, [*OPTIMIZER, *SCHEDULE])
    assert own_code.named_in(settings) == {"parts:Sign": "optimizer.kind", "parts:Halving": "schedule.kind"}
    before = lineage.code_of(settings)
    parts.write_text(PARTS.replace("0.5 **", "0.4 **"))
    assert lineage.code_of(settings) != before


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_an_own_callback_gets_the_calls_of_keras(tiny, train, parts, loop):
    train(
        tiny, "train.callbacks=[parts:Calls]", f"train.loop={loop}", "train.deterministic=true", "train.metrics=[auc]"
    )
    calls = sys.modules["parts"].Calls.calls
    names = [(name, *place) for name, *place, _ in calls]
    batches = [(f"on_train_batch_{when}", step) for step in range(6) for when in ("begin", "end")]
    tests = ["on_test_begin", *((f"on_test_batch_{when}", 0) for when in ("begin", "end")), "on_test_end"]
    wanted = [("on_train_begin",)]
    for epoch in range(2):
        wanted += [("on_epoch_begin", epoch), *batches]
        wanted += [(one,) if isinstance(one, str) else one for one in tests] + [("on_epoch_end", epoch)]
    assert names == [*wanted, ("on_train_end",)]
    of_epoch = next(logs for name, *_, logs in calls if name == "on_epoch_end")
    assert of_epoch.keys() == {"loss", "accuracy", "auc", "val_loss", "val_accuracy", "val_auc", "learning_rate"}
    last = [logs for name, *_, logs in calls if name == "on_train_batch_end"][5]
    assert last == {name: of_epoch[name] for name in ("loss", "accuracy", "auc")}


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_callback_that_remembers_is_resumed_to_the_same_bits(tiny, train, parts, loop, caplog):
    callbacks = "[{parts:Remembering: {factor: 0.9}}, {parts:Remembering: {key: also}}]"
    options = (f"train.callbacks={callbacks}", f"train.loop={loop}",
               "train.deterministic=true", "train.epochs=3", "checkpoint.every_steps=1",
               "checkpoint.keep=99")  # fmt: skip
    whole = train(tiny, *options, run_id="whole")
    assert len(set(whole.history["train/learning_rate"])) == 3
    leave_checkpoints("whole", "cut", 8)
    again = train(tiny, *options, run_id="cut", resume=True)
    assert (again.weights_digest, again.history) == (whole.weights_digest, whole.history)
    assert "no state()" not in caplog.text


def test_a_callback_that_does_not_remember_is_named_when_a_run_begins_and_resumes(tiny, train, parts, caplog):
    options = ("train.callbacks=[parts:Slower]", "checkpoint.keep=9")
    sent = []
    with caplog.at_level("INFO"):
        train(tiny, *options, run_id="whole", send=lambda step, metrics: sent.append(metrics))
    assert "callbacks parts:Slower have no state() and restore(), so a resumed training may end with" in caplog.text
    assert sent[-1]["train/seen"] > sent[0]["train/seen"] > 0
    leave_checkpoints("whole", "cut", 6)
    train(tiny, *options, run_id="cut", resume=True)
    assert "so a resumed training may end with different" in caplog.text


def test_what_a_callback_adds_to_the_logs_is_a_number_for_the_next(tiny, train, parts):
    sent = []
    train(tiny, "train.callbacks=[parts:Measuring,parts:Reading]", send=lambda step, metrics: sent.append(metrics))
    assert {metrics["train/read"] for metrics in sent if "train/read" in metrics} == {0.5}


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_training_that_a_callback_stopped_is_not_carried_on(tiny, train, parts, loop):
    options = (f"train.loop={loop}", "train.epochs=4")
    callbacks = "train.callbacks=[{parts:Slower: {stop_after: 2}}]"
    ended = train(tiny, *options, callbacks)
    assert (ended.epochs, ended.stopped_early) == (2, True)
    assert train(tiny, *options, callbacks, resume=True).epochs == 2
    assert train(tiny, *options, "train.callbacks=[]", resume=True).epochs == 4


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ("parts:Failing", "parts:Failing.on_test_end fails at step 6 .KeyError: 'nowhere', parts.py line"),
        ("parts:Leaving", "parts:Leaving.on_epoch_end fails at step 6 .SystemExit: 3, parts.py line"),
        ("parts:Wordy", r"parts:Wordy.on_epoch_end sets logs\['mine'\] = 'text', which is not a number"),
        ("parts:Unkept", "parts:Unkept.state.. returns a state that JSON cannot store"),
        ("{parts:Slower: {key: accuracy}}", r"parts:Slower.on_epoch_end changes logs\['accuracy'\], a metric that"),
        ("parts:Slower, parts:Slower", r"parts:Slower 2.on_epoch_end changes logs\['seen'\], a metric that"),
    ],
)
def test_an_error_in_a_callback_names_it_and_its_method(tiny, train, parts, callbacks, said):
    with pytest.raises(UserError, match=f"^train.callbacks: {said}"):
        train(tiny, f"train.callbacks=[{callbacks}]")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.loss=parts:loss"], "train.loss = 'parts:loss': fails .KeyError: 'no example'"),
        (
            ["train.metrics=[parts:metric]", "train.loop=custom"],
            "train.metrics = 'parts:metric': fails .KeyError: 'no example'",
        ),
        (["optimizer.kind=parts:Matrices"], "optimizer.kind = 'parts:Matrices': fails .KeyError: 'no matrix'"),
        (["schedule.kind=parts:Late", SCHEDULE[1]], "schedule.kind = 'parts:Late': fails .KeyError: 'too late'"),
        (["train.callbacks=[parts:Early]"], "train.callbacks = 'parts:Early': fails .KeyError: 'too early'"),
        (
            ["model.name=parts:build", "model.options={}", "train.callbacks=[parts:Slower]"],
            "model.name = 'parts:build' or train.callbacks = 'parts:Slower': fails .KeyError: .*no training",
        ),
    ],
)
def test_an_error_of_own_code_in_a_training_names_its_key(tiny, train, parts, overrides, said):
    with pytest.raises(KeyError) as caught:
        train(tiny, *overrides)
    told = unexpected("train", caught.value, config.load(None, overrides))
    assert isinstance(told, UserError)
    assert re.match(rf"{said}.*, parts.py line \d+\)$", str(told))


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ("[parts:Gone]", "train.callbacks = 'parts:Gone': parts has no function or class 'Gone'"),
        ("[{parts:Slower: {fctor: 1}}]", "cannot be created with fctor .TypeError"),
        ("[parts:Sign]", "train.callbacks = 'parts:Sign' returns a Sign, but must return a Keras Callback"),
        (
            "[parts:Unlike]",
            "train.callbacks = 'parts:Unlike': a training calls on_epoch_end.epoch, logs., but its signature",
        ),
        ("[parts:Half]", "a training calls restore.state., but its signature"),
        ("[EarlyStopping]", "your own module:function"),
    ],
)
def test_what_is_wrong_with_a_callback_is_said_before_the_training(tiny, parts, callbacks, said):
    with pytest.raises(UserError, match=said):
        check(config.load(None, [f"train.callbacks={callbacks}"]), tiny)


def test_a_metric_that_occurs_twice_is_refused(project):
    with pytest.raises(UserError, match=r"train.metrics = \['auc', 'mae', 'auc'\] has auc twice"):
        config.load(None, ["train.metrics=[auc, mae, auc]"])


AUGMENTATION = """
import keras


def rows(images, numbers, share=0.5):
    \"\"\"Blackens rows from a drawn one on.\"\"\"
    height = images.shape[1]
    first = keras.ops.floor(numbers[:, :1] * height / share)
    kept = keras.ops.cast(keras.ops.arange(height), "float32")[None] < first
    return keras.ops.where(kept[:, :, None, None], images, keras.ops.zeros_like(images))


def floats(images, numbers):
    return keras.ops.cast(images, "float32")


def eager(images, numbers):
    return images if float(numbers[0, 0]) < 2 else images + 1
"""
CUSTOM = ("input.augmentation.custom=parts:rows", "input.augmentation.options={share: 0.8}")


def test_own_augmentation_is_drawn_for_each_place_of_a_pass(tiny, train, parts):
    parts.write_text(AUGMENTATION)
    options = (*CUSTOM, "train.deterministic=true", "input.augmentation.crop_padding=1", "checkpoint.every_steps=4",
               "checkpoint.keep=9")  # fmt: skip
    results = {loop: train(tiny, *options, f"train.loop={loop}", run_id=loop) for loop in ("fit", "custom")}
    assert results["fit"].history["train/loss"] == pytest.approx(results["custom"].history["train/loss"], rel=1e-5)
    plain = train(tiny, *options, "input.augmentation.custom=null", run_id="plain")
    assert plain.weights_digest != results["fit"].weights_digest
    leave_checkpoints("fit", "cut", 8)
    assert train(tiny, *options, run_id="cut", resume=True).weights_digest == results["fit"].weights_digest


@pytest.mark.parametrize("mixup", [0.0, 0.5])
def test_own_augmentation_has_the_same_bits_in_numpy_and_tensorflow(tiny, parts, mixup):
    parts.write_text(AUGMENTATION)
    settings = config.load(None, [*CUSTOM, "input.augmentation.erasing=0.5", f"input.augmentation.mixup={mixup}"])
    batches = sources.training_batches(settings, tiny, 32)
    everything, section = batches.source.mapped(), settings.input.augmentation
    for step, ours in enumerate(batches.arrays()):
        batch = tuple(tf.constant(array[batches.rows(step)]) for array in everything)
        theirs = augment_batch(batch, tf.constant(batches.draws(step)), section, batches.num_classes)
        for one, same in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, same)
    examples = sources.augmented_examples(settings, tiny)
    assert examples.shape == (4, 8, 8, 8, 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["input.augmentation.custom=parts:gone"], "parts has no function or class 'gone'"),
        (
            ["input.augmentation.custom=parts:floats"],
            "returns float32 .2, 8, 8, 1. for images uint8 .2, 8, 8, 1.,",
        ),
        (
            ["input.augmentation.custom=parts:rows", "input.augmentation.options={a: 1}"],
            "rows': fails .TypeError",
        ),
        (["input.augmentation.custom=rows"], "your own module:function"),
    ],
)
def test_what_is_wrong_with_own_augmentation_is_said_before_the_training(tiny, parts, overrides, said):
    parts.write_text(AUGMENTATION)
    with pytest.raises(UserError, match=said):
        check(config.load(None, overrides), tiny)


def test_own_augmentation_that_cannot_be_traced_is_named(tiny, train, parts):
    parts.write_text(AUGMENTATION)
    with pytest.raises(UserError, match=r"^input.augmentation.custom = 'parts:eager': fails .*parts.py line 18"):
        train(tiny, "input.augmentation.custom=parts:eager")

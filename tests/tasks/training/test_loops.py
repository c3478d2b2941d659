import keras
import numpy as np
import pytest

from tasks import config, strategies
from tasks.input import sources
from tasks.training import Training, loops
from tasks.training.checkpoints import State
from tasks.training.position import Position

ORIGIN = {"global_batch_size": 8, "seed": 0, "settings_digest": "d", "data_version": None, "history": {}}
START = State(step=0, epoch=0, step_in_epoch=0, **ORIGIN)
LOOPS = {"fit": loops.fit, "custom": loops.custom}


def inside(epoch, step_in_epoch, steps=5):
    """The state of a checkpoint inside an epoch of ``steps`` steps."""
    return State(step=epoch * steps + step_in_epoch, epoch=epoch, step_in_epoch=step_in_epoch, **ORIGIN)


class Recorder(keras.callbacks.Callback):
    """Writes down what a callback sees."""

    def __init__(self, training):
        super().__init__()
        self.training = training
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append("train")

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch", epoch, self.training.epoch, self.training.start_step))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(f"test {batch}")

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("end", epoch, *sorted(logs)))


class Subclassed(keras.Model):
    """A model without a graph of layers, as users write it."""

    def __init__(self, dropout):
        super().__init__()
        self.scale = keras.layers.Rescaling(1 / 255)
        self.flatten = keras.layers.Flatten()
        self.dropout = keras.layers.Dropout(dropout, seed=3)
        self.logits = keras.layers.Dense(10)

    def call(self, images, training=False):
        return self.logits(self.dropout(self.flatten(self.scale(images)), training=training))


def small_model(dropout=0.0, subclassed=False, **options):
    keras.utils.set_random_seed(0)
    model = Subclassed(dropout)
    if not subclassed:
        images = keras.Input((8, 8, 1), dtype="uint8")
        layers = model.logits, model.dropout, model.flatten, model.scale
        x = images
        for layer in layers[::-1]:
            x = layer(x)
        model = keras.Model(images, x)
    model(np.zeros((1, 8, 8, 1), "uint8"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False, **options)
    model.optimizer.build(model.trainable_variables)
    return model, loss


def pipeline(tiny, validate, **options):
    # 33 examples in batches of 8: five steps; two batches to validate on.
    settings = config.load(
        None,
        {"input.validation": 167, "train.per_replica_batch_size": 8, "input.augmentation.crop_padding": 0, **options},
    )
    training = sources.training_batches(settings, tiny, 8)
    return training, sources.ordered_batches(settings, tiny, "validation", 100) if validate else None


def train(loop, model_and_loss, training, validation, start, epochs, callbacks, steps_per_execution=1):
    """Train to the end of epoch ``epochs``; the callbacks come after Position."""
    position = Position(training, start)
    strategy = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    options = {"train.epochs": epochs, "train.steps_per_execution": steps_per_execution, "train.loop": loop}
    settings = config.load(None, options)
    told = (position, *callbacks)
    LOOPS[loop](Training(settings, strategy, *model_and_loss, training, validation, position, told))
    return position


EXPECTED = [
    (START, 1, ["train", ("epoch", 0, 0, 0), 0, 1, 2, 3, 4, 0, ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
    (START, 4, ["train", ("epoch", 0, 0, 0), 3, 7, 0, ("epoch", 1, 1, 0), 3, 7, 0]),
    (inside(0, 3), 1, ["train", ("epoch", 0, 0, 3), 0, 1, 0, "train", ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
    (inside(1, 4), 1, ["train", ("epoch", 1, 1, 4), 0, 0]),
    (inside(1, 0), 1, ["train", ("epoch", 1, 1, 0), 0, 1, 2, 3, 4, 0]),
    (inside(2, 0), 1, []),
]


@pytest.mark.in_ci(1, 5, 7, 11)
@pytest.mark.parametrize(("start", "steps_per_execution", "expected"), EXPECTED)
@pytest.mark.parametrize("validate", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_does_each_step_that_is_left_once(tiny, loop, start, steps_per_execution, expected, validate):
    training, validation = pipeline(tiny, validate)
    model = small_model(steps_per_execution=steps_per_execution)
    recorder = Recorder(training)
    position = train(loop, model, training, validation, start, 2, [recorder], steps_per_execution)

    names = ("accuracy", "learning_rate", "loss") + ("val_accuracy", "val_loss") * validate
    number = start.epoch
    wanted = []
    for i, item in enumerate(expected):
        # A 0 after the last step of an epoch stands for its end.
        if item == 0 and not (isinstance(expected[i - 1], tuple)):
            last = 3 if steps_per_execution == 4 else 0
            wanted += ([f"test {last}"] if last else ["test 0", "test 1"]) * validate + [("end", number, *names)]
            number += 1
        else:
            wanted.append(item)
    told = {7: 4, "test 3": "test 1"} if steps_per_execution == 4 else {}
    wanted = [told.get(item, item) for item in wanted]
    if loop == "custom":  # In `fit` the rest of an epoch that was left inside is a `fit` of its own.
        wanted = ["train", *(item for item in wanted if item != "train")]
    assert recorder.seen == wanted
    assert (position.epoch, position.step_in_epoch) == (2, 0)
    assert model[0].optimizer.iterations == 10 - start.step
    assert len(position.history.get("train/loss", [])) == 2 - start.epoch


class Calls(keras.callbacks.Callback):
    """Writes down every call of Keras with what it is given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def write(*args, logs=None, **more):
            *numbers, logs = args if args and isinstance(args[-1], dict | None) else (*args, logs)
            # To read the tensors of a batch would wait for it.
            assert "batch" in name or all(isinstance(value, float) for value in (logs or {}).values())
            logs = {key: float(value) for key, value in (logs or {}).items()}
            self.calls.append((name, *numbers, *more.values(), logs))

        return write


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    ("steps_per_execution", "options", "subclassed"),
    [
        (1, {}, False),
        (8, {}, True),
        pytest.param(2, {}, False, marks=pytest.mark.exhaustive),
        (1, {"train.steps_per_epoch": 7}, True),
        pytest.param(3, {"train.steps_per_epoch": 7}, False, marks=pytest.mark.exhaustive),
    ],
)
def test_both_loops_tell_the_callbacks_what_keras_alone_tells_them(tiny, steps_per_execution, options, subclassed):
    found = {}
    for loop in (*LOOPS, "keras"):
        training, validation = pipeline(tiny, True, **options)
        model = small_model(0.5, subclassed, steps_per_execution=steps_per_execution)
        calls = Calls()
        if loop == "keras":
            data, held_out = (loops.Epochs(one.steps, one.dataset, None) for one in (training, validation))
            told = [Position(training, START), calls]
            model[0].fit(data, epochs=3, validation_data=held_out, callbacks=told, shuffle=False, verbose=0)
        else:
            train(loop, model, training, validation, START, 3, [calls], steps_per_execution)
        found[loop] = calls.calls, [weight.numpy() for weight in model[0].weights], model[0].history.history
        assert calls.params == {"epochs": 3, "steps": training.steps, "verbose": 0}
        last = {"on_train_batch_end": training.steps - 1, "on_test_batch_end": validation.steps - 1}
        for i, (name, *numbers, logs) in enumerate(calls.calls):
            if name in last:
                # Keras' last call of an epoch tells of steps that it did not do.
                calls.calls[i] = (name, min(numbers[0], last[name]), logs)
    kept, weights, history = found.pop("keras")
    for again, same_weights, same_history in found.values():
        assert [call[:-1] for call in again] == [call[:-1] for call in kept]
        for (*what, logs), (*_, same) in zip(kept, again, strict=True):
            assert same == pytest.approx(logs, rel=1e-5), what
        for weight, same in zip(weights, same_weights, strict=True):
            np.testing.assert_allclose(same, weight, rtol=1e-5, atol=1e-7)
        assert same_history.keys() == history.keys()
        for name, values in same_history.items():
            assert history[name] == pytest.approx(values, rel=1e-5), name

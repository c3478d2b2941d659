import keras
import numpy as np
import pytest
import tensorflow as tf

from tasks import config, strategies
from tasks.input import sources
from tasks.training import Training, loops
from tasks.training.checkpoints import State
from tasks.training.position import Position

START = State(global_batch_size=8)
LOOPS = {"fit": loops.fit, "custom": loops.custom}


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


def keras_epochs(batches):
    """What Keras' own loop reads, with the same batches."""
    spec = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in next(batches.arrays()))
    return loops.Epochs(batches, tf.data.Dataset.from_generator(batches.arrays, output_signature=spec), None)


@pytest.mark.parametrize(
    ("steps_per_execution", "options", "subclassed"),
    [
        (8, {}, True),
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
            data, held_out = keras_epochs(training), keras_epochs(validation)
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

"""Each rule of loss scaling, on one device and on two replicas, against a computation by hand in numpy."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tasks import config, strategies
from tasks.input.batches import Batches
from tasks.modeling.losses import SoftmaxSquaredError
from tasks.training import Training, steps
from tasks.training.autotune import Calls
from tasks.training.checkpoints import State
from tasks.training.position import Position

START = State(global_batch_size=6)
LEARNING_RATE = 0.5
FEATURES, CLASSES = 4, 3

# Global batches of six. What is left for the last one is cut into pieces of (3, 3), (2, 3), (0, 1) for two replicas.
# Strengths are sixteenths, because Keras keeps a regularizer's as float32.
CASES = {
    "even": {"examples": 12},
    "a short last batch": {"examples": 11},
    "a replica without examples": {"examples": 13},
    "only a replica without examples": {"examples": 1},
    "sample weights": {"examples": 11, "weights": True},
    "sample weights and a replica without examples": {"examples": 13, "weights": True},
    "regularisation": {"examples": 11, "regularization": 0.0625},
    "regularisation and a replica without examples": {"examples": 13, "regularization": 0.0625},
    "labels of two dimensions": {"examples": 11, "positions": 2},
    "everything": {"examples": 13, "positions": 3, "weights": True, "regularization": 0.0625},
    "clipping": {"examples": 11, "clip": 0.1},
    "clipping of some steps": {"examples": 13, "clip": 0.6, "weights": True},
    "squared error": {"examples": 13, "loss": "mean_squared_error"},
    "several steps a call": {"examples": 25, "steps_per_execution": 3, "weights": True},
}


def global_batches(case):
    """(x, y, sample weights or None) of each step; x is float64 (n, FEATURES) or (n, positions, FEATURES)."""
    generator = np.random.default_rng(1)
    inner = (case["positions"],) if "positions" in case else ()
    x = generator.normal(size=(case["examples"], *inner, FEATURES))
    y = generator.integers(0, CLASSES, (case["examples"], *inner))
    weights = generator.uniform(0, 3, case["examples"]) if "weights" in case else None
    for first in range(0, case["examples"], 6):
        part = slice(first, first + 6)
        yield x[part], y[part], None if weights is None else weights[part]


def initial_weights():
    generator = np.random.default_rng(2)
    return generator.normal(size=(FEATURES, CLASSES)), generator.normal(size=CLASSES)


def forward(case, kernel, bias, x, y, weights):
    """The step's loss, its gradients, and how many labels of how many are right."""
    logits = x @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(CLASSES)[y]
    if case.get("loss") == "mean_squared_error":
        values, error = ((shares - one_hot) ** 2).mean(-1), shares - one_hot
        slopes = 2 / CLASSES * shares * (error - (error * shares).sum(-1, keepdims=True))
    else:
        values, slopes = -np.log((shares * one_hot).sum(-1)), shares - one_hot
    size, positions = len(y), y.size // len(y)
    weights = np.ones(size) if weights is None else weights
    strength = case.get("regularization", 0.0)
    loss = (values.reshape(size, -1).mean(1) * weights).sum() / size + strength * (kernel**2).sum()
    slopes = slopes.reshape(size, positions, CLASSES) * weights[:, None, None] / (size * positions)
    slopes = slopes.reshape(-1, CLASSES)
    gradients = [x.reshape(-1, FEATURES).T @ slopes + 2 * strength * kernel, slopes.sum(0)]
    return loss, gradients, (logits.argmax(-1) == y).sum(), y.size


def by_hand(case):
    """What ``measured`` returns."""
    kernel, bias = initial_weights()
    loss_sum = examples = right = labels = 0
    losses, norms = [], []
    for x, y, weights in global_batches(case):
        loss, gradients, step_right, step_labels = forward(case, kernel, bias, x, y, weights)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        norms.append(norm)
        factor = min(1, case.get("clip", np.inf) / norm)
        kernel, bias = kernel - LEARNING_RATE * factor * gradients[0], bias - LEARNING_RATE * factor * gradients[1]
        loss_sum, examples = loss_sum + loss * len(y), examples + len(y)
        right, labels = right + step_right, labels + step_labels
        losses.append(loss_sum / examples)
    if "clip" in case:
        assert max(norms) > case["clip"], "it would clip nothing"
    held_out_sum = held_out_right = 0
    for batch in global_batches(case):
        loss, _, step_right, _ = forward(case, kernel, bias, *batch)
        held_out_sum, held_out_right = held_out_sum + loss * len(batch[1]), held_out_right + step_right
    every = case.get("steps_per_execution", 1)
    return {
        "losses": losses[every - 1 : -1 : every] + losses[-1:],
        "accuracy": right / labels,
        "kernel": kernel.tolist(),
        "bias": bias.tolist(),
        "held out": [held_out_sum / examples, held_out_right / labels],
    }


def dataset(case, num_replicas):
    """The global batches as ``Batches`` hands them over: an element a replica, as even as can be."""
    import tensorflow as tf

    def pieces():
        for batch in global_batches(case):
            size = len(batch[1])
            for replica in range(num_replicas):
                part = slice(size * replica // num_replicas, size * (replica + 1) // num_replicas)
                yield tuple(array[part] for array in batch if array is not None)

    inner = [case["positions"]] if "positions" in case else []
    signature = (tf.TensorSpec([None, *inner, FEATURES], "float64"), tf.TensorSpec([None, *inner], "int64"))
    if "weights" in case:
        signature += (tf.TensorSpec([None], "float64"),)
    return tf.data.Dataset.from_generator(pieces, output_signature=signature)


def model_of(case, strategy):
    with strategy.scope():
        images = keras.Input((*([case["positions"]] if "positions" in case else []), FEATURES))
        regularizer = keras.regularizers.L2(case["regularization"]) if "regularization" in case else None
        model = keras.Model(images, keras.layers.Dense(CLASSES, kernel_regularizer=regularizer)(images))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if case.get("loss") == "mean_squared_error":
            loss = SoftmaxSquaredError()
        optimizer = keras.optimizers.SGD(LEARNING_RATE, global_clipnorm=case.get("clip"))
        model.compile(optimizer, loss, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")], jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        labels = keras.ops.zeros([1, *images.shape[1:-1]], "int64")
        model.compute_metrics(None, labels, keras.ops.zeros([*labels.shape, CLASSES]))
        model.reset_metrics()
    model.set_weights(initial_weights())
    return model, loss


def measured(case, strategy, **options):
    """Train one epoch: the loss so far after each call, accuracy and weights at the end, then the test function's."""
    every = case.get("steps_per_execution", 1)
    settings = config.load(None, {"train.steps_per_execution": every, "train.loop": "custom", **options})
    batches = Batches(case["examples"], 6, drop_remainder=False)
    model, loss = model_of(case, strategy)
    position = Position(batches, START)
    training = Training(settings, strategy, model, loss, batches, batches, position)
    calls = Calls(training)
    train = steps.train_function(training, calls)
    data = strategy.distribute(dataset(case, strategy.num_replicas))
    losses = []
    for one in calls.over(batches, data):
        logs = train(one)
        losses.append(float(logs["loss"]))
    found = {
        "losses": losses,
        "accuracy": float(logs["accuracy"]),
        "kernel": model.get_weights()[0].tolist(),
        "bias": model.get_weights()[1].tolist(),
    }
    model.reset_metrics()
    test = steps.test_function(training, batches, calls)
    for one in calls.over(batches, data):
        logs = test(one)
    return found | {"held out": [float(logs["loss"]), float(logs["accuracy"])]}


def overflow(strategy):
    """mixed_float16: a step in which one replica's gradient is not finite, then one that is clipped."""
    import tensorflow as tf

    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        images = keras.Input((2,))
        model = keras.Model(images, keras.layers.Dense(3, dtype="float32")(keras.layers.Dense(4)(images)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=0.0625), loss)
        model.optimizer.build(model.trainable_variables)
    small = np.full((2, 2), 0.5, "float32")
    # Only the second replica's examples overflow, in the product of the loss' scale and what they are.
    large = np.array([[6e4, 6e4]] * 2, "float32")
    data = tf.data.Dataset.from_generator(
        lambda: iter([(small, [0, 1]), (large, [0, 2]), (small, [0, 1]), (small, [1, 2])]),
        output_signature=(tf.TensorSpec([2, 2]), tf.TensorSpec([2], "int64")),
    )
    iterator = iter(strategy.distribute(data))
    step = tf.function(steps.train_step(model, loss, strategy))
    scale = [float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))]
    weights = [[weight.tolist() for weight in model.get_weights()]]
    for _ in range(2):
        strategy.run(step, (next(iterator), tf.constant(4, tf.int64)))
        scale.append(float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)))
        weights.append([weight.tolist() for weight in model.get_weights()])
    copies = [[part.numpy().tolist() for part in variable.value.values] for variable in model.trainable_variables]
    return {"scale": scale, "weights": weights, "copies": copies}


def main(names):
    """Run in a process of its own: TensorFlow's devices cannot change after their first use."""
    strategy = strategies.build(config.Mirrored(kind="mirrored", devices=2))
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    found = {name: measured(CASES[name], strategy) for name in names}
    keras.config.set_floatx("float32")
    print(json.dumps(found | {"overflow": overflow(strategy)}))


@pytest.fixture(scope="module")
def two_replicas(request):
    """The results of the cases that the tests of this run ask for."""
    test = test_two_replicas_do_what_the_rules_say.__name__
    items = [item for item in request.session.items if item.path == request.path and item.originalname == test]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_steps; test_steps.main(sys.argv[2:])"
    names = [item.callspec.params["name"] for item in items]
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def float64():
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.in_ci(2, 6, 9, 13, 14)
@pytest.mark.parametrize(
    ("name", "jit_compile"), [*((name, False) for name in CASES), ("everything", True), ("clipping", True)]
)
def test_one_device_does_what_the_rules_say(float64, name, jit_compile):
    strategy = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    found = measured(CASES[name], strategy, **{"train.jit_compile": jit_compile})
    assert_equal(found, by_hand(CASES[name]))


@pytest.mark.in_ci(2, 9)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_replicas_do_what_the_rules_say(two_replicas, name):
    assert_equal(two_replicas[name], by_hand(CASES[name]))


@pytest.mark.slow
def test_replicas_agree_about_a_gradient_that_is_not_finite(two_replicas):
    found = two_replicas["overflow"]
    before, skipped, after = ([np.array(weight) for weight in weights] for weights in found["weights"])
    for old, new in zip(before, skipped, strict=True):
        np.testing.assert_array_equal(old, new)
    assert found["scale"][1] == found["scale"][0] / 2
    change = np.sqrt(sum(((new - old) ** 2).sum() for old, new in zip(skipped, after, strict=True)))
    # The sum of the replicas' gradients, clipped once: clipping each would let through up to twice as much.
    assert change == pytest.approx(0.0625, rel=1e-4)
    for copies in found["copies"]:
        np.testing.assert_array_equal(*copies)

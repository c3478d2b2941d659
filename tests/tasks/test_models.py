import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tasks import config
from tasks.modeling import models
from tasks.records import Feature, Target, as_input
from tasks.system.errors import UserError
from tests.tasks.written_runs import PREPARED


@pytest.fixture
def policy():
    """Sets Keras' dtype policy for one test."""
    yield models.set_precision
    models.set_precision("float32")


def prepared(shape=(28, 28, 1), num_classes=10, mean=(0.0,), std=(1.0,)):
    """The manifest of a prepared dataset, of which a model reads shape, classes and statistics."""
    image = Feature(kind="image", shape=shape, dtype="uint8", mean=mean, deviation=std)
    classes = Target.of_classes([str(i) for i in range(num_classes)])
    return PREPARED.model_copy(update={"features": {"image": image}, "target": classes})


# What a table has, as `prepare` leaves it.
FEATURES = {
    "number": Feature(kind="number", shape=(3,), dtype="float32", mean=(5.0, 0.0, -1.0), deviation=(2.0, 0.0, 1.0)),
    "category": Feature(kind="category", shape=(2,), dtype="int32", vocabulary_sizes=(4, 7)),
    "text": Feature(kind="text", shape=(9,), dtype="int32", vocabulary_sizes=(50,)),
    "image": Feature(kind="image", shape=(32, 32, 1), dtype="uint8", mean=(0.0,), deviation=(1.0,)),
}
TAKES = {
    "text_cnn": ["text"], "transformer": ["text"], "wide_deep": ["number", "category"],
    "mixed": ["number", "category", "text", "image"],
}  # fmt: skip
"""The features of the models that do not take an image alone."""
REGRESSION = Target(task="regression", num_outputs=1, mean=(100.0,), deviation=(20.0,))


# VGG16 has few layers: it is built soonest.
OPTIONS = {"keras_applications": {"architecture": "VGG16"}}


def build_of(name, features, target=None, **options):
    """Build a model of these features."""
    options = OPTIONS.get(name, {}) | options
    data = prepared().model_copy(update={"features": {one: FEATURES[one] for one in features}})
    data = data.model_copy(update={"target": target}) if target else data
    normalization = "none" if name == "keras_applications" else "scale"
    return models.build(
        config.Model(name=name, options=options, initial=None, new_head=False, freeze=[]), data, normalization
    )


def examples_of(features, count=5):
    """Examples of features as a batch has them."""
    generator = np.random.default_rng(0)
    made = {}
    for name in features:
        feature = FEATURES[name]
        if feature.kind == "number":
            made[name] = generator.normal(0, 3, (count, *feature.shape)).astype("float32")
        else:
            most = 256 if feature.kind == "image" else min(feature.vocabulary_sizes)
            made[name] = generator.integers(0, most, (count, *feature.shape)).astype(feature.dtype)
    return as_input(made)


def build(name, shape=(28, 28, 1), num_classes=10, normalization="scale", **options):
    return models.build(
        config.Model(name=name, options=options, initial=None, new_head=False, freeze=[]),
        prepared(shape, num_classes),
        normalization,
    )


def dense(inputs, outputs):
    return inputs * outputs + outputs


def conv(size, inputs, outputs):
    return size * size * inputs * outputs + outputs


def conv_norm(size, inputs, outputs):
    """A convolution without bias, and batch normalisation: scale, offset, moving mean, moving variance."""
    return size * size * inputs * outputs + 4 * outputs


# Counted by hand from each model's description; a valid 3x3 convolution takes 2 pixels off, a pooling halves.
PARAMETERS = [
    ("mlp", (28, 28, 1), 10, {}, dense(784, 256) + dense(256, 256) + dense(256, 10)),
    ("mlp", (8, 8, 1), 10, {}, dense(64, 256) + dense(256, 256) + dense(256, 10)),
    ("mlp", (4, 4, 3), 5, {"units": [7]}, dense(48, 7) + dense(7, 5)),
    ("mlp", (4, 4, 3), 5, {"units": []}, dense(48, 5)),
    ("convnet", (28, 28, 1), 10, {}, conv(3, 1, 32) + dense(13 * 13 * 32, 64) + dense(64, 10)),
    ("convnet", (32, 32, 3), 100, {}, conv(3, 3, 32) + dense(15 * 15 * 32, 64) + dense(64, 100)),
    ("convnet2", (28, 28, 1), 10, {}, conv(3, 1, 32) + conv(3, 32, 64) + dense(5 * 5 * 64, 64) + dense(64, 10)),
    ("convnet2", (10, 10, 1), 10, {}, conv(3, 1, 32) + conv(3, 32, 64) + dense(1 * 1 * 64, 64) + dense(64, 10)),
    (
        "convnet2", (8, 8, 1), 10, {"padding": "same"},
        conv(3, 1, 32) + conv(3, 32, 64) + dense(2 * 2 * 64, 64) + dense(64, 10),
    ),
    ("dense200", (28, 28, 1), 10, {}, 784 * 200 + dense(200, 10)),
    (
        "vgg", (28, 28, 1), 10, {},
        conv_norm(3, 1, 24) + conv_norm(3, 24, 24) + conv_norm(3, 24, 40) + conv_norm(3, 40, 40)
        + conv_norm(3, 40, 56) + conv_norm(3, 56, 56) + dense(56, 10),
    ),
    ("lenet", (28, 28, 1), 10, {}, conv(3, 1, 16) + conv(3, 16, 32) + dense(5 * 5 * 32, 128) + dense(128, 10)),
    ("lenet", (32, 32, 3), 5, {"filters": [4], "units": 7}, conv(3, 3, 4) + dense(15 * 15 * 4, 7) + dense(7, 5)),
    (
        "resnet", (32, 32, 3), 10, {},
        conv_norm(3, 3, 16) + 2 * conv_norm(3, 16, 16)
        + conv_norm(1, 16, 32) + conv_norm(3, 16, 32) + conv_norm(3, 32, 32)
        + conv_norm(1, 32, 64) + conv_norm(3, 32, 64) + conv_norm(3, 64, 64)
        + dense(64, 10),
    ),
    (
        "resnet", (28, 28, 1), 10, {"blocks_per_stage": 2, "filters": 4},
        conv_norm(3, 1, 4) + 4 * conv_norm(3, 4, 4)
        + conv_norm(1, 4, 8) + conv_norm(3, 4, 8) + 3 * conv_norm(3, 8, 8)
        + conv_norm(1, 8, 16) + conv_norm(3, 8, 16) + 3 * conv_norm(3, 16, 16)
        + dense(16, 10),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "num_classes", "options", "expected"), PARAMETERS)
def test_shape_and_number_of_parameters(name, shape, num_classes, options, expected):
    model = build(name, shape, num_classes, **options)
    assert model.count_params() == expected
    assert model.output_shape == (None, num_classes)
    assert model.input_shape == (None, *shape)
    pixels = np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8)
    logits = keras.ops.convert_to_numpy(model(pixels))
    assert logits.shape == (3, num_classes)
    assert np.isfinite(logits).all()
    assert not np.allclose(logits.sum(axis=1), 1), "logits, not probabilities"


@pytest.mark.parametrize(
    ("blocks", "expected"),
    # As PyTorch's models of the paper have them: torchvision.models.resnet18 and resnet34.
    [(2, 11_689_512), ([3, 4, 6, 3], 21_797_672)],
)
def test_a_resnet_of_large_images_is_the_papers(blocks, expected):
    model = build("resnet", (224, 224, 3), 1000, blocks_per_stage=blocks, filters=64)
    assert sum(math.prod(variable.shape) for variable in model.trainable_variables) == expected
    (last,) = (layer for layer in model.get_layer("resnet").layers if layer.name == "stage4_block2_relu")
    assert last.output.shape == (None, 7, 7, 512)


def layers_of(model):
    for layer in model.layers:
        yield layer.name
        if hasattr(layer, "layers"):
            yield from layers_of(layer)


@pytest.mark.in_ci(0, 7, 9, 12)
@pytest.mark.parametrize("name", [*config.names_of("modeling/models"), "own_models:dropping"])
def test_two_builds_have_the_same_variables_under_the_same_names(own_models, name):
    first, second = (build_of(name, TAKES.get(name, ["image"]), dropout=0.5) for _ in range(2))
    assert [v.shape for v in first.variables] == [v.shape for v in second.variables]
    assert [v.path for v in first.variables] == [v.path for v in second.variables]
    assert list(layers_of(first)) == list(layers_of(second)), "an automatic name counts on from build to build"
    assert len({v.path for v in first.weights}) == len(first.weights)


@pytest.mark.in_ci(0, 1, 18, 21, 27, 33)
@pytest.mark.parametrize(
    ("precision", "logits", "others"),
    [
        ("mixed_bfloat16", "float32", {"bfloat16", "float32"}),
        ("mixed_float16", "float32", {"float16", "float32"}),
        ("float64", "float64", {"float64"}),
    ],
)
@pytest.mark.parametrize("name", config.names_of("modeling/models"))
def test_logits_are_never_of_half_precision(name, policy, precision, logits, others):
    policy(precision)
    features = TAKES.get(name, ["image"])
    model = build_of(name, features)
    core = model.layers[-1]
    assert core.layers[-1].compute_dtype == logits
    assert {layer.compute_dtype for layer in core.layers} == others
    assert {weight.dtype for weight in model.weights} == {logits}
    assert keras.backend.standardize_dtype(model(examples_of(features)).dtype) == logits


@pytest.mark.parametrize(
    ("normalization", "expected"), [("scale", lambda x: x / 255), ("standardize", lambda x: (x - 99.9) / 33.3)]
)
def test_float64_is_float64_from_the_pixels_to_the_logits(policy, tmp_path, normalization, expected):
    policy("float64")
    model = models.build(
        config.Model(name="dense200", options={}, initial=None, new_head=False, freeze=[]),
        prepared((4, 4, 1), 3, mean=(99.9,), std=(33.3,)),
        normalization,
    )
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), dtype=np.uint8)
    first, second, bias = (keras.ops.convert_to_numpy(weight) for weight in model.weights)
    by_hand = np.maximum(expected(pixels.reshape(5, 16).astype("float64")) @ first, 0) @ second + bias
    # One rounding to float32 on the way would be off by 1e-8.
    model.save(tmp_path / "model.keras")
    for one in (model, keras.models.load_model(tmp_path / "model.keras")):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(one(pixels)), by_hand, rtol=1e-12)


@pytest.mark.in_ci(0, 7, 9)
@pytest.mark.parametrize("name", config.names_of("modeling/models"))
def test_dropout_is_an_option_and_off_where_it_is_0(name):
    features = TAKES.get(name, ["image"])
    assert not any("dropout" in layer for layer in layers_of(build_of(name, features, dropout=0)))
    model = build_of(name, features, dropout=0.5)
    assert any("dropout" in layer for layer in layers_of(model))
    x = examples_of(features)
    assert not np.allclose(model(x, training=True), model(x, training=False))
    np.testing.assert_array_equal(model(x, training=False), model(x, training=False))


@pytest.mark.parametrize("name", [name for name in config.names_of("modeling/models") if name not in TAKES])
def test_a_model_of_images_has_no_dropout_unless_asked(name):
    assert not any("dropout" in layer for layer in layers_of(build_of(name, ["image"])))


# Two kinds of preprocessing: -1 to 1, and blue first about the mean.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [("MobileNetV2", {"alpha": 0.35}), pytest.param("VGG16", {}, marks=pytest.mark.exhaustive)],
)
def test_an_architecture_of_keras_applications_is_that_of_keras(architecture, arguments, tmp_path):
    options = {"architecture": architecture, "arguments": arguments}
    model = build("keras_applications", (32, 32, 3), 10, "none", **options)
    core = model.get_layer("keras_applications")
    function = getattr(keras.applications, architecture)
    theirs = function(include_top=False, weights=None, input_shape=(32, 32, 3), pooling="avg", **arguments)
    theirs.set_weights(core.get_layer("backbone").get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    preprocess = sys.modules[function.__module__].preprocess_input
    by_hand = core.get_layer("logits")(theirs(preprocess(pixels.astype("float32"))))
    model.save(tmp_path / "model.keras")
    for one in (model, keras.saving.load_model(tmp_path / "model.keras")):
        np.testing.assert_allclose(one(pixels), by_hand, rtol=1e-5, atol=1e-6)


def test_a_grey_image_is_a_coloured_one():
    options = {"architecture": "VGG16"}
    grey, coloured = (build("keras_applications", (32, 32, n), 10, "none", **options) for n in (1, 3))
    coloured.set_weights(grey.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), dtype=np.uint8)
    np.testing.assert_array_equal(grey(pixels), coloured(np.repeat(pixels, 3, axis=3)))


@pytest.mark.parametrize(
    ("shape", "normalization", "options", "said"),
    [
        ((32, 32, 3), "scale", {}, r"input.normalization = scale: .*Set input.normalization=none"),
        ((32, 32, 3), "none", {"architecture": "ResNet5"}, r"'ResNet5' is not in keras.applications: .*ResNet50,"),
        ((32, 32, 3), "none", {"architecture": "imagenet_utils"}, "is not in keras.applications"),
        ((32, 32, 3), "none", {"arguments": {"alpa": 1}}, "alpa"),
        ((32, 32, 3), "none", {"arguments": {"weights": "imagenet"}}, "weights"),
        ((32, 32, 2), "none", {}, "1 or 3 channels"),
        ((28, 28, 1), "none", {}, "at least 32x32"),
    ],
)
def test_what_keras_applications_cannot_be_is_refused(shape, normalization, options, said):
    with pytest.raises(UserError, match=said):
        build("keras_applications", shape, 10, normalization, **options)


# Counted by hand: an embedding has a row for each place of its vocabulary.
PARAMETERS_OF_FEATURES = [
    ("mixed", ["number"], dense(3, 128) + dense(128, 64) + dense(64, 10)),
    ("mixed", ["number", "category"], (4 + 7) * 16 + dense(3 + 32, 128) + dense(128, 64) + dense(64, 10)),
    (
        "mixed", ["number", "category", "text", "image"],
        (4 + 7) * 16 + 50 * 32 + conv(3, 1, 16) + conv(3, 16, 32) + conv(3, 32, 64)
        + dense(3 + 32 + 32 + 64, 128) + dense(128, 64) + dense(64, 10),
    ),
    (
        "wide_deep", ["number", "category"],
        dense(3, 10) + (4 + 7) * 10 + (4 + 7) * 32 + dense(3 + 64, 128) + dense(128, 64) + dense(64, 10),
    ),
    ("text_cnn", ["text"], 50 * 128 + sum(width * 128 * 100 + 100 for width in (3, 4, 5)) + dense(300, 10)),
    # Keras' example: of each head's 32 numbers, queries, keys, values and what joins them.
    (
        "transformer", ["text"],
        50 * 32 + 9 * 32 + 3 * dense(32, 64) + dense(64, 32) + 2 * 64 + 2 * dense(32, 32)
        + dense(32, 20) + dense(20, 10),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "features", "expected"), PARAMETERS_OF_FEATURES)
def test_a_model_of_features(name, features, expected):
    model = build_of(name, features)
    assert model.count_params() == expected
    outputs = keras.ops.convert_to_numpy(model(examples_of(features)))
    assert outputs.shape == (5, 10)
    assert np.isfinite(outputs).all()


def test_a_mixture_is_taken_by_name():
    model = build_of("mixed", ["number", "category"])
    assert {name: one.dtype for name, one in model.input.items()} == {"number": "float32", "category": "int32"}
    x = examples_of(["number", "category"])
    with_others = {**x, "category": (x["category"] + 1) % 4}
    assert not np.allclose(model(x), model(with_others)), "both are looked at"


@pytest.mark.parametrize("name", ["text_cnn", "transformer", "mixed"])
def test_what_fills_up_a_text_is_no_word(name):
    model = build_of(name, ["text"])
    empty = keras.ops.convert_to_numpy(model(np.zeros((2, 9), "int32")))
    assert np.isfinite(empty).all(), "no word at all"
    if name == "mixed":
        np.testing.assert_allclose(model(np.array([[3, 4] + 7 * [0]])), model(np.array([7 * [0] + [4, 3]])), rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_numbers_are_standardised_and_a_regression_ends_in_the_targets_unit(policy, precision):
    policy(precision)
    model = build_of("mixed", ["number"], REGRESSION, units=[], dropout=0)
    weights, bias = model.get_weights()
    numbers = np.array([[5.0, 0.0, -1.0], [1007.0, 3.0, 0.0]], "float32")
    standardised = (numbers - [5, 0, -1]) / [2, 1, 1]  # A deviation of 0 divides nothing.
    got = keras.ops.convert_to_numpy(model(numbers))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[:1], 100 + 20 * bias[None], rtol=1e-6)
    tolerance = 1e-5 if precision == "float32" else 0.02  # The core computes in half precision, and nothing else does.
    np.testing.assert_allclose(got[1:], (100 + 20 * (standardised @ weights + bias))[1:], rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("mlp", ["number"], r"takes images, and digits has numbers of shape \(3,\). Set model.name=mixed or "),
        ("resnet", ["image", "number"], "takes images, and digits has images"),
        ("text_cnn", ["number", "text"], "takes only texts, not number: set model.name=mixed"),
        ("transformer", ["image"], "takes only one text, not image"),
        ("wide_deep", ["category", "text"], "takes only numbers and categories, not text"),
    ],
)
def test_a_model_that_takes_other_features_says_so(name, features, message):
    with pytest.raises(UserError, match=message):
        build_of(name, features)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scale", [[0.0, 0.0], [1.0, 1.0]]),
        ("standardize", [[-2.0, -100.0], [(255 - 100) / 50, 155.0]]),
        ("none", [[0.0, 0.0], [255.0, 255.0]]),
    ],
)
def test_normalization(kind, expected):
    # The second channel does not vary: it must be shifted, and not be divided by zero.
    data = prepared((1, 1, 2), mean=(100.0, 100.0), std=(50.0, 0.0))
    model = models.build(config.Model(name="mlp", options={}, initial=None, new_head=False, freeze=[]), data, kind)
    pixels = np.array([[0, 0], [255, 255]], np.uint8).reshape(2, 1, 1, 2)
    normalized = keras.ops.convert_to_numpy(model.get_layer("normalization")(pixels)).reshape(2, 2)
    np.testing.assert_allclose(normalized, expected, rtol=1e-5, atol=1e-4)
    assert not model.get_layer("normalization").weights, "statistics are constants: weights fit every normalisation"


OWN = """
import keras

def build(input_shape, num_classes, width=4):
    images = keras.Input(input_shape)
    x = keras.layers.Flatten()(images)
    return keras.Model(images, keras.layers.Dense(num_classes, name="logits")(keras.layers.Dense(width)(x)))

def dropping(input_shape, num_classes, dropout):
    layers = [keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dropout(dropout)]
    return keras.Sequential([keras.Input(input_shape), *layers, keras.layers.Dense(num_classes)])

def needs_nothing(input_shape, num_classes):
    return build(input_shape, num_classes)

def forgets_to_return(input_shape, num_classes):
    needs_nothing(input_shape, num_classes)

def fails(input_shape, num_classes):
    return [][num_classes]

def leaves(input_shape, num_classes):
    raise SystemExit("no licence")

class Fails(keras.Model):
    def __init__(self, input_shape, num_classes):
        super().__init__()

    def call(self, images):
        return images.nowhere

class Unsaved(keras.Model):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = keras.layers.Dense(num_classes)

    def call(self, images):
        return self.layer(keras.ops.reshape(images, [-1, 784]))

def unsaved(input_shape, num_classes):
    return Unsaved(num_classes)

text = "not a function"

def one_short(input_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes - 1)])

def not_flat(input_shape, num_classes):
    return keras.Sequential([keras.layers.Dense(num_classes)])

def softmax(input_shape, num_classes):
    last = keras.layers.Dense(num_classes, activation="softmax", name="answer")
    return keras.Sequential([keras.layers.Flatten(), last])

def inner(input_shape, num_classes):
    images = keras.Input(input_shape)
    x = keras.layers.Flatten()(images)
    return images, keras.layers.Dense(num_classes, activation="sigmoid")(x)

def two(input_shape, num_classes):
    images, x = inner(input_shape, num_classes)
    return keras.Model(images, [x, x])

def within(input_shape, num_classes):
    images, x = inner(input_shape, num_classes)
    return keras.Model(images, keras.Sequential([keras.layers.Dense(num_classes), keras.layers.ReLU()])(x))

def operation(input_shape, num_classes):
    images, x = inner(input_shape, num_classes)
    return keras.Model(images, keras.ops.softmax(x))

def scaled(input_shape, num_classes):
    images, x = inner(input_shape, num_classes)
    return keras.Model(images, 4 * x - 2)
"""


@pytest.fixture
def own_models(project, own_imports):
    """The project with models of the user's own, and this process as before afterwards."""
    (project / "own_models.py").write_text(OWN)
    (project / "broken_models.py").write_text("import keras\nraise RuntimeError('no licence')\n")
    (project / "leaving_models.py").write_text("import sys\nsys.exit('no licence')\n")
    (project / "needy_models.py").write_text("import a_package_that_is_not_there\n")
    yield project
    for name in ("own_models", "broken_models", "leaving_models", "needy_models"):
        sys.modules.pop(name, None)


def test_a_model_of_the_users_own(own_models):
    model = build("own_models:build", (2, 2, 1), 3, width=5)
    assert model.count_params() == dense(4, 5) + dense(5, 3)
    assert build("own_models:scaled", (2, 2, 1), 3).count_params() == dense(4, 3), (
        "only the last layer must have no bounds"
    )
    assert config.load(None, ["model.name=own_models:build"]).model.name == "own_models:build"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mlp", {"unit": [3]}, ["'model.options.unit'", "did you mean 'model.options.units'?", "dropout"]),
        ("mlp", {"input_shape": [3]}, ["'model.options.input_shape'", "dropout"]),
        ("mlp", {"dropout": 2}, ["model.name = 'mlp'", "'dropout': 2", "(28, 28, 1)"]),
        ("mlp", {"units": 3}, ["model.name = 'mlp'", "'units': 3"]),
        ("own_models:build", {"widht": 3}, ["'model.options.widht'", "did you mean 'model.options.width'?"]),
        ("own_models:needs_nothing", {"width": 3}, ["'model.options.width'", "no options"]),
        ("own_models:text", {}, ["own_models:text", "no function or class 'text'"]),
        ("own_models:gone", {}, ["own_models:gone", "no function or class 'gone'"]),
        ("own_models:", {}, ["own_models:", "no function or class ''"]),
        ("gone_models:build", {}, ["gone_models:build", "no module 'gone_models'"]),
        ("needy_models:build", {}, ["needy_models:build", "no module 'a_package_that_is_not_there'"]),
        ("broken_models:build", {}, ["broken_models:build", "RuntimeError: no licence"]),
        ("leaving_models:build", {}, ["leaving_models:build", "SystemExit: no licence, leaving_models.py line 2"]),
        ("own_models:forgets_to_return", {}, ["own_models:forgets_to_return", "NoneType", "must return a Keras model"]),
        ("own_models:fails", {}, ["own_models:fails", "IndexError", "own_models.py line 20"]),
        ("own_models:leaves", {}, ["own_models:leaves", "SystemExit: no licence, own_models.py line 23"]),
        ("own_models:Fails", {}, ["own_models:Fails", "AttributeError", "'nowhere'", "own_models.py line 30"]),
        ("own_models:unsaved", {}, ["own_models:unsaved", "cannot be saved", "Please implement `get_config()`"]),
        ("own_models:one_short", {}, ["'own_models:one_short'", "(None, 9)", "digits needs (None, 10)"]),
        ("own_models:not_flat", {}, ["(None, 28, 28, 10)", "digits needs (None, 10)"]),
        ("own_models:two", {}, ["[(None, 10), (None, 10)]", "digits needs (None, 10)"]),
        ("own_models:softmax", {}, ["'own_models:softmax'", "softmax in 'answer'", "activation=None"]),
        ("own_models:operation", {}, ["softmax in 'softmax'"]),
        (":build", {}, [":build", "module:function"]),
        ("../models:build", {}, ["../models:build", "module:function"]),
    ],
)
def test_a_wrong_model_gives_one_message(own_models, name, options, said):
    with pytest.raises(UserError) as caught:
        build(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    for text in said:
        assert text in message


def test_a_regression_needs_numbers_of_both_signs(own_models):
    with pytest.raises(
        UserError, match=r"ends with relu in 're_lu', .* one number in standard deviations from the mean"
    ):
        build_of("own_models:within", ["image"], REGRESSION)


@pytest.mark.parametrize(("name", "side"), [("convnet", 2), ("convnet2", 9)])
def test_an_image_too_small_for_the_model(name, side):
    with pytest.raises(UserError, match=rf"'{name}'.*\({side}, {side}, 1\)"):
        build(name, (side, side, 1))


@pytest.mark.parametrize(("name", "filters"), [("resnet", 2), ("vgg", [2, 2])])
def test_batch_normalisation_has_settled_after_a_hundred_steps(name, filters):
    """Else a short training, or the first epochs on few examples, validates at chance."""
    model = build(name, (8, 8, 1), filters=filters)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 1), dtype=np.uint8)
    step = tf.function(lambda: model(pixels, training=True))
    for _ in range(100):
        as_trained = step()
    np.testing.assert_allclose(model(pixels, training=False), as_trained, atol=0.01)

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tasks import config
from tasks.data import builders
from tasks.download import download
from tasks.prepare import prepare
from tasks.system.errors import UserError


@pytest.fixture
def prepared(root):
    digits = config.Dataset(name="digits", builder=None, version=None, image_size=None, downloads=None)
    download(digits)
    return prepare(config.Tfds(name="digits"))


# Stock TFDS: what the builder says before anything is downloaded.
@pytest.mark.parametrize(
    ("name", "shape", "num_classes"),
    [
        ("digits", (8, 8, 1), 10),
        ("noise", (28, 28, 1), 10),
        ("mnist", (28, 28, 1), 10),
        ("fashion_mnist", (28, 28, 1), 10),
        ("cifar10", (32, 32, 3), 10),
        ("cifar100", (32, 32, 3), 100),
        ("svhn_cropped", (32, 32, 3), 10),
        ("tf_flowers", (None, None, 3), 5),
    ],
)
def test_build_describes_the_dataset(name, shape, num_classes, tmp_path):
    builder = builders.build(name, None, tmp_path)
    image, label = (builder.info.features[key] for key in builder.info.supervised_keys)
    assert (builder.name, image.shape, label.num_classes) == (name, shape, num_classes)
    assert builders.build(name, str(builder.version), tmp_path).version == builder.version


@pytest.mark.parametrize("spelling", ["cmaterdb/telugu", "cmaterdb.telugu"])
def test_a_configuration_is_a_dataset_with_a_folder_of_its_own(spelling, tmp_path):
    section = config.Dataset(name=spelling, builder=None, version=None, image_size=None, downloads=None)
    assert section.name == "cmaterdb.telugu"
    builder = builders.build(section.name, None, tmp_path)
    assert (builder.name, builder.builder_config.name) == ("cmaterdb", "telugu")
    assert builders.build("imagenet_v2.threshold-0.7", None, tmp_path).builder_config.name == "threshold-0.7"


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("cmaterdb.bangle", None, ["unknown configuration of cmaterdb", "'bangle'", "did you mean 'bangla'?"]),
        ("mnist.small", None, ["unknown configuration of mnist 'small': it has none, so leave it out"]),
        ("mnits", None, ["unknown dataset 'mnits'", "did you mean 'mnist'?", "digits"]),
        ("digitz", None, ["did you mean 'digits'?"]),
        ("mnist", "9.9.9", ["mnist cannot be loaded at version 9.9.9, only: 3.0.1"]),
        ("smartwatch_gestures", None, ["'smartwatch_gestures'", "cannot be trained on", "Sequence"]),
        ("div2k", None, ["'div2k'", "a class label", "Image"]),  # an image for an image
        ("higgs", None, ["'higgs'", "defines no supervised keys", "your own builder"]),
        ("wmt_translate", None, ["'wmt_translate'", "cannot describe"]),  # its constructor raises
    ],
)
def test_build_refuses(name, version, expected, tmp_path):
    with pytest.raises(UserError) as caught:
        builders.build(name, version, tmp_path)
    message = str(caught.value)
    assert all(part in message for part in expected), message
    assert "\n" not in message
    assert len(message) < 400  # not the names of all 450 builders


def test_digits_are_the_images_of_scikit_learn(prepared):
    source = load_digits()
    expected = np.rint(source.images * 255 / 16).astype(np.uint8)
    images = {name: np.load(split.features["image"])[..., 0] for name, split in prepared.splits.items()}
    labels = {name: np.load(split.labels) for name, split in prepared.splits.items()}
    assert {name: len(x) for name, x in images.items()} == {"train": 1437, "test": 360}
    # Each image with its label once, in one of the splits.
    found = sorted((x.tobytes(), y) for name in images for x, y in zip(images[name], labels[name], strict=True))
    assert found == sorted((x.tobytes(), y) for x, y in zip(expected, source.target, strict=True))
    assert max(x.max() for x in images.values()) == 255
    # Stratified: a fifth of each class, to the nearest image.
    assert np.abs(np.bincount(labels["test"]) - np.bincount(source.target) / 5).max() < 1
    assert prepared.licence == "CC BY 4.0"


PIXELS = ["9bd8e40864baf402", "2d7c40ce6d895964", "8be6b45d620696d9"]


def test_noise_is_the_same_for_ever(root):
    noise = config.Dataset(name="noise", builder=None, version=None, image_size=None, downloads=None)
    download(noise)
    found = prepare(config.Tfds(name="noise"))
    assert {name: split.num_examples for name, split in found.splits.items()} == {"train": 128, "test": 32}
    images, labels = (np.load(path) for path in (found.splits["train"].features["image"], found.splits["train"].labels))
    assert images.shape == (128, 28, 28, 1)
    # Written once as NumPy 2.4 drew them: the first eight pixels of each of the first three images, and its class.
    first = {image.reshape(-1)[:8].tobytes().hex(): label for image, label in zip(images, labels.tolist(), strict=True)}
    assert [first[pixels] for pixels in PIXELS] == [3, 6, 9]
    # Uniform: 100,352 bytes spread over 256 values, to five standard deviations.
    assert np.abs(np.bincount(images.reshape(-1), minlength=256) - 392).max() < 5 * 392**0.5
    assert set(labels.tolist()) == set(range(10))
    assert {row.tobytes() for row in images}.isdisjoint(
        {row.tobytes() for row in np.load(found.splits["test"].features["image"])}
    )


def test_records_are_decoded_in_any_number(prepared, root):
    import tensorflow as tf

    shards = builders.shards(
        builders.build("digits", None, root / prepared.raw_folder), "test", prepared.features["image"].shape
    )
    serialized = next(iter(tf.data.TFRecordDataset(shards.paths).batch(1000)))
    images, labels = (np.load(root / path) for path in prepared.splits["test"].sha256)
    decode = tf.function(shards.decode, reduce_retracing=True)
    for size in (0, 1, builders.DECODED - 1, builders.DECODED, builders.DECODED + 1, 360):
        found = decode(serialized[:size])
        np.testing.assert_array_equal(found[0], images[:size])
        np.testing.assert_array_equal(found[1], labels[:size])


@pytest.mark.parametrize("name", ["Mnist", "BlackOrWhite", "Cifar10", "ImagenetV2", "MYData", "C4", "a_b"])
def test_a_builder_of_the_users_own_has_the_folder_that_tfds_names_after_its_class(name):
    from tensorflow_datasets.core.naming import camelcase_to_snakecase  # Not public.

    section = config.Dataset(name=f"my.data:{name}/small", builder=None, version=None, image_size=None, downloads=None)
    assert (section.name, section.builder) == (f"{camelcase_to_snakecase(name)}.small", f"my.data:{name}")

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tasks import config
from tasks.data import builders, dataset_folder, prepared_data
from tasks.download import download
from tasks.prepare import prepare
from tasks.system.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty project, current."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        ("mnist.small", None, ["dataset.name = 'mnist/small'", "no configurations", "dataset.name=mnist"]),
        ("mnits", None, ["unknown dataset 'mnits'", "did you mean 'mnist'?", "digits"]),
        ("digitz", None, ["did you mean 'digits'?"]),
        ("mnist", "9.9.9", ["dataset.version of mnist", "'9.9.9'", "Allowed: 3.0.1"]),
        ("smartwatch_gestures", None, ["'smartwatch_gestures'", "cannot be trained on", "Sequence"]),
        ("div2k", None, ["'div2k'", "a class label", "Image"]),  # an image for an image
        ("higgs", None, ["'higgs'", "names no supervised keys", "builder of your own"]),
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


def test_damaged_shard_is_the_file_that_cannot_be_read(prepared, root):
    raw = root / prepared.raw_folder
    assert builders.damaged_shard(builders.build("digits", None, raw)) is None
    (shard,) = raw.glob("digits/*/*test.tfrecord*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert builders.damaged_shard(builders.build("digits", None, raw)) == shard


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


def test_import_brings_in_no_framework():
    # Training on JAX verifies its arrays in a process that has no need of TensorFlow.
    code = (
        "import tasks.data.builders, sys, json; print(json.dumps([m for m in sys.modules if m[:10] == 'tensorflow']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", ["Mnist", "BlackOrWhite", "Cifar10", "ImagenetV2", "MYData", "C4", "a_b"])
def test_a_builder_of_the_users_own_has_the_folder_that_tfds_names_after_its_class(name):
    from tensorflow_datasets.core.naming import camelcase_to_snakecase  # Not public.

    section = config.Dataset(name=f"my.data:{name}/small", builder=None, version=None, image_size=None, downloads=None)
    assert (section.name, section.builder) == (f"{camelcase_to_snakecase(name)}.small", f"my.data:{name}")


BUILDERS = """
import numpy as np
import tensorflow_datasets as tfds

F = tfds.features


class Own(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    GIVEN = WANTED = None

    def _info(self):
        features = F.FeaturesDict({"given": self.GIVEN, "wanted": self.WANTED})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("given", "wanted"))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 30), "test": self._generate_examples(30, 40)}

    def _generate_examples(self, first, last):
        for row in range(first, last):
            yield row, dict(zip(("given", "wanted"), self.example(row)))


class Reviews(Own):
    GIVEN, WANTED = F.Text(), F.ClassLabel(names=["bad", "good"])

    def _split_generators(self, dl_manager):
        return {**super()._split_generators(dl_manager), "unsupervised": self._generate_examples(40, 50)}

    def example(self, row):
        text = f"Word{row} a film!" if row % 2 else "a" + " very" * row + " b\u00f6se"
        return (text, -1 if row >= 40 else row % 2) if row != 4 else ("unheard", -1)


class Topics(Own):
    GIVEN, WANTED = F.Text(), F.Sequence(F.ClassLabel(names=["art", "law", "sea"]))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 40)}

    def example(self, row):
        return f"text {row}", [place for place in range(3) if row >> place & 1]


class Houses(Own):
    GIVEN, WANTED = F.Tensor(shape=(2, 2), dtype=np.float64), F.Scalar(dtype=np.float32)

    def example(self, row):
        return np.array([[row, row * 2], [row * 3, 1]], np.float64), row / 4


class Winds(Own):
    GIVEN, WANTED = F.Tensor(shape=(3,), dtype=np.int64), F.Tensor(shape=(2,), dtype=np.float32)

    def example(self, row):
        return np.full(3, row), np.array([row, -row], np.float32)


class Infinite(Houses):
    def example(self, row):
        return np.full((2, 2), np.inf if row == 7 else row, np.float64), 0.0


class Scenes(Own):
    GIVEN, WANTED = F.Image(shape=(4, 4, 1)), F.Sequence(F.ClassLabel(names=["art", "law", "sea"]))

    def example(self, row):
        return np.full((4, 4, 1), row, np.uint8), [place for place in range(3) if row >> place & 1]


class Ages(Own):
    GIVEN, WANTED = F.Image(shape=(4, 4, 1)), F.Scalar(dtype=np.float32)

    def example(self, row):
        return np.full((4, 4, 1), row, np.uint8), row / 4


class Places(Own):
    GIVEN, WANTED = F.Image(shape=(4, 4, 1)), F.Tensor(shape=(2,), dtype=np.int32)

    def example(self, row):
        return np.full((4, 4, 1), row, np.uint8), np.array([row, -row], np.int32)


class Endless(Ages):
    def example(self, row):
        return np.full((4, 4, 1), row, np.uint8), np.inf if row == 7 else 0.0


class Sounds(Own):
    GIVEN, WANTED = F.Audio(), F.ClassLabel(num_classes=2)

    def example(self, row):
        return np.zeros(3, np.int64), 0
"""


@pytest.fixture
def own_builder(project, own_imports):
    (project / "my_builders.py").write_text(BUILDERS)

    def make(name):
        dataset = config.Dataset(
            name=f"my_builders:{name}", builder=None, version=None, image_size=None, downloads=None
        )
        download_into(project, dataset)
        made = prepare(config.read_description(project / "data" / dataset.name))
        arrays = {
            split: ({key: np.load(path) for key, path in one.features.items()}, np.load(one.labels))
            for split, one in made.splits.items()
        }
        return made, arrays

    yield make
    sys.modules.pop("my_builders", None)


def download_into(project, dataset):
    dataset_folder.add(dataset, project)
    download(dataset)


@pytest.mark.slow
def test_images_texts_and_numbers_of_a_builder_are_prepared_for_each_task(own_builder, project):
    made, arrays = own_builder("Reviews")
    assert (made.target.task, made.target.class_names) == ("classification", ("bad", "good"))
    assert set(arrays) == {"train", "test"}, "what has no label is left out"
    (vocabulary,) = json.loads((project / made.folder / "text_vocabulary.json").read_text())
    assert vocabulary[:3] == ["very", "a", "!"]
    assert "word31" not in vocabulary, "of the test split alone"
    assert "unheard" not in vocabulary, "of an example without a class"
    assert {split: len(labels) for split, (_, labels) in arrays.items()} == {"train": 29, "test": 10}
    assert made.features["text"].vocabulary_sizes == (len(vocabulary) + 2,)
    texts, labels = arrays["test"]
    word = {"": 0, "unknown": 1, **{text: place for place, text in enumerate(vocabulary, 2)}}
    odd = next(text for text, label in zip(texts["text"], labels, strict=True) if label == 1)
    assert odd[:5].tolist() == [word["unknown"], word["a"], word["film"], word["!"], 0]

    made, arrays = own_builder("Topics")
    assert (made.target.task, made.target.class_names) == ("multilabel", ("art", "law", "sea"))
    assert {split: len(labels) for split, (_, labels) in arrays.items()} == {"train": 32, "test": 8}
    labels = np.concatenate([labels for _, labels in arrays.values()])
    expected = sorted([row & 1, row >> 1 & 1, row >> 2 & 1] for row in range(40))
    assert (labels.dtype, sorted(labels.tolist())) == (np.uint8, expected)

    made, arrays = own_builder("Houses")
    assert (made.target.task, made.target.columns) == ("regression", ("wanted",))
    numbers, labels = arrays["train"]
    assert (labels.dtype, labels.shape, numbers["number"].dtype) == (np.float32, (30, 1), np.float32)
    order = np.argsort(labels[:, 0])
    assert numbers["number"][order].tolist() == [[row, row * 2, row * 3, 1] for row in range(30)]
    assert labels[order, 0].tolist() == [row / 4 for row in range(30)]
    assert made.features["number"].mean == pytest.approx((14.5, 29, 43.5, 1))
    assert made.target.mean == pytest.approx((3.625,))

    made, arrays = own_builder("Winds")
    assert made.target.columns == ("wanted 0", "wanted 1")
    assert (arrays["test"][1][:, 0] == -arrays["test"][1][:, 1]).all()
    assert made.raw_folder is None, "only images are streamed"
    prepared_data.verify(made)

    with pytest.raises(UserError, match=r"example .+ of the split 'train' has a number that is not finite"):
        own_builder("Infinite")
    with pytest.raises(UserError, match=r"cannot be trained on: .+ got \[\['Audio'\], \['ClassLabel'\]\]"):
        own_builder("Sounds")

    made, arrays = own_builder("Scenes")
    assert (made.target.task, made.target.class_names) == ("multilabel", ("art", "law", "sea"))
    assert made.raw_folder is None, "only images of one class are streamed"
    for features, labels in arrays.values():
        rows = features["image"][:, 0, 0, 0]
        assert labels.dtype == np.uint8
        assert labels.tolist() == [[row & 1, row >> 1 & 1, row >> 2 & 1] for row in rows.tolist()]

    made, arrays = own_builder("Ages")
    assert (made.target.task, made.target.columns) == ("regression", ("wanted",))
    features, labels = arrays["train"]
    assert (labels.dtype, labels.shape) == (np.float32, (30, 1))
    assert (labels[:, 0] == features["image"][:, 0, 0, 0] / 4).all()

    made, arrays = own_builder("Places")
    assert made.target.columns == ("wanted 0", "wanted 1")
    features, labels = arrays["test"]
    rows = features["image"][:, 0, 0, 0].astype(np.float32)
    assert labels.tolist() == np.stack([rows, -rows], 1).tolist()

    with pytest.raises(UserError, match=r"the split 'train' has a number that is not finite"):
        own_builder("Endless")

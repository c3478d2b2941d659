import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tasks import config, records
from tasks import prepare as stage
from tasks.data import builders, prepared_data
from tasks.download import download
from tasks.input import sources
from tasks.input.batches import Batches
from tasks.input.stream import StreamSource
from tasks.system import files
from tasks.system.errors import UserError
from tests.conftest import CHECKOUT
from tests.processes.trainings import flip_a_bit


class NoisyPhotos(tfds.core.GeneratorBasedBuilder):
    """Images of many sizes; one split has no labels."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=3)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(name) for name in ("train", "test", "unlabelled")}

    def _generate_examples(self, split):
        noise = np.random.default_rng(len(split))
        for i in range(10):
            size = noise.integers(5, 30, 2)
            label = -1 if split == "unlabelled" else i % 3
            yield i, {"image": noise.integers(0, 256, (*size, 3), np.uint8), "label": label}


class TrainOnly(tfds.core.GeneratorBasedBuilder):
    """A dataset without a test split, as about fifteen of TFDS are."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(3, 3, 1)), "label": tfds.features.ClassLabel(num_classes=3)}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(33):
            yield i, {"image": np.full((3, 3, 1), i, np.uint8), "label": i % 3}


class PartlyLabelled(TrainOnly):
    """As `snli` is: some of the training examples have no class."""

    def _generate_examples(self):
        for key, example in super()._generate_examples():
            yield key, {**example, "label": -1 if key % 11 == 5 else example["label"]}


class Validated(TrainOnly):
    """A dataset with a validation split, and without a test split, as ImageNet is where labels count."""

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "validation": self._generate_examples()}


def dataset(name="digits", **values):
    return config.Dataset(
        **{"name": name, "builder": None, "version": None, "image_size": None, "downloads": None, **values}
    )


def prepare(values, manifest=None):
    """Prepare what `download` left of a dataset."""
    return stage.prepare(config.Tfds(name=values.name, version=values.version, image_size=values.image_size))


def message_of(values, manifest):
    with pytest.raises(UserError) as caught:
        prepare(values, manifest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_below(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_by_tfds(manifest, split):
    """Images and labels through TFDS' own reader."""
    builder = builders.build(manifest.name, manifest.version, Path(manifest.folder).absolute())
    pairs = list(builder.as_dataset(split=split, as_supervised=True).as_numpy_iterator())
    return [image for image, _ in pairs], np.array([label for _, label in pairs])


def check(prepared, root):
    """Everything that a manifest says must be true of its files."""
    assert prepared == records.load(records.PreparedDataset, root / prepared.folder / "manifest.json")
    assert prepared.data_version is None
    for name, split in prepared.splits.items():
        images, labels = np.load(split.features["image"], mmap_mode="r"), np.load(split.labels, mmap_mode="r")
        assert isinstance(images, np.memmap)
        assert (images.dtype, images.shape) == (np.uint8, (split.num_examples, *prepared.features["image"].shape))
        assert (labels.dtype, labels.shape) == (np.int64, (split.num_examples,))
        assert split.class_counts == tuple(np.bincount(labels, minlength=prepared.target.num_outputs))
        if name == "train":
            image = prepared.features["image"]
            assert image.mean == pytest.approx(images.mean((0, 1, 2), dtype=np.float64), rel=1e-12)
            assert image.deviation == pytest.approx(images.std((0, 1, 2), dtype=np.float64), rel=1e-9)
        hashes = {
            path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for path in (split.features["image"], split.labels)
        }
        assert split.sha256 == hashes
    prepared_data.verify(prepared)


def test_arrays_hold_what_tfds_reads(root):
    manifest = download(dataset())
    prepared = prepare(dataset(), manifest)
    check(prepared, root)
    assert list(prepared.splits) == ["test", "train"]
    for name, split in prepared.splits.items():
        images, labels = read_by_tfds(manifest, name)
        np.testing.assert_array_equal(np.load(split.features["image"]), np.stack(images))
        np.testing.assert_array_equal(np.load(split.labels), labels)
    expected = {"manifest.json", "test_images.npy", "test_labels.npy", "train_images.npy", "train_labels.npy"}
    assert {path.name for path in (root / "data/digits/prepared").iterdir()} == expected


def test_made_again_it_is_the_same_bytes(root, capsys):
    manifest = download(dataset())
    prepare(dataset(), manifest)
    first = files_below(root / "data/digits/prepared")
    # What a killed one left, and what is the user's.
    (root / "data/digits/.prepared.killed" / "new").mkdir(parents=True)
    (root / "data/digits/.prepared.killed" / files.MARK).touch()
    (root / "data/digits/.prepared.mine").mkdir()
    (root / "data/digits/prepared" / "notes.md").write_text("mine")
    prepare(dataset(), manifest)
    assert files_below(root / "data/digits/prepared") == first
    assert [path.name for path in (root / "data/digits").glob(".prepared.*")] == [".prepared.mine"]
    assert (root / "data/digits/set_aside/notes.md").read_text() == "mine"
    assert "contained a file that `prepare` did not create. It is now data/digits/set_aside/notes.md" in (
        capsys.readouterr().err
    )
    # And elsewhere: no path and no time is in it.
    shutil.rmtree(root / "data/digits")
    prepare(dataset(), download(dataset()))
    assert files_below(root / "data/digits/prepared") == first


def test_images_of_many_sizes_take_the_median_size_or_the_one_that_is_given(root, capsys):
    manifest = download(dataset("noisy_photos"))
    assert manifest.image_shape == (None, None, 3)
    prepared = prepare(dataset("noisy_photos"), manifest)
    check(prepared, root)
    sizes = [image.shape[:2] for image in read_by_tfds(manifest, "train")[0]]
    middle = tuple(statistics.median_low(size[side] for size in sizes) for side in (0, 1))
    assert prepared.features["image"].shape == (*(max(8, (side + 4) // 8 * 8) for side in middle), 3)
    height, width, _ = prepared.features["image"].shape
    said = capsys.readouterr().err
    assert "the images of noisy_photos differ in size, from " in said
    assert f"the median is {middle[0]} x {middle[1]}): all are resized to {height} x {width}. To choose" in said

    prepared = prepare(dataset("noisy_photos", image_size=(12, 9)), manifest)
    check(prepared, root)
    assert list(prepared.splits) == ["test", "train"], "the split without labels is left out"
    assert prepared.features["image"].shape == (12, 9, 3)
    images, labels = read_by_tfds(manifest, "train")
    resized = [tf.image.resize(image, (12, 9), antialias=True).numpy() for image in images]
    np.testing.assert_array_equal(np.load(prepared.splits["train"].features["image"]), np.rint(resized).clip(0, 255))
    np.testing.assert_array_equal(np.load(prepared.splits["train"].labels), labels)


def test_images_without_a_class_are_left_out_and_counted(root, capsys):
    prepared = prepare(dataset("partly_labelled"), download(dataset("partly_labelled")))
    check(prepared, root)
    message = (
        "warning: 3 of the 33 examples of the split 'train' of partly_labelled have no class (the label -1), and are"
    )
    assert message in capsys.readouterr().err
    places = []
    for split in prepared.splits.values():
        images, labels = np.load(split.features["image"]), np.load(split.labels)
        places += images[:, 0, 0, 0].tolist()
        assert (images[:, 0, 0, 0] % 3 == labels).all()
    assert sorted(places) == [place for place in range(33) if place % 11 != 5]
    # A stream reads TFDS' own shards, in which they are.
    wanted = config.load(None, ["input.source=stream"], CHECKOUT).input
    with pytest.raises(UserError, match="partly_labelled cannot be streamed"):
        sources.choose_source(wanted, prepared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"), [pytest.param("train_only", {}, marks=pytest.mark.slow), ("validated", {"validation": 33})]
)
def test_a_test_split_is_held_out_where_there_is_none(root, name, others):
    manifest = download(dataset(name))
    prepared = prepare(dataset(name), manifest)
    check(prepared, root)
    assert {name: split.num_examples for name, split in prepared.splits.items()} == {"test": 7, "train": 26, **others}
    assert prepared.held_out == records.HeldOut(num_examples=7, seed=0)
    first = files_below(root / f"data/{name}/prepared")
    prepare(dataset(name), manifest)
    assert files_below(root / f"data/{name}/prepared") == first

    read = {name: (np.load(split.features["image"]), np.load(split.labels)) for name, split in prepared.splits.items()}
    images, labels = read_by_tfds(manifest, "train")
    together = np.concatenate([read[name][0] for name in ("train", "test")])
    assert sorted(together[:, 0, 0, 0]) == sorted(image[0, 0, 0] for image in images)
    assert all((images[:, 0, 0, 0] % 3 == labels).all() for images, labels in read.values())
    # And from the shards, which have one split.
    for name, (images, labels) in read.items():
        source = StreamSource(prepared, name, np.arange(len(labels)), "none", 10)
        (found,) = Batches(len(labels), len(labels), drop_remainder=False, source=source).dataset
        np.testing.assert_array_equal(found[0], images)
        np.testing.assert_array_equal(found[1], labels)
    assert prepare(dataset(), download(dataset())).held_out is None


def test_damaged_shard_is_named_and_the_old_result_stays(root):
    manifest = download(dataset())
    prepare(dataset(), manifest)
    before = files_below(root / "data/digits/prepared")
    (shard,) = (root / manifest.folder).glob("digits/*/*train.tfrecord*")
    flip_a_bit(shard)
    message = message_of(dataset(), manifest)
    assert f"{shard.relative_to(root)}: damaged" in message
    assert "stratagem data download --set dataset.name=digits" in message
    assert files_below(root / "data/digits/prepared") == before
    assert not list((root / "data/digits").glob(".prepared.*"))
    # What the message says helps.
    prepare(dataset(), download(dataset()))
    assert files_below(root / "data/digits/prepared") == before


@pytest.mark.slow
def test_killed_prepare_leaves_the_old_result_and_the_next_cleans_up(root):
    manifest = download(dataset())
    prepare(dataset(), manifest)
    before = files_below(root / "data/digits/prepared")
    code = """
import os, signal
from tasks import config, prepare
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # when the first arrays are written
prepare.prepare(config.Tfds(name="digits", image_size=(16, 12)))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list((root / "data/digits").glob(".prepared.*/new/*.npy"))
    assert files_below(root / "data/digits/prepared") == before
    larger = prepare(dataset(image_size=(16, 12)), manifest)
    check(larger, root)
    assert larger.features["image"].shape == (16, 12, 1)
    assert not list((root / "data/digits").glob(".prepared.*"))


def test_without_raw_it_says_what_to_do(root):
    manifest = download(dataset())
    shutil.rmtree(root / manifest.folder)
    assert "data/digits/raw does not contain digits: stratagem data download --set dataset.name=digits" in message_of(
        dataset(), manifest
    )


def test_folder_that_cannot_be_written(root):
    manifest = download(dataset())
    (root / "data/digits/prepared").write_text("a file where the folder should be")
    assert "data/digits: cannot be written" in message_of(dataset(), manifest)

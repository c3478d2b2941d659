import hashlib
import json
import re
import shutil
import sys
import threading
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tasks import config
from tasks.data import builders
from tasks.input import array, sources
from tasks.input.augment import augment_batch
from tasks.input.batches import InputShare
from tasks.input.order import carve, order, shares
from tasks.records import PreparedSplit
from tasks.system.errors import UserError
from tests.tasks.written_runs import PREPARED

SOURCES = ["array", "stream"]
# A stream of many passes takes 2 to 6 s, which `make test` leaves to `make test-slow`.
STREAM_LATER = ["array", pytest.param("stream", marks=pytest.mark.exhaustive)]
NUM_TRAIN, NUM_TEST = 1437, 360
ALL_KINDS = (
    "{flip: true, crop_padding: 2, translation: 0.1, rotation: 0.1, zoom: 0.2, fill_mode: reflect, brightness: 0.2, "
    "contrast: 0.3, rand_augment: {num_layers: 1, magnitude: 5}, erasing: 0.5}"
)
MIXED = "{flip: true, crop_padding: 1, mixup: 0.4, cutmix: 1.0}"


def load(*overrides, source="array", validation=None):
    """Settings without augmentation; all digits are for training unless ``validation`` is given."""
    return config.load(
        None,
        {
            "input.source": source,
            "input.validation": validation,
            "input.augmentation.crop_padding": 0,
            "checkpoint.monitor": "train/accuracy",
            **config.read_overrides(overrides),
        },
    )


def read(batches, epoch=0, start_step=0):
    """One epoch, or the rest of one: (images, labels) of each step, and of a stream of each replica."""
    batches.epoch, batches.start_step = epoch, start_step
    return list(batches.arrays())


def read_rows(batches, images, labels, epoch=0, start_step=0):
    """The same as who gathers elsewhere does it, from the arrays of the split."""
    found = []
    for step in range(epoch * batches.steps + start_step, (epoch + 1) * batches.steps):
        rows, draws = batches.rows(step), batches.draws(step)
        batch = images[rows], labels[rows]
        if draws is not None:
            batch = augment_batch(batch, draws, batches.augmentation, batches.num_classes)
        found.append(batch)
    return found


def assert_same(one, other, labels_dtype=np.int64):
    assert len(one) == len(other)
    for (images, labels), (same_images, same_labels) in zip(one, other, strict=True):
        assert (images.dtype, labels.dtype) == (same_images.dtype, same_labels.dtype) == (np.uint8, labels_dtype)
        np.testing.assert_array_equal(images, same_images)
        np.testing.assert_array_equal(labels, same_labels)


def joined(lists):
    return list(chain.from_iterable(lists))


class Rows:
    """Finds an example's place in its split; no two digits are the same picture."""

    def __init__(self, prepared, split="train"):
        self.images, self.labels = (
            np.load(path) for path in (prepared.splits[split].features["image"], prepared.splits[split].labels)
        )
        self.place = {image.tobytes(): row for row, image in enumerate(self.images)}
        assert len(self.place) == len(self.images)

    def __call__(self, elements):
        """The rows of each element, after a look at the labels."""
        found = [[self.place[image.tobytes()] for image in images] for images, _ in elements]
        for rows, (_, labels) in zip(found, elements, strict=True):
            assert self.labels[rows].tolist() == labels.tolist()
        return found

    def flat(self, elements):
        return joined(self(elements))


@pytest.mark.in_ci(0, 1)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("size", "drop", "sizes"), [(100, False, [100] * 14 + [37]), (100, True, [100] * 14)])
def test_every_example_once_an_epoch_in_another_order_each_epoch(digits, source, size, drop, sizes):
    batches = sources.training_batches(load(f"input.drop_remainder={drop}", source=source), digits, size)
    rows = Rows(digits)
    epochs = [rows(read(batches, epoch)) for epoch in range(3)]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == sizes
        assert batches.steps == len(sizes)
        assert max(Counter(joined(epoch)).values()) == 1
    flat = [joined(epoch) for epoch in epochs]
    assert flat[0] != flat[1] != flat[2] != flat[0]
    for one in flat:
        # Far from the order of the data, and from that of the epoch before: correlated ranks would show it.
        assert abs(np.corrcoef(one, np.arange(len(one)))[0, 1]) < 0.15
    assert abs(np.corrcoef(flat[0], flat[1])[0, 1]) < 0.15
    if drop:
        assert len({frozenset(one) for one in flat}) == 3, "what is left out is not always the same"


# First what is read of arrays, with as little as it needs, then a stream under JAX.
ORDERS = """
import hashlib, json, os, sys
from tasks import config, records
from tasks.input import sources
prepared = records.load(records.PreparedDataset, config.project_root() / "data/digits/prepared/manifest.json")
found = {}

def training(source):
    settings = config.load(None, [f"input.source={source}", "input.validation=100", "train.seed=3"])
    batches = sources.training_batches(settings, prepared, 100)
    batches.epoch = 4
    return settings, batches

def digests(elements):
    return [hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest() for x, y in elements]

settings, batches = training("array")
found["array arrays"] = digests(batches.arrays())
assert len(batches.rows(3)) == len(batches.draws(3)) == 100
assert sum(len(labels) for _, labels in sources.ordered_batches(settings, prepared, "test", 100).arrays()) == 360
heavy = ("tensorflow", "tensorflow_datasets", "keras", "jax")
found["imported"] = [name for name in heavy if name in sys.modules]

os.environ["KERAS_BACKEND"] = "jax"
import tensorflow as tf
tf.random.set_seed(77)
hide = tf.config.set_visible_devices
found["hidden"] = []
tf.config.set_visible_devices = lambda *args: found["hidden"].append(args) or hide(*args)
found["stream arrays"] = digests(training("stream")[1].arrays())
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_another_process_reads_and_augments_the_same_and_jax_needs_no_tensorflow(digits, run):
    done = run([sys.executable, "-c", ORDERS])
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    for source in SOURCES:
        settings = config.load(None, [f"input.source={source}", "input.validation=100", "train.seed=3"])
        assert settings.input.augmentation.crop_padding
        here = [
            hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
            for images, labels in read(sources.training_batches(settings, digits, 100), epoch=4)
        ]
        assert there[f"{source} arrays"] == here, source
    assert there["imported"] == []
    assert there["hidden"] == [[[], "GPU"]], "for the stream that JAX reads, and for nothing else"


@pytest.mark.parametrize("source", STREAM_LATER)
@pytest.mark.parametrize("augmentation", ["{flip: false, crop_padding: 0}", ALL_KINDS])
def test_a_later_start_is_the_rest_of_the_epoch(digits, source, augmentation):
    batches = sources.training_batches(load(f"input.augmentation={augmentation}", source=source), digits, 100)
    whole = read(batches, 3)
    assert len(whole) == 15
    for start in (1, 7, 14):
        assert_same(read(batches, 3, start), whole[start:])


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_get_even_pieces_of_the_same_batches_of_a_stream_in_order(digits, num_replicas):
    settings = load("input.augmentation.flip=true", "input.augmentation.crop_padding=1", source="stream")
    alone = read(sources.training_batches(settings, digits, 96), epoch=1)
    pieces = read(sources.training_batches(settings, digits, 96, InputShare(num_replicas)), epoch=1)
    assert len(pieces) == num_replicas * len(alone)
    for i, (images, labels) in enumerate(alone):
        mine = pieces[i * num_replicas : (i + 1) * num_replicas]
        sizes = [len(part) for _, part in mine]
        assert max(sizes) - min(sizes) <= 1
        np.testing.assert_array_equal(np.concatenate([part for part, _ in mine]), images)
        np.testing.assert_array_equal(np.concatenate([part for _, part in mine]), labels)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("source", STREAM_LATER)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("num_workers", "size"), [(2, 100), (3, 41)])
def test_workers_share_an_epoch_out(digits, source, num_workers, size, drop):
    """With 41 the last batch has two examples: one of three workers gets none, and takes the step all the same."""
    settings = load(f"input.drop_remainder={drop}", source=source)
    rows = Rows(digits)
    alone = sources.training_batches(settings, digits, size)
    workers = [
        sources.training_batches(settings, digits, size, InputShare(worker=i, num_workers=num_workers))
        for i in range(num_workers)
    ]
    parts = [rows(read(worker, epoch=2)) for worker in workers]
    assert [len(part) for part in parts] == [alone.steps] * num_workers, "nobody waits for a worker that is done"
    together = Counter(row for part in parts for batch in part for row in batch)
    assert max(together.values()) == 1
    assert sorted(together) == sorted(rows.flat(read(alone, epoch=2)))
    for step in range(alone.steps - 1):
        assert sum(len(part[step]) for part in parts) == size
    assert rows(read(workers[1], 2, start_step=3)) == parts[1][3:]


@pytest.mark.parametrize("source", SOURCES)
def test_a_batch_that_does_not_divide_is_every_workers_whole(digits, source):
    """1437 examples are 14 batches of 96 and one of 93, which 4 replicas cannot share; 1293 leave 45."""
    settings = load(source=source)
    rows = Rows(digits)
    alone = rows(read(sources.training_batches(settings, digits, 96), epoch=1))
    workers = [
        rows(read(sources.training_batches(settings, digits, 96, InputShare(1, worker, 2, divisor=4)), epoch=1))
        for worker in range(2)
    ]
    assert len(alone[-1]) % 4
    assert {len(part) for part in workers[0][:-1]} == {48}
    assert [first + second for first, second in zip(*workers, strict=True)][:-1] == alone[:-1]
    assert workers[0][-1] == workers[1][-1] == alone[-1]


@pytest.mark.parametrize(
    ("drop", "steps_per_epoch", "start", "augmentation"),
    [(False, "null", 9, MIXED), (True, 40, 17, "{flip: true, crop_padding: 2}")],
)
def test_all_readers_get_the_same(tiny, small_blocks, drop, steps_per_epoch, start, augmentation):
    """200 examples are 15 batches of 13 and one of 5, so one worker of three, or a replica, gets less of the last."""
    settings = load(
        f"input.augmentation={augmentation}",
        f"input.drop_remainder={drop}",
        f"train.steps_per_epoch={steps_per_epoch}",
    )
    images, labels = Rows(tiny).images, Rows(tiny).labels
    dtype = np.float32 if settings.input.augmentation.mixes else np.int64
    alone = read(sources.training_batches(settings, tiny, 13), 2, start)
    steps = (16 - drop) if steps_per_epoch == "null" else steps_per_epoch
    assert len(alone) == steps - start
    for num_workers in (1, 2, 3):
        parts = []
        for worker in range(num_workers):
            batches = sources.training_batches(settings, tiny, 13, InputShare(1, worker, num_workers))
            assert [batches.size(2 * steps + start + i) for i in range(len(alone))] == [len(part) for _, part in alone]
            mine = read(batches, 2, start)
            assert_same(read_rows(batches, images, labels, 2, start), mine, dtype)
            parts.append(mine)
        # A worker's examples are augmented as one device would augment them.
        steps_of_all = (zip(*of_workers, strict=True) for of_workers in zip(*parts, strict=True))
        assert_same([tuple(map(np.concatenate, step)) for step in steps_of_all], alone, dtype)


@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_positions_are_arithmetic(make_dataset, data):
    total = data.draw(st.integers(1, 40), "total")
    size = data.draw(st.integers(1, total), "size")
    num_workers = data.draw(st.integers(1, 4), "num_workers")
    drop = data.draw(st.booleans(), "drop")
    images = np.zeros((total, 1, 1, 1), np.uint8)
    numbers = np.arange(total)  # The label is the row.
    prepared = make_dataset(f"numbered_{total}", total, train=(images, numbers), test=(images, numbers))
    in_pass = sources.training_batches(load(f"input.drop_remainder={drop}"), prepared, size).steps
    per_epoch = data.draw(st.none() | st.integers(1, 2 * in_pass + 1), "steps_per_epoch")
    settings = load(f"input.drop_remainder={drop}", f"train.steps_per_epoch={json.dumps(per_epoch)}")
    steps = per_epoch or in_pass
    start = data.draw(st.integers(0, steps), "start")

    passes = [order(total, settings.train.seed, number).tolist() for number in range(18)]
    wanted = [one[step * size : (step + 1) * size] for one in passes for step in range(in_pass)]
    for one in passes:
        assert sorted(one) == list(range(total)), "every example exactly once a pass"
    assert joined(wanted[:in_pass]) == passes[0][: total - total % size if drop else total]
    wanted = wanted[5 * steps + start : 6 * steps]

    parts = []
    for worker in range(num_workers):
        batches = sources.training_batches(settings, prepared, size, InputShare(1, worker, num_workers))
        mine = [labels.tolist() for _, labels in read(batches, 5, start)]
        assert mine == [batches.rows(5 * steps + start + i).tolist() for i in range(steps - start)]
        assert [batches.size(5 * steps + start + i) for i in range(len(mine))] == [len(batch) for batch in wanted]
        parts.append(mine)
    assert [joined(batch) for batch in zip(*parts, strict=True)] == wanted


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("source", SOURCES)
def test_without_shuffle_the_order_is_that_of_the_data(digits, source):
    batches = sources.training_batches(load("input.shuffle=false", source=source), digits, 100)
    rows = Rows(digits)
    assert rows.flat(read(batches, 0)) == rows.flat(read(batches, 1)) == list(range(NUM_TRAIN))


@pytest.mark.parametrize(
    ("source", "num_replicas"), [("array", 1), pytest.param("stream", 2, marks=pytest.mark.exhaustive)]
)
def test_evaluation_reads_every_example_once_in_order_and_as_it_is(digits, source, num_replicas):
    settings = load(
        "input.augmentation.flip=true",
        "input.augmentation.crop_padding=2",
        "input.drop_remainder=true",
        source=source,
        validation=100,
    )
    test = sources.ordered_batches(settings, digits, "test", 77, InputShare(num_replicas))
    assert (test.num_examples, test.steps) == (NUM_TEST, 5)
    assert Rows(digits, "test").flat(read(test)) == list(range(NUM_TEST))
    held_out = sources.ordered_batches(settings, digits, "validation", 33, InputShare(num_replicas))
    _, expected = carve(digits, 100, settings.train.seed)["validation"]
    rows = Rows(digits)
    assert rows.flat(read(held_out)) == rows.flat(read(held_out, epoch=1)) == expected.tolist()
    huge = sources.ordered_batches(settings, digits, "test", 10_000, InputShare(num_replicas))
    assert (huge.steps, huge.global_batch_size) == (1, NUM_TEST)
    assert Rows(digits, "test").flat(read(huge)) == list(range(NUM_TEST))


@pytest.mark.parametrize("source", STREAM_LATER)
@pytest.mark.parametrize(("num_workers", "size"), [(2, 77), (3, 179)])
def test_workers_share_an_evaluation_out(digits, source, num_workers, size):
    """With 179 the last batch has two examples: one of three workers gets none, and takes the step all the same."""
    rows = Rows(digits, "test")
    parts = [
        rows(
            read(sources.ordered_batches(load(source=source), digits, "test", size, InputShare(1, worker, num_workers)))
        )
        for worker in range(num_workers)
    ]
    assert len({len(part) for part in parts}) == 1
    steps = [joined(batch) for batch in zip(*parts, strict=True)]
    assert [len(step) for step in steps] == [size] * (NUM_TEST // size) + [NUM_TEST % size]
    assert joined(steps) == list(range(NUM_TEST))


@pytest.mark.parametrize("source", SOURCES)
def test_training_never_sees_a_validation_example(digits, source):
    rows = Rows(digits)
    seen = {}
    for seed in (0, 1):
        settings = load(f"train.seed={seed}", "input.cache=file", source=source, validation=437)
        train = rows.flat(read(sources.training_batches(settings, digits, 100), 1))
        held_out = rows.flat(read(sources.ordered_batches(settings, digits, "validation", 100), 1))
        assert (len(train), len(held_out)) == (1000, 437)
        assert sorted(train + held_out) == list(range(NUM_TRAIN))
        seen[seed] = set(held_out)
    # Also from a file that another seed left: each seed holds out other examples.
    assert seen[0] != seen[1]


# The thread behind ``arrays``; tests/tasks/test_ahead.py has what it does by itself.


@pytest.fixture
def small_blocks(monkeypatch):
    """Of five batches of ten images of 8 x 8 pixels."""
    monkeypatch.setattr(array, "BLOCK_BYTES", 5 * 10 * 8 * 8)


@pytest.mark.parametrize(("prefetch", "before"), [(0, 7), (3, 5)])
def test_what_fails_in_the_thread_fails_where_its_block_is_read(tiny, small_blocks, prefetch, before):
    batches, found = sources.training_batches(load(f"input.prefetch={prefetch}"), tiny, 10), []

    class Images(np.ndarray):
        """An array whose rows of step 7 cannot be read."""

        def take(self, rows, axis):
            if not {*batches.rows(7)}.isdisjoint(rows):
                raise OSError("the disk is gone")
            return np.asarray(self).take(rows, axis)

    class Source(array.ArraySource):
        def mapped(self):
            images, labels = super().mapped()
            return images.view(Images), labels

    batches.source = Source(batches.source.split, batches.source.rows)
    iterator = batches.arrays()
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(iterator)
    assert len(found) == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("input_")] == []


# The stream.


def test_a_stream_of_several_shards(digits, project):
    raw = project / "data" / "digits" / "raw"
    shutil.rmtree(raw / "digits")
    builder = builders.build("digits", digits.version, raw)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=5))
    assert len(list(raw.glob("**/digits-train.tfrecord*"))) == 5
    rows = Rows(digits)
    settings = load("input.shuffle_buffer=100", source="stream", validation=437)
    held_out = rows.flat(read(sources.ordered_batches(settings, digits, "validation", 100)))
    assert held_out == carve(digits, 437, 0)["validation"][1].tolist()
    train = rows.flat(read(sources.training_batches(settings, digits, 100)))
    assert sorted(train + held_out) == list(range(NUM_TRAIN))
    assert max(train[:100]) > 500, "a buffer of 100 examples mixes what lies in several shards"


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ("file", []),
        # Nothing but the cache itself reads on to the end of the data.
        pytest.param("memory", ["input.prefetch=0", "input.shuffle_buffer=10"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_cache_spares_the_shards_after_the_first_epoch(digits, project, cache, options):
    rows = Rows(digits)
    batches = sources.training_batches(load(f"input.cache={cache}", *options, source="stream"), digits, NUM_TRAIN // 3)
    iterator = iter(batches.dataset)
    # As Model.fit reads: so many steps, and never on to the end of the data.
    first = [(images.numpy(), labels.numpy()) for images, labels in (next(iterator) for _ in range(batches.steps))]
    del iterator
    assert sorted(rows.flat(first)) == list(range(NUM_TRAIN))
    shards = sorted((project / "data/digits/raw").glob("**/*.tfrecord*"))
    assert shards
    for shard in shards:
        shard.unlink()
    for epoch in (1, 2):
        assert sorted(rows.flat(read(batches, epoch))) == list(range(NUM_TRAIN))


def test_a_cache_is_whole_before_short_epochs_begin(digits, project):
    rows = Rows(digits)
    settings = load("input.cache=memory", "train.steps_per_epoch=2", "input.shuffle_buffer=10", source="stream")
    batches = sources.training_batches(settings, digits, NUM_TRAIN // 3)
    first = rows.flat(read(batches))
    for shard in sorted((project / "data/digits/raw").glob("**/*.tfrecord*")):
        shard.unlink()
    rest = [rows.flat(read(batches, epoch)) for epoch in (1, 2)]
    one_pass = NUM_TRAIN // 3 * 3
    for number in range(2):
        assert sorted(joined([first, *rest])[number * one_pass : (number + 1) * one_pass]) == list(range(NUM_TRAIN))


@pytest.mark.parametrize("buffer", [1, 50, 5000])
def test_the_shuffle_buffer_is_how_far_an_example_of_a_stream_can_come_forward(digits, buffer):
    rows = Rows(digits)
    batches = sources.training_batches(load(f"input.shuffle_buffer={buffer}", source="stream"), digits, 100)
    found = rows.flat(read(batches))
    assert sorted(found) == list(range(NUM_TRAIN))
    furthest = max(row - place for place, row in enumerate(found))
    assert furthest < buffer
    assert (found == sorted(found)) == (buffer == 1)


def test_two_datasets_of_one_name_are_not_mixed_up(make_dataset):
    """A process that serves several runs reads what is on the disk now."""
    for value in (1, 2):
        split = (np.full((4, 2, 2, 1), value, np.uint8), np.zeros(4, np.int64))
        prepared = make_dataset("constant", train=split, test=split)
        ((images, _),) = read(sources.ordered_batches(load(), prepared, "test", 4))
        assert images.flat[0] == value


# Augmentation.


def augmented(prepared, *overrides, epoch=0, seed=0):
    settings = load("input.shuffle=false", f"train.seed={seed}", *overrides)
    batches = sources.training_batches(settings, prepared, 50)
    return np.concatenate([images for images, _ in read(batches, epoch)])


@pytest.mark.parametrize("padding", [1, 3])
def test_a_crop_cuts_the_padded_image_anywhere(tiny, padding):
    original = np.load(tiny.splits["train"].features["image"])
    padded = np.pad(original, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    corners = [(top, left) for top in range(2 * padding + 1) for left in range(2 * padding + 1)]
    crops = np.stack([padded[:, top : top + 8, left : left + 8] for top, left in corners])
    matches = np.stack(
        [
            (augmented(tiny, f"input.augmentation.crop_padding={padding}", epoch=e) == crops).all((2, 3, 4))
            for e in range(4)
        ]
    )
    assert matches.any(1).all(), "every image is one of the crops"
    assert matches.any((0, 2)).all(), "every corner is drawn"


@pytest.mark.parametrize("source", SOURCES)
def test_augmented_examples_are_originals_and_what_is_read_of_them(digits, tiny, source):
    settings = load("input.augmentation={flip: true}", "input.validation=100", source=source)
    examples = sources.augmented_examples(settings, digits)
    assert examples.shape == (4, 8, 8, 8, 1)
    images = np.load(digits.splits["train"].features["image"])
    _, rows = carve(digits, 100, 0)["train"]
    np.testing.assert_array_equal(examples[[0, -1], 0], images[rows[[0, -1]]])
    flips = (examples[:, 1:] == examples[:, :1, :, ::-1]).all((2, 3, 4))
    same = (examples[:, 1:] == examples[:, :1]).all((2, 3, 4))
    assert (flips | same).all()
    assert flips.any()
    assert same.any()
    assert sources.augmented_examples(load(source=source), digits) is None


def test_a_stream_mixes_nothing(digits):
    with pytest.raises(UserError, match=r"input\.source = 'stream': input\.augmentation\.cutmix mixes .+cutmix=0$"):
        sources.training_batches(load("input.augmentation.cutmix=1.0", source="stream"), digits, 10)


def test_examples_of_the_report_are_mixed_with_each_other(digits):
    settings = load("input.augmentation.mixup=0.4")
    examples = sources.augmented_examples(settings, digits).astype(float)
    assert examples.shape == (4, 8, 8, 8, 1)
    originals = examples[:, 0].reshape(4, -1)
    for one in examples[:, 1:].reshape(28, -1):
        shares, *_ = np.linalg.lstsq(originals.T, one, rcond=None)
        assert np.abs(originals.T @ shares - one).max() < 2
        assert shares.sum() == pytest.approx(1, abs=0.02)


# Which examples are used for what: records alone, no arrays.


def sized(**splits):
    part = {"features": {"image": ""}, "labels": "", "sha256": {}, "class_counts": ()}
    return PREPARED.model_copy(
        update={"name": "sized", "splits": {name: PreparedSplit(num_examples=n, **part) for name, n in splits.items()}}
    )


@given(total=st.integers(2, 2000), share=st.floats(0.001, 0.999), exact=st.booleans(), seed=st.integers(0, 2**31 - 1))
def test_a_part_of_the_training_examples_is_carved(total, share, exact, seed):
    count = round(total * share)
    if not 0 < count < total:
        return
    use = carve(sized(train=total, test=5), count if exact else share, seed)
    train, held_out = use["train"][1].tolist(), use["validation"][1].tolist()
    assert (use["train"][0], use["validation"][0]) == ("train", "train")
    assert len(held_out) == count
    assert sorted(train + held_out) == list(range(total))
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert use["test"][0] == "test"
    assert use["test"][1].tolist() == list(range(5))


def test_the_draw_of_the_validation_examples_is_seeded_and_random():
    prepared = sized(train=1000, test=5)
    drawn = [carve(prepared, 100, seed)["validation"][1].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != list(range(100))
    assert 300 < np.mean(drawn[0]) < 700
    # The first epoch has an order of its own: else the validation examples would be those that come first in it.
    assert sorted(order(1000, 0, 0)[:100].tolist()) != drawn[0]


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(lambda counts: sum(counts) > 1),
    share=st.floats(0.001, 0.999),
)
def test_each_class_gives_the_same_share_and_keeps_an_example(counts, share):
    total, counts = sum(counts), np.array(counts)
    count = min(max(round(total * share), 1), total - 1)
    found = shares(counts, count)
    assert found.sum() == count
    assert (found >= 0).all()
    assert (found <= counts).all()
    many, there = counts > 1, counts > 0
    if count <= total - there.sum():
        assert (found < np.maximum(counts, 1)).all(), "one is left to train on"
    if many.sum() <= count <= total - there.sum():
        assert (found[many] > 0).all(), "and one to validate on"
    if share * counts[many].min(initial=60) > 1 and counts.min() * (1 - share) > 1:
        assert (abs(found - counts * count / total) < 1).all()


def test_ones_own_data_give_validation_examples_of_each_class(make_dataset):
    labels = np.repeat([0, 1, 2, 3], [100, 60, 37, 3])
    labels = labels[order(200, 7, 0)]
    images = np.zeros((200, 2, 2, 1), np.uint8)
    prepared = make_dataset("own", 5, train=(images, labels), test=(images[:5], labels[:5]))
    by_class = prepared.model_copy(update={"validation_by_class": True})
    drawn = []
    for seed in (0, 0, 1):
        use = carve(by_class, 0.1, seed)
        rows, held_out = use["train"][1], use["validation"][1]
        assert sorted([*rows, *held_out]) == list(range(200))
        assert rows.tolist() == sorted(rows)
        assert held_out.tolist() == sorted(held_out)
        assert np.bincount(labels[held_out], minlength=5).tolist() == [10, 6, 3, 1, 0]
        drawn.append(held_out.tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert 70 < np.mean(drawn[0]) < 130
    assert len(carve(by_class, 17, 0)["validation"][1]) == 17
    # What the record does not say this of is drawn as it always was.
    as_before = carve(prepared, 0.1, 0)["validation"][1].tolist()
    assert as_before == sorted(order(200, 0, None)[:20].tolist()) != drawn[0]
    assert "validation_by_class" not in prepared.model_dump_json()
    assert type(prepared).model_validate_json(by_class.model_dump_json()).validation_by_class


@pytest.mark.parametrize(
    ("splits", "validation", "expected"),
    [
        ("train test", None, {"train": "train", "test": "test"}),
        ("train test validation", None, {"train": "train", "test": "test"}),
        ("train test validation", "validation", {"train": "train", "validation": "validation", "test": "test"}),
        ("train test extra", "extra", {"train": "train", "validation": "extra", "test": "test"}),
        ("train test validation", 2, {"train": "train", "validation": "train", "test": "test"}),
    ],
)
def test_splits_by_name(splits, validation, expected):
    sizes = {"train": 9, "test": 4, "validation": 3, "extra": 5}
    use = carve(sized(**{name: sizes[name] for name in splits.split()}), validation, 0)
    assert {name: split for name, (split, _) in use.items()} == expected
    for name, (split, rows) in use.items():
        carved = {"train": 7, "validation": 2} if validation == 2 else {}
        assert len(rows) == carved.get(name, sizes[split])


@pytest.mark.parametrize(
    ("splits", "validation", "said"),
    [
        (
            "train test",
            "valid",
            "input.validation = 'valid': dataset sized has no such split .* Allowed: a fraction",
        ),
        ("train test", "train", "input.validation = 'train'"),
        ("train test", 9, "input.validation = 9: takes 9 of the 9 training examples .* from 1 to 8"),
        ("train test", 5000, "input.validation = 5000: takes 5000 of the 9"),
        ("train test", 0.01, "input.validation = 0.01: takes 0 of the 9"),
        # Reports, the registry and comparisons take the split `test` for what was tested on.
        ("train test", "test", "nothing is left to test on. Set input.validation=0.1"),
        ("train test validation", "test", "nothing is left to test on. Set input.validation=validation"),
        ("train validation", "validation", "nothing is left to test on. Prepare it again, .* --force"),
        ("train validation", None, "nothing is left to test on. Prepare it again, .* --force"),
        ("train validation", 0.5, "nothing is left to test on. Prepare it again, .* --force"),
        ("train", None, "nothing is left to test on. Prepare it again, .* --force"),
    ],
)
def test_a_wrong_split_gives_one_message(splits, validation, said):
    with pytest.raises(UserError, match=said) as error:
        carve(sized(**dict.fromkeys(splits.split(), 9)), validation, 0)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_data_without_a_training_split_are_refused_before_a_run():
    with pytest.raises(UserError, match=r"dataset digits has no split 'train' \(it has test\): choose another"):
        config.load(prepared=sized(test=9))


def test_a_batch_larger_than_the_split_is_refused(digits):
    settings = load(validation=437)
    assert sources.training_batches(settings, digits, 1000).steps == 1
    with pytest.raises(UserError, match=re.escape("global batch of 1001 examples is larger than the training split")):
        sources.training_batches(settings, digits, 1001)


def test_the_order_stays_the_same_with_other_versions_and_machines():
    # Raw Philox words, which NumPy promises never to change; a change here makes every resumed run read other data.
    assert order(8, 0, 0).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert order(8, 123, 45).tolist() == [5, 4, 1, 6, 7, 2, 0, 3]

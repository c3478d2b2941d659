import contextlib
import gc
import hashlib
import json
import logging
import re
import shutil
import sys
import threading
import tracemalloc
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from tasks import config, datasets
from tasks.errors import UserError
from tasks.input import array, sources
from tasks.input.augment import RAND_AUGMENT, augment, augment_batch, check_augmentation, pass_draws, with_partners
from tasks.input.batches import Batches
from tasks.input.order import carve, order
from tasks.records import Feature, PreparedDataset, PreparedSplit, Target

SOURCES = ["array", "stream"]
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
    """One epoch, or the rest of one: (images, labels) of each element."""
    batches.epoch, batches.start_step = epoch, start_step
    return [(images.numpy(), labels.numpy()) for images, labels in batches.dataset]


def read_arrays(batches, epoch=0, start_step=0):
    """The same without TensorFlow: (images, labels) of each step."""
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


def put_together(elements, count):
    """Every ``count`` elements as one."""
    groups = [elements[i : i + count] for i in range(0, len(elements), count)]
    return [tuple(np.concatenate(parts) for parts in zip(*group, strict=True)) for group in groups]


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


@pytest.mark.parametrize("source", SOURCES)
def test_elements_are_bytes_and_whole_numbers(digits, source):
    images, labels = sources.training_batches(load(source=source), digits, 479).dataset.element_spec
    assert images.dtype == "uint8"
    assert labels.dtype == "int64"
    assert images.shape[1:] == (8, 8, 1)
    assert labels.shape.rank == 1


@pytest.mark.parametrize("source", SOURCES)
def test_the_order_is_that_of_seed_and_epoch(digits, source):
    rows = Rows(digits)

    def order(seed, epoch, before=()):
        batches = sources.training_batches(load(f"train.seed={seed}", source=source), digits, 128)
        for earlier in before:
            read(batches, earlier)
        return rows.flat(read(batches, epoch))

    assert order(0, 2) == order(0, 2, before=[0, 1]) == order(0, 2, before=[5, 2])
    assert order(0, 2) != order(1, 2)
    assert order(0, 2) != order(0, 3)
    assert order(0, 1) != order(1, 0), "seeds and epochs are not added up"


# First what JAX reads, with as little as it needs, then the datasets.
ORDERS = """
import hashlib, json, sys
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

import tensorflow as tf
tf.random.set_seed(77)
hide = tf.config.set_visible_devices
found["hidden"] = []
tf.config.set_visible_devices = lambda *args: found["hidden"].append(args) or hide(*args)
for source in ("stream", "array"):
    if source == "stream":
        found["stream arrays"] = digests(training(source)[1].arrays())
    found[source] = digests((x.numpy(), y.numpy()) for x, y in training(source)[1].dataset)
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
        assert there[source] == there[f"{source} arrays"] == here, source
    assert there["imported"] == []
    assert there["hidden"] == [[[], "GPU"]], "for the stream that JAX reads, and for nothing else"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("augmentation", ["{flip: false, crop_padding: 0}", ALL_KINDS])
@pytest.mark.parametrize("start", [1, 7, 14])
def test_a_later_start_is_the_rest_of_the_epoch(digits, source, augmentation, start):
    batches = sources.training_batches(load(f"input.augmentation={augmentation}", source=source), digits, 100)
    whole, rest = read(batches, 3), read(batches, 3, start)
    assert len(whole) == 15
    assert len(rest) == 15 - start
    for (images, labels), (same_images, same_labels) in zip(whole[start:], rest, strict=True):
        np.testing.assert_array_equal(images, same_images)
        np.testing.assert_array_equal(labels, same_labels)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_get_even_pieces_of_the_same_batches_in_order(digits, source, num_replicas):
    settings = load("input.augmentation.flip=true", "input.augmentation.crop_padding=1", source=source)
    alone = read(sources.training_batches(settings, digits, 96), epoch=1)
    pieces = read(sources.training_batches(settings, digits, 96, num_replicas), epoch=1)
    assert len(pieces) == num_replicas * len(alone)
    for i, (images, labels) in enumerate(alone):
        mine = pieces[i * num_replicas : (i + 1) * num_replicas]
        sizes = [len(part) for _, part in mine]
        assert max(sizes) - min(sizes) <= 1
        np.testing.assert_array_equal(np.concatenate([part for part, _ in mine]), images)
        np.testing.assert_array_equal(np.concatenate([part for _, part in mine]), labels)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("num_workers", "size"), [(2, 100), (3, 100), (5, 7)])
def test_workers_share_an_epoch_out(digits, source, num_workers, size, drop):
    settings = load(f"input.drop_remainder={drop}", source=source)
    rows = Rows(digits)
    alone = sources.training_batches(settings, digits, size)
    workers = [
        sources.training_batches(settings, digits, size, worker=i, num_workers=num_workers) for i in range(num_workers)
    ]
    parts = [rows(read(worker, epoch=2)) for worker in workers]
    assert [len(part) for part in parts] == [alone.steps] * num_workers, "nobody waits for a worker that is done"
    together = Counter(row for part in parts for batch in part for row in batch)
    assert max(together.values()) == 1
    assert sorted(together) == sorted(rows.flat(read(alone, epoch=2)))
    for step in range(alone.steps - 1):
        assert sum(len(part[step]) for part in parts) == size
    assert rows(read(workers[1], 2, start_step=3)) == parts[1][3:]


@pytest.mark.parametrize(
    ("drop", "steps_per_epoch", "start", "augmentation"),
    [
        pytest.param(False, "null", 0, ALL_KINDS, marks=pytest.mark.slow),
        (False, "null", 9, MIXED),
        *(
            (*way, "{flip: true, crop_padding: 2}")
            for way in [(False, "null", 9), (True, "null", 3), (False, 6, 2), (False, 40, 0), (True, 40, 17)]
        ),
    ],
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
    alone = read_arrays(sources.training_batches(settings, tiny, 13), 2, start)
    steps = (16 - drop) if steps_per_epoch == "null" else steps_per_epoch
    assert len(alone) == steps - start
    for num_workers, num_replicas in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]:
        parts = []
        for worker in range(num_workers):
            batches = sources.training_batches(settings, tiny, 13, num_replicas, worker, num_workers)
            assert [batches.size(2 * steps + start + i) for i in range(len(alone))] == [len(part) for _, part in alone]
            mine = read_arrays(batches, 2, start)
            assert_same(put_together(read(batches, 2, start), num_replicas), mine, dtype)
            assert_same(read_rows(batches, images, labels, 2, start), mine, dtype)
            parts.append(mine)
        # A worker's examples are augmented as one device would augment them.
        assert_same([put_together(batch, num_workers)[0] for batch in zip(*parts, strict=True)], alone, dtype)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("per_epoch", "epochs"), [(1, [0, 14, 15, 44]), (4, [2, 3, 4]), (15, [1]), (16, [0, 1]), (40, [0])]
)
def test_an_epoch_of_some_steps_goes_on_where_the_one_before_stopped(digits, source, per_epoch, epochs):
    options = ["input.augmentation={flip: true, crop_padding: 1}"]
    passes = sources.training_batches(load(*options, source=source), digits, 100)
    wanted = joined(read(passes, number) for number in range(3))
    batches = sources.training_batches(load(*options, f"train.steps_per_epoch={per_epoch}", source=source), digits, 100)
    assert (batches.steps, batches.steps_in_pass) == (per_epoch, 15)
    for epoch in epochs:
        assert_same(read(batches, epoch), wanted[epoch * per_epoch : (epoch + 1) * per_epoch])


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_positions_are_arithmetic(make_dataset, data):
    total = data.draw(st.integers(1, 40), "total")
    size = data.draw(st.integers(1, total), "size")
    num_workers = data.draw(st.integers(1, 4), "num_workers")
    num_replicas = data.draw(st.integers(1, 3), "num_replicas")
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
        batches = sources.training_batches(settings, prepared, size, num_replicas, worker, num_workers)
        elements = [labels.tolist() for _, labels in read(batches, 5, start)]
        assert len(elements) == (steps - start) * num_replicas
        mine = [joined(elements[i : i + num_replicas]) for i in range(0, len(elements), num_replicas)]
        assert mine == [labels.tolist() for _, labels in read_arrays(batches, 5, start)]
        assert mine == [batches.rows(5 * steps + start + i).tolist() for i in range(len(mine))]
        assert [batches.size(5 * steps + start + i) for i in range(len(mine))] == [len(batch) for batch in wanted]
        parts.append(mine)
    assert [joined(batch) for batch in zip(*parts, strict=True)] == wanted


@pytest.mark.parametrize("source", SOURCES)
def test_without_shuffle_the_order_is_that_of_the_data(digits, source):
    batches = sources.training_batches(load("input.shuffle=false", source=source), digits, 100)
    rows = Rows(digits)
    assert rows.flat(read(batches, 0)) == rows.flat(read(batches, 1)) == list(range(NUM_TRAIN))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_evaluation_reads_every_example_once_in_order_and_as_it_is(digits, source, num_replicas):
    settings = load(
        "input.augmentation.flip=true",
        "input.augmentation.crop_padding=2",
        "input.drop_remainder=true",
        source=source,
        validation=100,
    )
    test = sources.ordered_batches(settings, digits, "test", 77, num_replicas)
    assert (test.num_examples, test.steps) == (NUM_TEST, 5)
    assert Rows(digits, "test").flat(read(test)) == list(range(NUM_TEST))
    held_out = sources.ordered_batches(settings, digits, "validation", 33, num_replicas)
    _, expected = carve(digits, 100, settings.train.seed)["validation"]
    rows = Rows(digits)
    assert rows.flat(read(held_out)) == rows.flat(read(held_out, epoch=1)) == expected.tolist()
    huge = sources.ordered_batches(settings, digits, "test", 10_000, num_replicas)
    assert (huge.steps, huge.global_batch_size) == (1, NUM_TEST)
    assert Rows(digits, "test").flat(read(huge)) == list(range(NUM_TEST))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("num_workers", "size"), [(2, 77), (3, 50), (3, 179)])
def test_workers_share_an_evaluation_out(digits, source, num_workers, size):
    """With 179 the last batch has two examples: one of three workers gets none, and takes the step all the same."""
    rows = Rows(digits, "test")
    parts = [
        rows(read(sources.ordered_batches(load(source=source), digits, "test", size, 2, worker, num_workers)))
        for worker in range(num_workers)
    ]
    assert len({len(part) for part in parts}) == 1
    steps = [joined(part[i] + part[i + 1] for part in parts) for i in range(0, len(parts[0]), 2)]
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


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("prefetch", [0, 3, "auto"])
def test_prefetch_changes_no_batch(digits, source, prefetch):
    rows = Rows(digits)
    expected = rows(read(sources.training_batches(load(source=source), digits, 200), 1))
    batches = sources.training_batches(load(f"input.prefetch={prefetch}", source=source), digits, 200)
    assert rows(read(batches, 1)) == expected
    assert (b"PrefetchDataset" in batches.dataset._as_serialized_graph(allow_stateful=True).numpy()) == bool(prefetch)


# The thread behind ``arrays``.


def gathering():
    return [thread for thread in threading.enumerate() if thread.name.startswith("input_")]


@pytest.fixture
def watched(tiny):
    """Batches of which the steps that were gathered are known, and an event for each."""

    class Images(np.ndarray):
        """An array that tells which rows are taken."""

        def take(self, rows, axis):
            self.taken(rows)
            return np.asarray(self).take(rows, axis)

    def watched(prefetch, failing=None):
        batches = sources.training_batches(load(f"input.prefetch={prefetch}"), tiny, 10)
        batches.seen, batches.gathered = [], [threading.Event() for _ in range(20)]
        step_of = {row: step for step in range(20) for row in batches.rows(step)}

        def watching(rows):
            for step in dict.fromkeys(step_of[row] for row in rows):
                batches.seen.append(step)
                batches.gathered[step].set()
                if step == failing:
                    raise OSError("the disk is gone")

        class Source(array.ArraySource):
            def mapped(self):
                images, labels = super().mapped()
                watched = images.view(Images)
                watched.taken = watching
                return watched, labels

        batches.source = Source(batches.source.split, batches.source.rows)
        return batches

    assert gathering() == []
    return watched


@pytest.fixture
def small_blocks(monkeypatch):
    """Of five batches of ten images of 8 x 8 pixels."""
    monkeypatch.setattr(array, "BLOCK_BYTES", 5 * 10 * 8 * 8)


def test_what_an_epoch_takes_does_not_grow_with_its_steps(tiny):
    batches = sources.training_batches(load("train.steps_per_epoch=10000000"), tiny, 13)
    for first in (lambda: next(batches.arrays()), lambda: next(iter(batches.dataset.take(1)))):
        tracemalloc.start()
        assert len(first()[1]) == 13
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 50_000_000


@pytest.mark.parametrize("prefetch", [1, "auto"])
@pytest.mark.parametrize("end", ["close", "drop"])
def test_batches_are_gathered_ahead_until_nobody_wants_them(watched, small_blocks, prefetch, end):
    batches = watched(prefetch)
    iterator = batches.arrays()
    next(iterator)
    assert batches.gathered[14].wait(60), "nobody has asked for this one yet"
    assert len(gathering()) == 1
    if end == "close":
        iterator.close()
    else:
        del iterator
        gc.collect()
    assert gathering() == []
    assert batches.seen == list(range(15))


def test_without_prefetch_nothing_is_gathered_ahead(watched):
    batches = watched(0)
    iterator = batches.arrays()
    next(iterator)
    assert gathering() == []
    assert batches.seen == [0]
    assert len(list(iterator)) == 19


@pytest.mark.parametrize("prefetch", [0, 1, 1000])
def test_an_epoch_ends_its_thread(watched, small_blocks, prefetch):
    batches = watched(prefetch)
    assert len(read_arrays(batches)) == 20
    assert gathering() == []
    assert batches.seen == list(range(20))
    assert read_arrays(batches, 0, 20) == []


@pytest.mark.parametrize(("prefetch", "before"), [(0, 7), (3, 5)])
def test_what_fails_in_the_thread_fails_where_its_block_is_read(watched, small_blocks, prefetch, before):
    batches, found = watched(prefetch, failing=7), []
    iterator = batches.arrays()
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(iterator)
    assert len(found) == before
    assert gathering() == []


def test_only_an_array_says_which_rows_a_step_reads(digits):
    with pytest.raises(ValueError, match="shuffled in a buffer"):
        sources.training_batches(load(source="stream"), digits, 100).rows(0)
    with pytest.raises(ValueError, match="counted, not read"):
        Batches(33, 8, drop_remainder=False).dataset  # noqa: B018


# The stream.


def test_a_stream_of_several_shards(digits, project):
    raw = project / "data" / "digits" / "raw"
    shutil.rmtree(raw / "digits")
    builder = datasets.build("digits", digits.version, raw)
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
        ("memory", []),
        ("file", []),
        ("none", []),
        # Nothing but the cache itself reads on to the end of the data.
        ("memory", ["input.prefetch=0", "input.shuffle_buffer=10"]),
        ("file", ["input.prefetch=0", "input.shuffle_buffer=10"]),
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
    if cache == "none":
        with pytest.raises(Exception, match="No such file"):
            read(batches, 1)
    else:
        for epoch in (1, 2):
            assert sorted(rows.flat(read(batches, epoch))) == list(range(NUM_TRAIN))


@pytest.mark.parametrize("cache", ["memory", "file"])
def test_a_cache_is_whole_before_short_epochs_begin(digits, project, cache):
    rows = Rows(digits)
    settings = load(f"input.cache={cache}", "train.steps_per_epoch=2", "input.shuffle_buffer=10", source="stream")
    batches = sources.training_batches(settings, digits, NUM_TRAIN // 3)
    first = rows.flat(read(batches))
    for shard in sorted((project / "data/digits/raw").glob("**/*.tfrecord*")):
        shard.unlink()
    rest = [rows.flat(read(batches, epoch)) for epoch in (1, 2)]
    one_pass = NUM_TRAIN // 3 * 3
    for number in range(2):
        assert sorted(joined([first, *rest])[number * one_pass : (number + 1) * one_pass]) == list(range(NUM_TRAIN))


def test_a_file_cache_is_its_runs_own_and_goes_with_it(digits, project):
    before = set((project / "mlruns").iterdir())
    settings = load("input.cache=file", source="stream")
    first, second = (sources.training_batches(settings, digits, 100) for _ in range(2))
    for (_, labels), (_, same_labels) in zip(first.dataset, second.dataset, strict=True):
        np.testing.assert_array_equal(labels, same_labels)
    assert len(set((project / "mlruns").iterdir()) - before) == 2
    first.close()
    assert len(read(second, 1)) == second.steps
    second.close()
    assert set((project / "mlruns").iterdir()) == before


@pytest.mark.parametrize("buffer", [1, 50, 5000])
def test_the_shuffle_buffer_is_how_far_an_example_of_a_stream_can_come_forward(digits, buffer):
    rows = Rows(digits)
    batches = sources.training_batches(load(f"input.shuffle_buffer={buffer}", source="stream"), digits, 100)
    found = rows.flat(read(batches))
    assert sorted(found) == list(range(NUM_TRAIN))
    furthest = max(row - place for place, row in enumerate(found))
    assert furthest < buffer
    assert (found == sorted(found)) == (buffer == 1)


@pytest.mark.parametrize(("asked", "chosen"), [("auto", "array"), ("array", "array"), ("stream", "stream")])
def test_the_source_is_said(digits, asked, chosen, caplog):
    settings = load("input.memory_budget_bytes=1", source=asked)
    with caplog.at_level(logging.INFO, logger="tasks"):
        batches = sources.training_batches(settings, digits, 100)
    assert f"{chosen} source" in caplog.text
    assert sorted(Rows(digits).flat(read(batches))) == list(range(NUM_TRAIN))


@contextlib.contextmanager
def private_bytes():
    """Yield a list of how much memory this process has that no file can give back, measured all the time."""
    found, ended = [], threading.Event()

    def measure():
        (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        found.append(1000 * int(kilobytes))

    def watch():
        while not ended.wait(0.002):
            measure()

    measure()
    watching = threading.Thread(target=watch)
    watching.start()
    yield found
    ended.set()
    watching.join()


@pytest.mark.parametrize("read", [lambda batches: iter(batches.dataset), lambda batches: batches.arrays()])
def test_an_array_larger_than_the_memory_is_read_as_it_lies(project, read):
    num_examples = 200_000
    for name, dtype, shape in [("images", "uint8", (64, 64)), ("labels", "int64", ())]:
        written = np.lib.format.open_memmap(f"{name}.npy", "w+", dtype, (num_examples, *shape))
        written[::100] = 3  # All else are holes of the file.
        written.flush()
    split = PreparedSplit(
        num_examples=num_examples, features={"image": "images.npy"}, labels="labels.npy", sha256={}, class_counts=()
    )
    source = array.ArraySource(split, np.arange(num_examples))
    batches = Batches(num_examples, 100, drop_remainder=False, source=source, shuffle=True)
    rows = [batches.rows(step) for step in range(20)]
    with private_bytes() as private:
        for (images, labels), own in zip(read(batches), rows, strict=False):
            expected = np.where(own % 100 == 0, 3, 0)
            np.testing.assert_array_equal(labels, expected)
            np.testing.assert_array_equal(np.asarray(images)[:, 63, 63], expected)
    assert max(private) - private[0] < num_examples * 64 * 64 / 10
    mappings = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    flags = [mapping.rpartition("VmFlags:")[2].split() for mapping in mappings if "/images.npy\n" in mapping]
    assert any("rr" in of_one for of_one in flags), "no more than the rows are read"


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


def test_a_flip_mirrors_about_half_of_the_images_left_to_right(tiny):
    original = np.load(tiny.splits["train"].features["image"])
    images = augmented(tiny, "input.augmentation.flip=true")
    same = (images == original).all((1, 2, 3))
    mirrored = (images == original[:, :, ::-1]).all((1, 2, 3))
    assert (same | mirrored).all()
    assert 70 <= mirrored.sum() <= 130  # Of 200: five standard deviations are 35.


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


def test_flip_and_crop_together(tiny):
    original = np.load(tiny.splits["train"].features["image"])
    padded = np.pad(np.stack([original, original[:, :, ::-1]]), [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)])
    crops = np.concatenate([padded[:, :, top : top + 8, left : left + 8] for top in range(3) for left in range(3)])
    images = augmented(tiny, "input.augmentation.flip=true", "input.augmentation.crop_padding=1")
    matches = (images == crops).all((2, 3, 4))
    assert matches.any(0).all()
    assert matches.any(1).all()


OFF = config.Augmentation(
    flip=False, crop_padding=0, translation=0, rotation=0, zoom=0, fill_mode="constant", brightness=0, contrast=0,
    rand_augment=None, erasing=0, mixup=0, cutmix=0,
)  # fmt: skip
MOST = {
    "flip": True, "crop_padding": 2, "translation": 1.0, "rotation": 1.0, "zoom": 1.0, "brightness": 1.0,
    "contrast": 1.0, "rand_augment": config.RandAugment(num_layers=3, magnitude=10), "erasing": 1.0,
}  # fmt: skip


def section_of(**values):
    return OFF.model_copy(update=values)


@pytest.mark.slow  # What compiles in each example takes half a minute.
@hypothesis_settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_numpy_tensorflow_and_xla_augment_alike(data):
    count, seed = data.draw(st.integers(0, 5), "count"), data.draw(st.integers(0, 100), "seed")
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4])), "shape")
    on = data.draw(st.sets(st.sampled_from(sorted(MOST))), "on")
    fill_mode = data.draw(st.sampled_from(["constant", "nearest", "reflect"]), "fill_mode")
    section = section_of(fill_mode=fill_mode, **{key: MOST[key] for key in on})
    images = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
    draws = pass_draws(count, seed, 0, section)
    assert draws.dtype == np.int32
    here = augment(images, draws, section)
    assert here.dtype == np.uint8
    assert here.shape == images.shape
    for jit_compile in (False, True):
        traced = tf.function(lambda *args: augment(*args, section), jit_compile=jit_compile)
        np.testing.assert_array_equal(traced(tf.constant(images), tf.constant(draws)).numpy(), here)


@pytest.mark.parametrize("num_classes", [3, 0])
@pytest.mark.parametrize("channels", [1, 3])
def test_numpy_tensorflow_and_xla_mix_alike(num_classes, channels):
    rng = np.random.default_rng(channels)
    section = section_of(mixup=0.5, cutmix=1.0, rand_augment=config.RandAugment(num_layers=2, magnitude=9))
    draws = pass_draws(60, 3, 0, section)
    places = with_partners(np.arange(60), draws)
    labels = rng.integers(0, 3, 60) if num_classes else rng.integers(0, 2, (60, 4)).astype(np.float32)
    batch = (
        rng.integers(0, 256, (60, 7, 9, channels), np.uint8)[places],
        labels[places],
        rng.random(60, np.float32)[places],
    )
    here = augment_batch(batch, draws[places], section, num_classes)
    assert [one.dtype for one in here] == [np.uint8, np.float32, np.float32]
    assert [one.shape for one in here] == [(60, 7, 9, channels), (60, num_classes or 4), (60,)]
    for jit_compile in (False, True):
        traced = tf.function(lambda *args: augment_batch(*args, section, num_classes), jit_compile=jit_compile)
        there = [one.numpy() for one in traced(tuple(map(tf.constant, batch)), tf.constant(draws[places]))]
        np.testing.assert_array_equal(there[0], here[0])
        np.testing.assert_array_equal(there[1], here[1])
        np.testing.assert_allclose(there[2], here[2], rtol=1e-6)


def test_the_draws_stay_the_same_with_other_versions_and_machines():
    """As with the order: raw words, made a draw here."""
    two = {"seed": 123, "worker": 1, "num_workers": 2}
    draws = Batches(8, 4, False, **two, augmentation=section_of(flip=True, crop_padding=2)).draws(2 * 45 + 1)
    assert draws.dtype == np.int32
    assert draws.tolist() == [[1, 1, 1], [1, 3, 3]]
    one_layer = MOST | {"rand_augment": config.RandAugment(num_layers=1, magnitude=10)}
    assert Batches(8, 4, False, **two, augmentation=section_of(**one_layer)).draws(2 * 45 + 1).tolist() == [
        [
            1, 1, 1, 7822, -13325, 13325, 7822, -7203, -25711, -137, 320,
            65536, 0, 0, 65536, 0, 0, 256, 256, 256, 256, 0, 1, 0, 0, 48449, 50898, 25648, 12175,
        ],
        [
            1, 3, 3, 111818, -23325, 23325, 111818, -34731, 50211, 40, 475,
            65536, 0, 0, 65536, 0, 29491, 256, 256, 256, 256, 256, 1, 0, 0, 22636, 13637, 37443, 13234,
        ],
    ]  # fmt: skip
    section = section_of(mixup=1.0, cutmix=1.0)
    assert Batches(8, 4, False, **two, augmentation=section).draws(2 * 45 + 1)[:, 0, 3:].tolist() == [
        [5, 194, 10533, 53981, 0], [6, 256, 32493, 22376, 27199],
    ]  # fmt: skip


def test_what_one_key_draws_does_not_depend_on_the_others():
    together = pass_draws(50, 0, 0, section_of(**MOST))
    columns = {
        "flip": [0], "crop_padding": [1, 2], "brightness": [9], "contrast": [10], "rand_augment": range(11, 53),
        "erasing": range(53, 57),
    }  # fmt: skip
    for key, places in columns.items():
        alone = pass_draws(50, 0, 0, section_of(**{key: MOST[key]}))
        own = alone[:, places] if key in ("flip", "crop_padding") else alone[:, 3:]
        np.testing.assert_array_equal(together[:, places], own, err_msg=key)


def test_every_draw_is_as_likely_and_has_nothing_to_do_with_the_order():
    section = section_of(flip=True, crop_padding=1)
    batches = Batches(18_000, 18_000, False, augmentation=section)
    draws = batches.draws(0)
    counts = Counter(map(tuple, draws.tolist()))
    assert len(counts) == 18
    assert 800 < min(counts.values()) <= max(counts.values()) < 1200  # Of 1000: six standard deviations are 190.
    for drawn in draws.T:
        assert abs(np.corrcoef(drawn, order(18_000, 0, 0))[0, 1]) < 0.05
    assert batches.draws(1)[:, 0].tolist() != draws[:, 0].tolist()
    still = Batches(50, 50, False, augmentation=section_of(crop_padding=1))
    assert not still.draws(0)[:, 0].any()
    assert Batches(50, 50, False).draws(0) is None


def test_the_numbers_drawn_are_even_and_of_each_other_free():
    keys = {"translation": 0.2, "brightness": 0.5, "contrast": 1.0, "erasing": 0.25}
    draws = pass_draws(20_000, 0, 0, section_of(**keys)).T
    down, right, brightness, contrast, top, left, height, width = draws[[7, 8, 9, 10, 11, 12, 13, 14]].astype(float)
    erased = height > 0
    assert abs(erased.mean() - 0.25) < 0.02  # Six standard deviations are 0.018.
    ranges = {
        "down": (down, -0.2 * 65536, 0.2 * 65536), "right": (right, -0.2 * 65536, 0.2 * 65536),
        "brightness": (brightness, -127.5, 127.5), "contrast": (contrast, 0, 512),
        "top": (top, 0, 65536), "left": (left, 0, 65536),
        "height": ((height[erased] / 65536) ** 2, 0.02, 0.33), "width": ((width[erased] / 65536) ** 2, 0.02, 0.33),
    }  # fmt: skip
    for name, (drawn, least, most) in ranges.items():
        shares = np.histogram(drawn, 8, (least - 1e-4, most + 1e-4))[0] / len(drawn)
        assert np.abs(shares - 1 / 8).max() < 0.03, name
    assert np.abs(np.corrcoef(draws[7:13]) - np.eye(6)).max() < 0.05


# What each kind does, by draws that are made here.


def changed(images, draws, **on):
    """The images with these draws in the place of those of the pass."""
    return augment(images, np.array([[0, 0, 0, *draws]] * len(images), np.int32), section_of(**on))


def mixed(images, labels, draws, **on):
    """Pairs of images and labels of three classes, each mixed to one by these draws: image, shares of the classes."""
    drawn = np.zeros((len(images), 2, 8), np.int32)
    drawn[:, 0, 3:] = draws
    return augment_batch((images, labels), drawn, section_of(**on), 3)


@pytest.mark.parametrize("kept", [0, 64, 255, 256])
def test_mixup_adds_shares_of_images_and_labels(kept):
    images = np.stack([random_images(5, 4, 6, 3), random_images(5, 4, 6, 3, seed=1)], 1)
    found, shares = mixed(images, np.array([[0, 2]] * 5), [0, kept, 0, 0, 0], mixup=1.0)
    wanted = (images[:, 0] * float(kept) + images[:, 1] * float(256 - kept)) / 256
    assert np.abs(found - wanted).max() <= 0.5
    assert shares.tolist() == [[kept / 256, 0, 1 - kept / 256]] * 5


@pytest.mark.parametrize(
    ("y", "x", "side", "rows", "lines"),
    [(0.5, 0.5, 0.5, (2, 6), (5, 15)), (0.0, 0.92, 0.5, (0, 2), (13, 20)), (0.5, 0.5, 0, (0, 0), (0, 0)),
     (0.5, 0.5, 1, (0, 8), (0, 20))],
)  # fmt: skip
def test_cutmix_takes_a_rectangle_and_its_area_of_the_label(y, x, side, rows, lines):
    """Of 8 x 20 pixels, also where the rectangle reaches over the edge."""
    images = np.stack([random_images(2, 8, 20, 1), random_images(2, 8, 20, 1, seed=1)], 1)
    draws = [0, 256, *(round(65536 * share) for share in (y, x, side))]
    found, shares = mixed(images, np.array([[0, 1], [2, 2]]), draws, cutmix=1.0)
    wanted, taken = images[:, 0].copy(), np.diff(rows)[0] * np.diff(lines)[0] / 160
    wanted[:, slice(*rows), slice(*lines)] = images[:, 1, slice(*rows), slice(*lines)]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(shares, [[1 - taken, taken, 0], [0, 0, 1]], atol=1 / 512)


def test_shares_are_drawn_of_their_distributions():
    """Against scipy's own draws: the share of mixup, and the area of cutmix before the edge cuts it off."""
    from scipy import stats

    draws = pass_draws(20_000, 0, 0, section_of(mixup=0.4, cutmix=2.0))[:, -5:].T
    partner, kept, y, x, side = draws.astype(float)
    cuts = kept == 256
    cuts &= side > 0
    assert abs(cuts.mean() - 0.5) < 0.03  # The root of 0.25 / 20,000 is 0.0035.
    assert not side[~cuts].any()
    up_to = [(kept[~cuts] <= number).mean() for number in range(257)]  # Each number stands for what is rounded to it.
    assert np.abs(up_to - stats.beta(0.4, 0.4).cdf((np.arange(257) + 0.5) / 256)).max() < 0.03
    even = {"partner": partner / 20_000, "y": y / 65536, "x": x / 65536}
    for name, found, wanted in [
        ("cutmix", 1 - (side[cuts] / 65536) ** 2, stats.beta(2.0, 2.0)),
        *((name, drawn, stats.uniform()) for name, drawn in even.items()),
    ]:  # fmt: skip
        assert stats.kstest(found + 1e-9, wanted.cdf).statistic < 0.03, name
    assert np.abs(np.corrcoef([partner, y, x, np.arange(20_000)]) - np.eye(4)).max() < 0.05
    assert not pass_draws(50, 0, 0, section_of(mixup=0.4))[:, -1].any()
    assert (pass_draws(50, 0, 0, section_of(cutmix=2.0))[:, -4] == 256).all()


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("side", [4, 5])
@pytest.mark.parametrize("fill_mode", ["constant", "nearest", "reflect"])
def test_a_quarter_turn_is_numpys(turns, side, fill_mode):
    images = random_images(3, side, side, 3)
    cosine, sine = round(np.cos(turns * np.pi / 2)), round(np.sin(turns * np.pi / 2))
    draws = np.array([cosine, sine, -sine, cosine, 0, 0]) * 65536
    found = changed(images, draws, rotation=0.5, fill_mode=fill_mode)
    np.testing.assert_array_equal(found, np.rot90(images, turns, axes=(1, 2)))


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, -2), (-3, 5)])
@pytest.mark.parametrize(
    ("fill_mode", "pad"), [("constant", "constant"), ("nearest", "edge"), ("reflect", "symmetric")]
)
def test_a_shift_by_whole_pixels_cuts_the_padded_image(down, right, fill_mode, pad):
    images = random_images(2, 4, 8, 3)
    draws = [65536, 0, 0, 65536, down * 65536 // 4, right * 65536 // 8]
    padded = np.pad(images, [(0, 0), (8, 8), (8, 8), (0, 0)], pad)
    found = changed(images, draws, translation=1.0, fill_mode=fill_mode)
    np.testing.assert_array_equal(found, padded[:, 8 + down : 12 + down, 8 + right : 16 + right])


def test_a_zoom_of_a_half_doubles_and_lies_between_pixels():
    image = np.array([[0, 80], [160, 240]], np.uint8).reshape(1, 2, 2, 1)
    found = changed(image, [32768, 0, 0, 32768, 0, 0], zoom=0.5)[0, :, :, 0]
    assert found.tolist() == [[60, 100], [140, 180]]  # A quarter of a pixel from the centre.
    smaller = changed(random_images(1, 8, 8, 1), [131072, 0, 0, 131072, 0, 0], zoom=1.0)[0, :, :, 0]
    fours = random_images(1, 8, 8, 1)[0, :, :, 0].astype(int).reshape(4, 2, 4, 2).sum((1, 3))
    np.testing.assert_array_equal(smaller, np.pad((fours + 2) // 4, 2))


def test_places_are_rounded_and_not_cut():
    images = random_images(1, 8, 8, 3)
    for near in (65535, 65537):
        np.testing.assert_array_equal(changed(images, [near, 0, 0, near, 0, 0], zoom=1.0), images)


def test_a_drawn_rotation_and_zoom_keep_to_their_factors():
    draws = pass_draws(5000, 0, 0, section_of(rotation=0.1, zoom=0.3))[:, 3:9] / 65536
    angle, scale = np.arctan2(draws[:, 1], draws[:, 0]) / (2 * np.pi), np.hypot(draws[:, 0], draws[:, 1])
    np.testing.assert_allclose(draws[:, 2:4], np.stack([-draws[:, 1], draws[:, 0]], 1))
    assert [angle.min(), angle.max()] == pytest.approx([-0.1, 0.1], rel=0.01)
    assert [scale.min(), scale.max()] == pytest.approx([0.7, 1.3], rel=0.01)
    assert not draws[:, 4:].any()


def test_brightness_adds_and_cuts():
    images = random_images(4, 5, 7, 3)
    for added in (-255, -40, 0, 13, 255):
        found = changed(images, [added], brightness=1.0)
        np.testing.assert_array_equal(found, np.clip(images.astype(int) + added, 0, 255))


def test_contrast_moves_pixels_from_the_mean_of_their_channel():
    images = random_images(4, 5, 7, 3)
    mean = np.rint(images.mean((1, 2), keepdims=True))
    for factor in (0.0, 0.5, 1.0, 1.75):
        wanted = np.clip(mean + (images - mean) * factor, 0, 255)
        assert np.abs(changed(images, [int(256 * factor)], contrast=1.0) - wanted).max() <= 0.5


def test_erasing_makes_a_rectangle_black():
    images = random_images(2, 10, 20, 3) | 1
    found = changed(images, [32768, 65535, 65536 * 4 // 10, 65536 // 4], erasing=1.0)
    wanted = images.copy()
    wanted[:, 3:7, 15:20] = 0  # Free are 6 rows and 15 columns: the middle, and the right edge.
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(changed(images, [32768, 65535, 0, 0], erasing=1.0), images)


def operated(images, **on):
    """The images after one layer of RandAugment that does this alone."""
    columns = {
        "matrix": [65536, 0, 0, 65536, 0, 0], "contrast": 256, "brightness": 256, "color": 256, "sharpness": 256,
        "solarize": 256, "posterize": 1, "autocontrast": 0, "equalize": 0,
    }  # fmt: skip
    matrix, *others = (columns | on).values()
    return changed(images, [*matrix, *others], rand_augment=config.RandAugment(num_layers=1, magnitude=10))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["noise", "dim", "one value", "two values"])
def test_operations_are_pillows(kind, channels):
    values = {
        "noise": random_images(1, 40, 50, channels),
        "dim": random_images(1, 40, 50, channels) // 3 + 40,
        "one value": np.full((1, 40, 50, channels), 7, np.uint8),
        "two values": random_images(1, 40, 50, channels) % 2 * 9,
    }[kind]
    picture = Image.fromarray(values[0] if channels == 3 else values[0, :, :, 0])

    def same(found, pillows, most):
        difference = found[0].astype(int) - np.asarray(pillows).reshape(found[0].shape).astype(int)
        assert np.abs(difference).max() <= most

    same(operated(values, equalize=1), ImageOps.equalize(picture), 0)
    same(operated(values, autocontrast=1), ImageOps.autocontrast(picture), 1)
    for factor in (26, 128, 486):  # Pillow cuts off what lies after the point, and its filter rounds by itself.
        same(operated(values, sharpness=factor), ImageEnhance.Sharpness(picture).enhance(factor / 256), 2)
        if channels == 3:
            same(operated(values, color=factor), ImageEnhance.Color(picture).enhance(factor / 256), 2)
    if channels == 1:
        np.testing.assert_array_equal(operated(values, color=26), values)


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 3)])
def test_operations_take_images_of_any_size(shape):
    images = random_images(3, *shape, 3)
    for on in ({"sharpness": 26}, {"equalize": 1}, {"autocontrast": 1}, {"color": 26}):
        assert operated(images, **on).shape == images.shape
    np.testing.assert_array_equal(operated(images), images)


def test_rand_augment_does_one_of_its_operations_a_layer():
    images = np.repeat(random_images(1, 16, 16, 3), 4000, axis=0)
    section = section_of(rand_augment=config.RandAugment(num_layers=1, magnitude=10))
    draws = pass_draws(4000, 0, 0, section)
    found, image = augment(images, draws, section), images[0].astype(int)
    counts = Counter(one.tobytes() for one in found)
    both_ways = {}
    for sign in (-1, 1):
        for axis in (0, 1):
            matrix = np.array([65536, 0, 0, 65536, 0, 0])
            matrix[2 - axis] = sign * round(0.3 * 65536)
            both_ways[f"shear {sign} {axis}"] = changed(images[:1], matrix, rotation=1.0)[0]
            matrix = np.array([65536, 0, 0, 65536, 0, 0])
            matrix[4 + axis] = sign * round(0.45 * 65536)
            both_ways[f"translate {sign} {axis}"] = changed(images[:1], matrix, rotation=1.0)[0]
        cosine, sine = round(65536 * np.cos(np.pi / 6)), sign * round(65536 * np.sin(np.pi / 6))
        both_ways[f"rotate {sign}"] = changed(images[:1], [cosine, sine, -sine, cosine, 0, 0], rotation=1.0)[0]
        both_ways[f"contrast {sign}"] = changed(images[:1], [round(256 * (1 + sign * 0.9))], contrast=1.0)[0]
        both_ways[f"brightness {sign}"] = np.clip((image * round(256 * (1 + sign * 0.9)) + 128) // 256, 0, 255)
        for name in ("color", "sharpness"):
            both_ways[f"{name} {sign}"] = operated(images[:1], **{name: round(256 * (1 + sign * 0.9))})[0]
    alone = {"identity": image, "solarize": 255 - image, "posterize": image & 0xF0}
    alone |= {name: operated(images[:1], **{name: 1})[0] for name in ("autocontrast", "equalize")}
    wanted = alone | both_ways
    assert len(wanted) == 2 * len(RAND_AUGMENT) - 5
    assert counts.keys() == {np.asarray(one, np.uint8).tobytes() for one in wanted.values()}
    for name, one in wanted.items():
        half = 4000 / 14 if name in alone else 2000 / 14
        assert abs(counts[np.asarray(one, np.uint8).tobytes()] - half) < 0.45 * half, name


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


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("flip", r"flip = True: .* has no images, but size\. Give input\.augmentation\.flip=false"),
        ("rotation", r"rotation = 1\.0: .* has no images, .* Give input\.augmentation\.rotation=0"),
        ("rand_augment", r"rand_augment = \{'magnitude': 10.*, 'num_layers': 3\}: .*\.rand_augment=null"),
    ],
)
def test_what_has_no_images_is_not_augmented(tiny, key, said):
    number = Feature(kind="number", shape=(1,), dtype="float32")
    table = tiny.model_copy(update={"features": {"size": number}})
    check_augmentation(OFF, table)
    check_augmentation(section_of(**{key: MOST[key]}), tiny)
    with pytest.raises(UserError, match=said):
        check_augmentation(section_of(**{key: MOST[key]}), table)


def test_what_cannot_be_mixed_is_refused(digits):
    two = digits.model_copy(
        update={"features": {**digits.features, "age": Feature(kind="number", shape=(), dtype="float32")}}
    )
    check_augmentation(section_of(mixup=0.2), digits)
    with pytest.raises(UserError, match=r"mixup = 0\.2: digits has image, age, .+ Give input\.augmentation\.mixup=0$"):
        check_augmentation(section_of(mixup=0.2), two)
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


def test_rand_augment_of_no_magnitude_changes_nothing():
    images = random_images(20, 8, 9, 3)
    section = section_of(rand_augment=config.RandAugment(num_layers=4, magnitude=0))
    np.testing.assert_array_equal(augment(images, pass_draws(20, 0, 0, section), section), images)


def test_the_draw_is_that_of_seed_epoch_and_step(make_dataset):
    """One image two hundred times: what differs was drawn differently."""
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)
    same = (np.repeat(image, 200, axis=0), np.zeros(200, np.int64))
    prepared = make_dataset("same", train=same, test=same)
    options = ("input.augmentation.flip=true", "input.augmentation.crop_padding=2")
    drawn = augmented(prepared, *options)
    np.testing.assert_array_equal(drawn, augmented(prepared, *options))
    others = [augmented(prepared, *options, epoch=1), augmented(prepared, *options, seed=1)]
    steps = [drawn[i : i + 50] for i in range(0, 200, 50)]
    for one, other in [
        (drawn, others[0]),
        (drawn, others[1]),
        (others[0], others[1]),
        *pairwise(steps),
    ]:
        # Of 50 possible images; independent draws agree at one place in fifty.
        assert (one == other).all((1, 2, 3)).mean() < 0.2


# Which examples are used for what: records alone, no arrays.


def sized(**splits):
    part = {"features": {"image": ""}, "labels": "", "sha256": {}, "class_counts": ()}
    return PreparedDataset(
        name="sized",
        kind="tfds",
        version="1.0.0",
        tfds_version="4.9.10",
        folder="data/sized/prepared",
        raw_folder="data/sized/raw",
        features={"image": Feature(kind="image", shape=(1, 1, 1), dtype="uint8")},
        target=Target(task="classification", num_outputs=2, class_names=("a", "b")),
        splits={name: PreparedSplit(num_examples=n, **part) for name, n in splits.items()},
        sources=(),
        licence=None,
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


@pytest.mark.parametrize(
    ("splits", "validation", "expected"),
    [
        ("train test", None, {"train": "train", "test": "test"}),
        ("train test validation", None, {"train": "train", "test": "test"}),
        ("train test validation", "validation", {"train": "train", "validation": "validation", "test": "test"}),
        ("train test extra", "extra", {"train": "train", "validation": "extra", "test": "test"}),
        ("train validation", None, {"train": "train", "test": "validation"}),
        ("train validation", 2, {"train": "train", "validation": "train", "test": "validation"}),
        ("train validation test", "test", {"train": "train", "validation": "test", "test": "validation"}),
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
            "input.validation = 'valid': dataset sized has no such split .* Allowed: test, a fraction",
        ),
        ("train test", "train", "input.validation = 'train'"),
        ("train test", 9, "input.validation = 9: takes 9 of the 9 training examples .* from 1 to 8"),
        ("train test", 5000, "input.validation = 5000: takes 5000 of the 9"),
        ("train test", 0.01, "input.validation = 0.01: takes 0 of the 9"),
        ("train test", "test", "nothing is left to test on"),
        ("train validation", "validation", "nothing is left to test on"),
        ("train", None, "nothing is left to test on"),
        ("test", None, "has no split 'train'"),
    ],
)
def test_a_wrong_split_gives_one_message(splits, validation, said):
    with pytest.raises(UserError, match=said) as error:
        carve(sized(**dict.fromkeys(splits.split(), 9)), validation, 0)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_a_batch_larger_than_the_split_is_refused(digits):
    settings = load(validation=437)
    assert sources.training_batches(settings, digits, 1000).steps == 1
    with pytest.raises(UserError, match=re.escape("global batch of 1001 examples is larger than the training split")):
        sources.training_batches(settings, digits, 1001)


@given(total=st.integers(0, 300), seed=st.integers(0, 2**31 - 1), epoch=st.none() | st.integers(0, 10**6))
def test_an_order_is_a_permutation(total, seed, epoch):
    assert sorted(order(total, seed, epoch).tolist()) == list(range(total))


def test_the_order_stays_the_same_with_other_versions_and_machines():
    # Raw Philox words, which NumPy promises never to change; a change here makes every resumed run read other data.
    assert order(8, 0, 0).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert order(8, 123, 45).tolist() == [5, 4, 1, 6, 7, 2, 0, 3]

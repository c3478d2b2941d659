"""One preparing or reading of a user's own data, by one way, in a process of its own: prints one JSON line.

`python -m benchmarks.preparing WAY ARGUMENT`, in a folder that holds params.yaml and .dvc/, in the environment of a
stage process. Imports are not counted, of ours no more than of Keras' and pandas'.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

NUM_CLASSES, SIZES, TARGET_SIZE = 10, (64, 160), (96, 96)
BATCH_SIZE = 32
"""The default of Keras' image_dataset_from_directory."""


def make_photos(folder: Path, count: int) -> None:
    """Write JPEGs of smooth colours with some noise into a folder for each class, of sizes that differ."""
    generator = np.random.default_rng(0)
    for number in range(count):
        height, width = generator.integers(SIZES[0], SIZES[1] + 1, 2).tolist()
        coarse = Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(smooth + generator.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
        own = folder / f"class_{number % NUM_CLASSES}"
        own.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(own / f"{number:05}.jpg", quality=90)


def make_table(path: Path, count: int) -> None:
    """Write a CSV of 20 columns: 8 of fractions (2 with gaps), 4 of whole numbers, 6 of words, a datetime, a target."""
    generator = np.random.default_rng(0)
    columns: dict[str, Any] = {f"measure_{of}": generator.normal(100 * of, 10, count).round(4) for of in range(6)}
    for name, values in (("price", generator.exponential(50, count)), ("size", generator.lognormal(3, 1, count))):
        columns[name] = np.where(generator.random(count) < 0.05, np.nan, values.round(2))
    columns |= {f"count_{of}": generator.integers(0, 10 ** (of + 1), count) for of in range(4)}
    for of, different in enumerate((2, 5, 12, 50, 200, 1000)):
        words = np.array([f"value {number}" for number in range(different)])
        columns[f"category_{of}"] = words[generator.integers(0, different, count)]
    columns["when"] = np.datetime64("2020-01-01", "s") + generator.integers(0, 5 * 365 * 86_400, count)
    columns["target"] = np.array(["low", "middle", "high"])[generator.integers(0, 3, count)]
    pd.DataFrame(columns).to_csv(path, index=False)


def seconds_of(function: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def prepare(described: str) -> dict[str, float]:
    """Prepare a dataset by the stage that `stratagem data add` starts; the columns of a table are given, as there."""
    from tasks import config
    from tasks import prepare as stage
    from tasks.data import kinds

    dataset = config.describe(json.loads(described), "the benchmark")
    (Path("data") / dataset.name).mkdir(parents=True, exist_ok=True)
    if dataset.is_guessed:
        dataset, _ = kinds.find_kind(dataset.kind).guess(dataset)
    return {"seconds": seconds_of(lambda: stage.prepare(dataset))}


def add(described: str) -> dict[str, float]:
    """Guess what a dataset's columns are, and prepare it, as `stratagem data add` does without its start-up."""
    from tasks import config
    from tasks import prepare as stage
    from tasks.data import kinds

    dataset = config.describe(json.loads(described), "the benchmark")
    (Path("data") / dataset.name).mkdir(parents=True, exist_ok=True)
    return {"seconds": seconds_of(lambda: stage.prepare(kinds.find_kind(dataset.kind).guess(dataset)[0]))}


def keras_folder(folder: str) -> dict[str, float]:
    """Read a folder of images twice by Keras' own function."""
    import keras

    def make() -> None:
        nonlocal data
        data = keras.utils.image_dataset_from_directory(
            folder, image_size=TARGET_SIZE, batch_size=BATCH_SIZE, verbose=False
        )

    data: Any = None
    seconds = seconds_of(make)
    first, second = (_speed(data) for _ in range(2))
    return {"seconds": seconds + first[0] / first[1], "examples_per_second": second[1]}


def pillow_alone(folder: str) -> dict[str, float]:
    """Decode and resize a folder of JPEGs with Pillow, on all cores; nothing is looked at, kept or written."""

    def decode(some: Iterable[Path]) -> None:
        for path in some:
            with Image.open(path, formats=["JPEG"]) as image:
                np.asarray(image.resize(TARGET_SIZE[::-1], Image.Resampling.BILINEAR))

    paths = sorted(Path(folder).rglob("*.jpg"))
    parts = [paths[first : first + 256] for first in range(0, len(paths), 256)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"seconds": seconds_of(lambda: list(pool.map(decode, parts)))}


def tensorflow_alone(folder: str) -> dict[str, float]:
    """Decode and resize a folder of JPEGs with TensorFlow, on all cores, as Keras does; nothing is batched or kept."""
    import tensorflow as tf

    def decode(path: Any) -> Any:
        return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path), channels=3), TARGET_SIZE)

    paths = tf.data.Dataset.from_tensor_slices([str(path) for path in sorted(Path(folder).rglob("*.jpg"))])
    images = paths.map(decode, num_parallel_calls=os.cpu_count())
    return {"seconds": seconds_of(lambda: images.reduce(0, lambda count, _: count + 1).numpy())}


def our_epoch(name: str) -> dict[str, float]:
    """Read a pass of training batches of a prepared dataset as `fit` does, after one that is not counted."""
    from benchmarks.reading import batches_of

    batches = batches_of(name, BATCH_SIZE, "array")
    data = batches.dataset
    speeds = []
    for number in range(2):
        batches.epoch = number
        speeds.append(_speed(data)[1])
    return {"examples_per_second": speeds[1]}


def our_arrays(name: str) -> dict[str, float]:
    """Read passes of training batches with NumPy: the first of them maps the file anew."""
    from benchmarks.reading import batches_of

    batches = batches_of(name, 8 * BATCH_SIZE, "array")
    for path in Path("data", name, "prepared").glob("train_*.npy"):  # Into the page cache.
        path.read_bytes()
    speeds = []
    for number in range(3):
        batches.epoch = number
        speeds.append(_speed(batches.arrays())[1])
    return {"first": speeds[0], "examples_per_second": speeds[-1]}


def pandas_table(path: str) -> dict[str, float]:
    """Read a table by pandas."""
    return {"seconds": seconds_of(lambda: pd.read_csv(path))}


def _speed(data: Iterable[Any]) -> tuple[int, float]:
    """Return how many examples there are, and how many come in a second."""
    began, seen = time.perf_counter(), 0
    for _, labels in data:
        seen += len(labels)
    return seen, seen / (time.perf_counter() - began)


def peak_megabytes() -> float:
    """Return the resident memory of this process at its largest. The kernel forgets that of its parent, which
    ``resource.getrusage`` does not."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


WAYS = {
    "prepare": prepare,
    "keras": keras_folder,
    "epoch": our_epoch,
    "arrays": our_arrays,
    "pandas": pandas_table,
    "pillow": pillow_alone,
    "tensorflow": tensorflow_alone,
    "add": add,
}

if __name__ == "__main__":
    found = WAYS[sys.argv[1]](sys.argv[2])
    print(json.dumps({**found, "megabytes": peak_megabytes()}))

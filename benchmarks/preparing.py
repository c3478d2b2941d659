"""One preparing or reading of a user's own data, by one way, in a process of its own: prints one JSON line.

`python -m benchmarks.preparing WAY ARGUMENT`, in a folder that holds params.yaml and .dvc/, in the environment of a
stage process. Imports are not counted, of ours no more than of Keras' and pandas'.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

NUM_CLASSES, SIZES, TARGET_SIZE = 10, ((64, 64), (160, 160)), (96, 96)
LARGE_SIZE, TARGET_OF_LARGE = (3000, 4000), (128, 128)
BATCH_SIZE = 32
"""The default of Keras' image_dataset_from_directory."""


def make_photos(folder: Path, count: int, low: tuple[int, int], high: tuple[int, int]) -> None:
    """Write JPEGs of smooth colours with some noise into a folder for each class, of heights and widths from ``low`` to
    ``high``."""
    generator = np.random.default_rng(0)
    for number in range(count):
        height, width = generator.integers(low, np.add(high, 1)).tolist()
        coarse = Image.fromarray(generator.integers(0, 256, (8, 8, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        pixels = np.clip(smooth + generator.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
        own = folder / f"class_{number % NUM_CLASSES}"
        own.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(own / f"{number:05}.jpg", quality=90)


def make_table(path: Path, count: int, seed: int = 0) -> None:
    """Append to a CSV of 20 columns: 8 of fractions (2 with gaps), 4 of whole numbers, 6 of words, a datetime, a
    target."""
    generator = np.random.default_rng(seed)
    columns: dict[str, Any] = {f"measure_{of}": generator.normal(100 * of, 10, count).round(4) for of in range(6)}
    for name, values in (("price", generator.exponential(50, count)), ("size", generator.lognormal(3, 1, count))):
        columns[name] = np.where(generator.random(count) < 0.05, np.nan, values.round(2))
    columns |= {f"count_{of}": generator.integers(0, 10 ** (of + 1), count) for of in range(4)}
    for of, different in enumerate((2, 5, 12, 50, 200, 1000)):
        words = np.array([f"value {number}" for number in range(different)])
        columns[f"category_{of}"] = words[generator.integers(0, different, count)]
    columns["when"] = np.datetime64("2020-01-01", "s") + generator.integers(0, 5 * 365 * 86_400, count)
    columns["target"] = np.array(["low", "middle", "high"])[generator.integers(0, 3, count)]
    pd.DataFrame(columns).to_csv(path, index=False, mode="a", header=not path.exists())


def seconds_of(function: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def prepare(described: str) -> dict[str, float]:
    """Prepare a dataset by the stage that `stratagem data add` starts; count both with and without the guess of what
    its columns are."""
    from tasks import config
    from tasks import prepare as stage
    from tasks.data import kinds

    began = time.perf_counter()
    dataset = config.describe(json.loads(described), "the benchmark")
    (Path("data") / dataset.name).mkdir(parents=True, exist_ok=True)
    if dataset.is_guessed:
        dataset, _ = kinds.find_kind(dataset.kind).guess(dataset)
    seconds = seconds_of(lambda: stage.prepare(dataset))
    return {"seconds": seconds, "with_guess": time.perf_counter() - began}


def pillow_folder(folder: str) -> dict[str, float]:
    """Decode and resize a folder of images with Pillow, in as many threads as `prepare` has."""
    from tasks.system import machine

    height, width = TARGET_SIZE

    def decode(path: Path) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR))

    def decode_all() -> None:
        with ThreadPoolExecutor(machine.usable_cores()) as pool:
            for number, pixels in enumerate(pool.map(decode, paths)):
                found[number] = pixels

    paths = sorted(Path(folder).rglob("*.jpg"))
    found = np.empty((len(paths), height, width, 3), np.uint8)
    return {"seconds": seconds_of(decode_all)}


def keras_folder(described: str) -> dict[str, float]:
    """Read a folder of images twice by Keras' own function."""
    import keras

    def make() -> None:
        nonlocal data
        data = keras.utils.image_dataset_from_directory(**json.loads(described), batch_size=BATCH_SIZE, verbose=False)

    data: Any = None
    seconds = seconds_of(make)
    first, second = (_speed(data) for _ in range(2))
    return {"seconds": seconds + first[0] / first[1], "examples_per_second": second[1]}


def our_epoch(name: str) -> dict[str, float]:
    """Read a pass of training batches of a prepared dataset in NumPy, after one that is not counted."""
    from tasks import config
    from tasks.input import sources
    from tasks.operations import dvc_data

    nothing_augmented = {"input.augmentation.crop_padding": 0, "input.augmentation.flip": False}
    values = {"dataset.name": name, "input.validation": None, "checkpoint.monitor": "train/loss", **nothing_augmented}
    settings = config.load(overrides=values)
    batches = sources.training_batches(settings, dvc_data.load_prepared(name), BATCH_SIZE)
    speeds = []
    for number in range(2):
        batches.epoch = number
        speeds.append(_speed(batches.arrays())[1])
    return {"examples_per_second": speeds[1]}


def pandas_table(path: str) -> dict[str, float]:
    """Read a table by pandas."""
    return {"seconds": seconds_of(lambda: pd.read_csv(path))}


def keras_prediction(model: str) -> dict[str, float]:
    """Predict the rows of table.csv by pandas and Keras, with a model of the dataset `rows`, which says how its columns
    are encoded."""
    import keras

    prepared = json.loads(Path("data/rows/prepared/manifest.json").read_text(encoding="utf-8"))["features"]
    numbers = {one["name"]: one["fill"] for one in prepared["number"]["columns"] if one["kind"] == "number"}
    categories = [one["name"] for one in prepared["category"]["columns"]]
    vocabularies = json.loads(Path(prepared["category"]["vocabulary"]).read_text(encoding="utf-8"))

    def predict() -> None:
        rows = pd.read_csv("table.csv", parse_dates=["when"])
        days = (rows["when"] - pd.Timestamp(0)) / pd.Timedelta(days=1)
        turns = 2 * np.pi * np.stack([days, days / 7, days / 365.25], axis=1)
        encoded = [rows[list(numbers)].fillna(numbers), days, np.sin(turns), np.cos(turns)]
        codes = [
            pd.Categorical(rows[name], categories=known).codes + 2
            for name, known in zip(categories, vocabularies, strict=True)
        ]
        given = {"number": np.column_stack(encoded).astype("float32"), "category": np.stack(codes, 1).astype("int32")}
        logits = keras.saving.load_model(model, compile=False).predict(given, batch_size=1024, verbose=0)
        found = {"prediction": logits.argmax(1), "probability": keras.ops.softmax(logits).numpy().max(1)}
        pd.DataFrame(found).to_csv("by_keras.csv", index=False)

    return {"seconds": seconds_of(predict)}


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
    "pillow": pillow_folder,
    "keras": keras_folder,
    "predict": keras_prediction,
    "epoch": our_epoch,
    "pandas": pandas_table,
}

if __name__ == "__main__":
    found = WAYS[sys.argv[1]](sys.argv[2])
    print(json.dumps({**found, "megabytes": peak_megabytes()}))

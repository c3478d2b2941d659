"""A user's own data: how long it takes to prepare a folder of images and a table, to read the images after that, and to
predict a table."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Question
from benchmarks.preparing import (
    BATCH_SIZE,
    LARGE_SIZE,
    NUM_CLASSES,
    SIZES,
    TARGET_OF_LARGE,
    TARGET_SIZE,
    make_photos,
    make_table,
)
from tasks import config
from tasks.strategies.environment import stage_environment

HEADING = "## Own data\n"
FILES, FEW_FILES, LARGE_FILES, ROWS, TIMES = 20_000, 5_000, 300, 1_000_000, 13
FOLDER, FEW, PILLOW = "folder prepared", f"{FEW_FILES:,} files prepared", "Pillow's decode and resize"
LARGE, LARGE_BY_KERAS = "large images prepared", "a pass of `image_dataset_from_directory`"
TABLE, ADDED, PANDAS = "table prepared", "table added", "`pandas.read_csv`"
PREDICTED, BY_KERAS = "table predicted", "pandas and `model.predict`"
EPOCH, SECOND_PASS = "second epoch", "the second pass of `image_dataset_from_directory`"
LONG_TABLE = "long table prepared"
QUESTIONS = [
    Question("seconds, the table prepared", TABLE, PANDAS, "at most", 3),
    Question("seconds, the table added", ADDED, PANDAS, "at most", 5),
    Question("seconds, the small images prepared", FOLDER, PILLOW, "at most", 1.15),
    Question("seconds, the large images prepared", LARGE, LARGE_BY_KERAS, "at most", 0.5),
    Question("seconds, the table predicted by `stratagem predict`", PREDICTED, BY_KERAS, "at most", 1.5),
]
OF_READING = Question("examples/s, second epoch of the small images", EPOCH, SECOND_PASS, "at least", 5)
OF_MEMORY = [
    Question(f"peak memory of preparing {FILES:,} files, MB", FOLDER, FEW, "at most", 1.1),
    Question(f"peak memory of preparing a table of {TIMES:,} million rows, 2 GB, MB", LONG_TABLE, None, "at most", 600),
]


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    (low, _), (high, _) = SIZES
    about = (
        f"{repeats} repeats, without imports except for the predictions. Small images: {FILES:,} JPEGs in "
        f"{NUM_CLASSES} classes, {low} to {high} pixels a side, resized to {TARGET_SIZE[0]} x {TARGET_SIZE[1]}. Large "
        f"images: {LARGE_FILES} JPEGs of 12 megapixels, resized to {TARGET_OF_LARGE[0]} x {TARGET_OF_LARGE[1]}. The "
        f"table: a CSV of {ROWS:,} rows with 12 columns of numbers, 6 of categories with 2 to 1,000 values, a datetime "
        "and the target."
    )
    explained = (
        "Preparing images reads all headers, decodes with Pillow, resizes with antialiasing, computes statistics, and "
        "writes, flushes and hashes the arrays. Pillow only decodes and resizes, in as many threads; Keras decodes "
        "with TensorFlow and resizes without antialiasing. Preparing a table also draws the splits, fits vocabularies "
        "and means, and encodes; pandas leaves the datetime as text. The peer of `predict` encodes whole columns with "
        f"pandas, and predicts batches of 1,024 rows; both write a CSV. The second epoch is the input of `fit`: "
        f"shuffled batches of {BATCH_SIZE} with the pixels as bytes, which the model's first layer scales; Keras "
        "yields float32."
    )
    packages = ("keras", "tensorflow", "pandas", "pyarrow", "pillow")
    found, reading, memory = measured(repeats)
    lines = [
        *measure.answers(QUESTIONS, found.figures),
        *measure.answers([OF_READING], reading)[2:],
        *measure.answers(OF_MEMORY, memory)[2:],
        "",
        explained,
    ]
    return measure.section(HEADING, packages, found.others, about, lines)


def measured(repeats: int) -> tuple[measure.Measured, dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each variant, the speeds of reading and the memory, measured in a project of its own."""
    reading: dict[str, list[float]] = {EPOCH: [], SECOND_PASS: []}
    memory: dict[str, list[float]] = {FOLDER: [], FEW: [], LONG_TABLE: []}
    added: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".dvc").mkdir()
        shutil.copy(measure.ROOT / "params.yaml", folder)
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
        environment = stage_environment(config.load()) | {"PYTHONPATH": str(measure.ROOT)}
        for count in (FEW_FILES, FILES):
            make_photos(folder / f"photos_{count}", count, *SIZES)
        make_photos(folder / "large", LARGE_FILES, LARGE_SIZE, LARGE_SIZE)
        make_table(folder / "table.csv", ROWS)
        for seed in range(TIMES):
            make_table(folder / "long.csv", ROWS, seed)

        def ours(*words: str, settings: dict[str, object] | None = None) -> measure.Done:
            return measure.watch(measure.stratagem(*words, settings=settings), environment, folder)

        def run(way: str, argument: str) -> dict[str, float]:
            found: dict[str, float] = measure.read(measure.module("preparing", way, argument), environment, folder)
            return found

        def prepare_photos(variant: str, source: str, size: tuple[int, int]) -> float:
            described = {"kind": "image_folder", "name": source, "source": source, "image_size": size}
            found = run("prepare", json.dumps(described))
            memory.get(variant, []).append(found["megabytes"])
            return found["seconds"]

        def read_with_keras() -> None:
            small = {"directory": f"photos_{FILES}", "image_size": TARGET_SIZE}
            reading[SECOND_PASS].append(run("keras", json.dumps(small))["examples_per_second"])
            reading[EPOCH].append(run("epoch", f"photos_{FILES}")["examples_per_second"])

        def prepare_table() -> float:
            found = run(
                "prepare", json.dumps({"kind": "table", "name": "r", "source": "table.csv", "target": "target"})
            )
            added.append(found["with_guess"])
            described = {"kind": "table", "name": "long", "source": "long.csv", "target": "target"}
            memory[LONG_TABLE].append(run("prepare", json.dumps(described))["megabytes"])
            read_with_keras()
            return found["seconds"]

        ours("data", "add", "table.csv", "--name", "rows", "--target", "target")
        ours("train", settings={"dataset.name": "rows", "train.epochs": 1})
        (model,) = folder.glob("mlruns/runs/*/models/final.keras")
        large = {"directory": "large", "image_size": TARGET_OF_LARGE}
        variants = {
            FOLDER: lambda: prepare_photos(FOLDER, f"photos_{FILES}", TARGET_SIZE),
            PILLOW: lambda: run("pillow", f"photos_{FILES}")["seconds"],
            FEW: lambda: prepare_photos(FEW, f"photos_{FEW_FILES}", TARGET_SIZE),
            LARGE: lambda: prepare_photos(LARGE, "large", TARGET_OF_LARGE),
            LARGE_BY_KERAS: lambda: run("keras", json.dumps(large))["seconds"],
            TABLE: prepare_table,
            PANDAS: lambda: run("pandas", "table.csv")["seconds"],
            PREDICTED: lambda: (
                ours("predict", "table.csv", "--model", "latest", "--output", "o.csv", "--force").seconds
            ),
            BY_KERAS: lambda: measure.watch(measure.module("preparing", "predict", model), environment, folder).seconds,
        }
        found = measure.alternate("data", repeats, variants)
    found.figures[ADDED] = added
    return found, reading, memory

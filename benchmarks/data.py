"""A user's own data: how long a folder of images and a table take to be prepared, and to be read after that."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from benchmarks.preparing import BATCH_SIZE, NUM_CLASSES, SIZES, TARGET_SIZE, make_photos, make_table
from tasks import config
from tasks.process.environment import stage_environment

HEADING = "## Own data\n"
FILES, FEW_FILES, ROWS = 20_000, 5_000, 1_000_000
PILLOW, TENSORFLOW = ("Pillow alone decodes and resizes", "TensorFlow alone decodes and resizes")
QUESTIONS = [
    measure.Question(
        "seconds, a pass of `image_dataset_from_directory` / the folder prepared",
        "Keras, first pass",
        "folder prepared",
        "at least",
        2,
    ),
    measure.Question(
        "seconds, the table prepared / `pandas.read_csv`", "table prepared", "pandas.read_csv", "at most", 3
    ),
    measure.Question("seconds, the table added / `pandas.read_csv`", "table added", "pandas.read_csv", "at most", 5),
]
QUESTIONS_OF_READING = [
    measure.Question(
        "examples/s, second epoch of the prepared folder / second pass of `image_dataset_from_directory`",
        "prepared, second epoch",
        "Keras, second pass",
        "at least",
        5,
    ),
    measure.Question(
        f"examples/s with NumPy, a freshly mapped file of {FILES:,} images / the later passes of {FEW_FILES:,}",
        "large file, first pass",
        "small file, later pass",
        "at least",
        0.8,
    ),
]
QUESTIONS_OF_MEMORY = [
    measure.Question(
        f"peak memory, {FILES:,} files prepared / {FEW_FILES:,}",
        f"{FILES:,} files",
        f"{FEW_FILES:,} files",
        "at most",
        1.1,
    )
]


class Project:
    """A project for the time of the measurement, and what is measured in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / ".dvc").mkdir()
        shutil.copy(measure.ROOT / "params.yaml", folder)
        self._environment = stage_environment(config.load()) | {"PYTHONPATH": str(measure.ROOT)}
        self.reading: dict[str, list[float]] = {}
        self.memory: dict[str, list[float]] = {}
        for count in (FEW_FILES, FILES):
            print(f"data: makes {count:,} images", file=sys.stderr)
            make_photos(folder / f"photos_{count}", count)
        print(f"data: makes a table of {ROWS:,} rows", file=sys.stderr)
        make_table(folder / "table.csv", ROWS)
        self.table_megabytes = (folder / "table.csv").stat().st_size / 1e6

    def run(self, way: str, argument: str) -> dict[str, float]:
        """Return what one way measures in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.preparing", way, argument]
        _, output = measure.run(command, self._environment, self._folder)
        found: dict[str, float] = json.loads(output.splitlines()[-1])
        return found

    def prepare_photos(self, count: int) -> float:
        """Return the seconds that a folder takes, and put down the memory."""
        described = {"kind": "image_folder", "source": f"photos_{count}", "image_size": TARGET_SIZE}
        found = self.run("prepare", json.dumps({**described, "name": f"photos_{count}"}))
        self.memory.setdefault(f"{count:,} files", []).append(found["megabytes"])
        return found["seconds"]

    def read_table(self, way: str) -> float:
        """Return the seconds that the table takes to be prepared or added."""
        described = {"kind": "table", "name": "rows", "source": "table.csv", "target": "target"}
        return self.run(way, json.dumps(described))["seconds"]

    def read_with_keras(self) -> float:
        """Return the seconds of Keras' first pass, and put down the speed of its second."""
        found = self.run("keras", f"photos_{FILES}")
        self.reading.setdefault("Keras, second pass", []).append(found["examples_per_second"])
        return found["seconds"]

    def read_prepared(self) -> None:
        """Put down how fast the prepared arrays are read."""
        found = self.run("epoch", f"photos_{FILES}")
        self.reading.setdefault("prepared, second epoch", []).append(found["examples_per_second"])
        large, small = (self.run("arrays", f"photos_{count}") for count in (FILES, FEW_FILES))
        self.reading.setdefault("large file, first pass", []).append(large["first"])
        self.reading.setdefault("large file, later pass", []).append(large["examples_per_second"])
        self.reading.setdefault("small file, later pass", []).append(small["examples_per_second"])


def alternate(project: Project, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each variant; what else is measured the project has put down."""
    variants = {
        "folder prepared": lambda: project.prepare_photos(FILES),
        "Keras, first pass": project.read_with_keras,
        f"{FEW_FILES:,} files prepared": lambda: project.prepare_photos(FEW_FILES),
        "table prepared": lambda: project.read_table("prepare"),
        "table added": lambda: project.read_table("add"),
        "pandas.read_csv": lambda: project.run("pandas", "table.csv")["seconds"],
        PILLOW: lambda: project.run("pillow", f"photos_{FILES}")["seconds"],
        TENSORFLOW: lambda: project.run("tensorflow", f"photos_{FILES}")["seconds"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, values in measure.alternate("data", 1, variants).items():
            seconds[name] += values
        project.read_prepared()
    return seconds


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        seconds = alternate(project, repeats)
    low, high = SIZES
    height, width = TARGET_SIZE
    lines = [
        HEADING,
        f"{measure.machine('keras', 'tensorflow', 'pandas', 'pyarrow', 'pillow')}. {repeats} repeats: each variant is "
        "a process of its own, and they take turns; median (range); imports are not counted. The folder has "
        f"{FILES:,} JPEGs in {NUM_CLASSES} classes, of {low} to {high} pixels in each direction, which become {height} "
        f"x {width}; the table is a CSV of {ROWS:,} rows and 20 columns ({project.table_megabytes:.0f} MB): 12 of "
        "numbers, 6 of categories with 2 to 1,000 values, a datetime and the target.",
        "",
        "| variant | seconds |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values)} |" for name, values in seconds.items()),
        "",
        "| variant | examples/s |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in project.reading.items()),
        "",
        "| peak memory of the process that prepares, MB | |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in project.memory.items()),
        "",
        *measure.answers(QUESTIONS, seconds),
        *measure.answers(QUESTIONS_OF_READING, project.reading)[2:],
        *measure.answers(QUESTIONS_OF_MEMORY, project.memory)[2:],
        "",
        "Prepared is by the stage that `stratagem data add` starts (`tasks.prepare`): it looks at all headers, decodes "
        "with Pillow, resizes with antialiasing, takes the statistics, writes, flushes and hashes the arrays; Keras "
        "decodes with TensorFlow and resizes without antialiasing. Of a table it also draws the splits, fits "
        "vocabularies and means on the training split, and encodes; pandas leaves the datetime a text. The second "
        f"epoch is `fit`'s input: shuffled batches of {BATCH_SIZE} with the pixels as bytes, which the model's first "
        "layer scales, beside Keras' float32. Files of any size are mapped, by the same code: the ratio of a freshly "
        "mapped file is of one that a new process maps and the page cache holds.",
        "",
        *_bounds(seconds),
        "",
    ]
    return "\n".join(lines)


def _bounds(seconds: dict[str, list[float]]) -> list[str]:
    """Return what the libraries that decode leave of the wanted ratio."""
    pillow, tensorflow = (measure.ratio(seconds["Keras, first pass"], seconds[one]) for one in (PILLOW, TENSORFLOW))
    return [
        "**What bounds the first ratio.** A pass of Keras is little more than decoding. Were decoding all that "
        f"`prepare` does, on all cores, the first ratio would be {pillow} with Pillow and {tensorflow} with "
        "TensorFlow's decoder; but statistics are taken, and arrays written, flushed, hashed, read back and checked.",
    ]

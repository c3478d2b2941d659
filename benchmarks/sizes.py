"""What each stage takes for more and more of what it is given, in a project of its own, with random images.

`python -m benchmarks.sizes`, in a folder that holds params.yaml and .dvc/, in the environment of a stage process.
Prints one JSON object: for each row, the median seconds by size.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from benchmarks.reading import counter
from benchmarks.training import trained
from tasks import config, download, prepare, records, runs, strategies
from tasks.evaluate import evaluate
from tasks.input import sources
from tasks.input.batches import Batches
from tasks.runs import lineage
from tasks.tracking.lifecycle import end_run, start_run
from tasks.tracking.metrics import MetricWriter
from tasks.training import setup
from tasks.training.checkpoints import Checkpoints
from tasks.training.model_state import assign

EXAMPLES, SIDES = (1_000, 4_000, 16_000, 60_000), (8, 16, 32, 64)
STEPS = POINTS = RUNS = (100, 1_000, 10_000)
UNITS = {10_000: 12, 100_000: 126, 1_000_000: 1_258, 10_000_000: 12_579}
"""Units of a perceptron's one hidden layer on 28x28 pixels, by about how many parameters it then has."""
PLAIN = {
    "input.validation": None,
    "input.augmentation.crop_padding": 0,
    "checkpoint.monitor": "train/loss",
    "checkpoint.every_epochs": None,
    "train.per_replica_batch_size": 64,
    "train.loop": "custom",
    "train.steps_per_execution": 50,
    "train.epochs": 2,
    "model.name": "mlp",
    "model.options": {"units": [16]},
}
REPEATS = 3

found: dict[str, dict[int, float]] = {}


def measure(row: str, size: int, function: Callable[[], Any]) -> None:
    """Put down the median seconds of a call, after one that is not counted: it traces, and warms caches."""
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    put(row, size, statistics.median(seconds[1:]))


def put(row: str, size: int, seconds: float) -> None:
    """Put down a measurement."""
    found.setdefault(row, {})[size] = seconds
    print(f"scaling: {row}, {size:,}: {seconds:.4f} s", file=sys.stderr)


def make(num_examples: int, side: int) -> tuple[config.Settings, records.DatasetManifest]:
    """Make a TFDS dataset of random images in one channel, and as many to test on; return settings that name it."""

    class Random(tfds.core.GeneratorBasedBuilder):
        """Random images."""

        name = f"random{num_examples}x{side}"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            image, label = tfds.features.Image(shape=(side, side, 1)), tfds.features.ClassLabel(num_classes=10)
            features = tfds.features.FeaturesDict({"image": image, "label": label})
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {"train": self._generate_examples(0), "test": self._generate_examples(1)}

        def _generate_examples(self, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
            generator = np.random.default_rng(seed)
            for row in range(num_examples):
                image = generator.integers(0, 256, (side, side, 1), np.uint8)
                yield row, {"image": image, "label": int(generator.integers(10))}

    settings = config.load(overrides={**PLAIN, "dataset.name": Random.name})
    download.download(settings.dataset)
    return settings


def data(axis: str, size: int, settings: config.Settings) -> records.PreparedDataset:
    """Measure what reads or writes the images."""
    described = config.Tfds(name=settings.dataset.name)
    measure(f"prepare / {axis}", size, lambda: prepare.prepare(described))
    prepared = prepare.prepare(described)
    batches, consume = sources.training_batches(settings, prepared, 64), counter()

    def next_pass() -> Batches:
        batches.epoch += 1  # Each has an order of its own.
        return batches

    measure(f"a pass of tf.data / {axis}", size, lambda: int(consume(next_pass().dataset)))
    measure(f"a pass of NumPy / {axis}", size, lambda: sum(len(labels) for _, labels in next_pass().arrays()))
    with trained({**PLAIN, "dataset.name": settings.dataset.name, "train.steps_per_epoch": 100}) as result:
        measure(f"evaluate / {axis}", size, lambda: evaluate(settings, prepared, result))
    return prepared


def step(row: str, size: int, overrides: dict[str, object]) -> None:
    """Measure a training step."""
    with trained({**PLAIN, "train.steps_per_epoch": 50, **overrides}) as result:
        put(row, size, result.epoch_seconds[-1] / 50)


def parameters(size: int, units: int, prepared: records.PreparedDataset) -> None:
    """Measure what depends on the model's size."""
    options = {"dataset.name": prepared.name, "model.options": {"units": [units]}}
    step("a step / parameters", size, options)
    settings = config.load(overrides={**PLAIN, **options})
    training = setup.fresh(settings, prepared, strategies.build(settings.strategy))
    model, state = training.model, training.position.start

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as saved:
            saved.save(model, state)

    measure("a checkpoint / parameters", size, save)
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder)) as saved:
            saved.save(model, state)
        kept = Checkpoints(Path(folder), read_only=True)
        groups = ("model", "seed", "optimizer")
        measure("a resume / parameters", size, lambda: assign(model, kept.restore_latest()[0], groups))


def tracked(size: int, settings: config.Settings, prepared: records.PreparedDataset) -> None:
    """Measure what tracking takes for so many points."""

    def write() -> None:
        run = start_run(settings, prepared, lineage.collect(settings, prepared.data_version))
        with MetricWriter(run) as writer:
            for number in range(size):
                writer.write(number, {"train/loss": 1.0})
        end_run(run, "FINISHED")

    measure("a tracked run / points", size, write)


def history(size: int, settings: config.Settings) -> None:
    """Measure what a start asks of the runs before it, when there are so many that have ended."""
    traced = lineage.collect(settings, "0" * 32)
    ended = records.RunStatus(status="FAILED", reason=None, at="")
    for number in range(len(list(Path("mlruns/runs").glob("*"))), size):
        run = records.Run(
            run_id=f"{number:032x}",
            experiment="e",
            name="n",
            folder=f"mlruns/runs/{number:032x}",
            lineage=traced.model_copy(update={"code_digest": str(number)}),
            settings=settings.to_json(),
            number=number,
        )
        folder = Path(run.folder, "records")
        folder.mkdir(parents=True)
        records.save(run, folder / "run.json")
        folder.with_name("status.json").write_text(ended.model_dump_json())

    def ask() -> None:
        runs.remove_leftovers()
        runs.find_unfinished(settings, traced)
        runs.why_not_resumed(settings, traced)
        lineage.finished_run(settings.dataset.name, traced)
        runs.find_not_final()
        runs.next_number()

    measure("what a start asks of the runs before it / runs", size, ask)


def main() -> None:
    """Measure every row, and print."""
    for count in EXAMPLES:
        settings = make(count, 28)
        prepared = data("examples", count, settings)
    for side in SIDES:
        chosen = make(4_000, side)
        data("pixels", side * side, chosen)
        step(
            "a step / pixels",
            side * side,
            {"dataset.name": settings.dataset.name, "model.name": "convnet", "model.options": {}},
        )
    for size, units in UNITS.items():
        parameters(size, units, prepared)
    for size in STEPS:
        values = {**PLAIN, "dataset.name": prepared.name, "train.steps_per_epoch": size}
        with trained(values) as result:
            put("an epoch / steps", size, result.epoch_seconds[-1])
    for size in POINTS:
        tracked(size, settings, prepared)
    for size in RUNS:
        history(size, settings)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

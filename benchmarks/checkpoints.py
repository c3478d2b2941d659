"""What it costs that a killed run loses nothing: checkpoints and tracking, on and off, and beside Keras' own."""

import json
import statistics
import sys

from benchmarks import measure
from benchmarks.pipeline import BIN, SAME_TRAINING
from tasks import config
from tasks.process.environment import stage_environment

EVERY_STEPS = 100
NO_CHECKPOINTS = {"checkpoint.every_epochs": None, "checkpoint.every_steps": None}
STALL, KERAS_STALL = "stall, ours", "stall, BackupAndRestore"
QUESTIONS = [
    measure.Question("a step's stall by a checkpoint / by BackupAndRestore", STALL, KERAS_STALL, "at most", 0.3),
    measure.Question(
        "an epoch, tracked, a checkpoint every 100 steps / without both",
        "all of it",
        "neither",
        "at most",
        1.03,
    ),
    measure.Question("an epoch, tracked / untracked", "tracked", "neither", "at most", 1.02),
]


def stall(which: str, values: dict[str, object]) -> float:
    """Return the median seconds that a checkpoint holds up the training."""
    environment = stage_environment(config.load(overrides=values))
    command = [sys.executable, "-m", "benchmarks.stalls", which, str(EVERY_STEPS), json.dumps(values)]
    _, output = measure.run(command, environment)
    return statistics.median(json.loads(output.splitlines()[-1]))


def untracked(values: dict[str, object]) -> float:
    """Train by the project's own stage, with neither; return the seconds of an epoch."""
    values = {**values, **NO_CHECKPOINTS}
    environment = stage_environment(config.load(overrides=values))
    _, output = measure.run([sys.executable, "-m", "benchmarks.training", json.dumps(values)], environment)
    return _seconds(output)


def tracked(values: dict[str, object]) -> float:
    """Train as a user does; return the seconds of an epoch."""
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    _, output = measure.run([str(BIN / "stratagem"), "train", "--fresh", "--json", *settings])
    return _seconds(output)


def _seconds(output: str) -> float:
    _, *others = json.loads(output.splitlines()[-1])["epoch_seconds"]  # The first one traces.
    return statistics.median(others)


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    values = {"dataset.name": dataset, "train.epochs": epochs, **SAME_TRAINING}
    variants = {
        "neither": lambda: untracked(values),
        "tracked": lambda: tracked({**values, **NO_CHECKPOINTS}),
        "all of it": lambda: tracked({**values, **NO_CHECKPOINTS, "checkpoint.every_steps": EVERY_STEPS}),
        STALL: lambda: stall("ours", values),
        KERAS_STALL: lambda: stall("keras", values),
    }
    seconds = measure.alternate("checkpoints", repeats, variants)
    lines = [
        "## Checkpoints and tracking",
        "",
        f"{measure.machine('tensorflow', 'keras', 'mlflow')}. Dataset {dataset}, {epochs} epochs, {repeats} repeats: "
        "each variant is a process of its own, and they take turns; median (range). Conv32-Pool-Dense64, Adam, 64 "
        "examples a step, `fit`.",
        "",
        "| variant | milliseconds |",
        "|---|---|",
        *(f"| {name} | {measure.spread([1e3 * value for value in values], 1)} |" for name, values in seconds.items()),
        "",
        *measure.answers(QUESTIONS, seconds),
        "",
        f"A stall is how long the training waits at a step that writes a checkpoint, every {EVERY_STEPS} steps: ours "
        "copies the values and writes them in a thread, Keras' BackupAndRestore writes them there and then. The rows "
        "above it are an epoch's time; `stratagem train` is a training as a user starts it, with MLflow and system "
        "metrics.",
        "",
    ]
    return "\n".join(lines)

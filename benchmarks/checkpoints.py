"""What it costs that a killed run loses nothing: checkpoints and tracking, on and off."""

import json
import statistics

from benchmarks import measure
from tasks import config
from tasks.strategies.environment import stage_environment

HEADING = "## Checkpoints and tracking\n"
EVERY_STEPS = 100
NO_CHECKPOINTS = {"checkpoint.every_epochs": None, "checkpoint.every_steps": None}
NEITHER, TRACKED, BOTH = "without both", "tracked", "tracked, with checkpoints"
QUESTIONS = [
    measure.Question(f"ms per epoch, tracked, a checkpoint every {EVERY_STEPS} steps", BOTH, NEITHER, "at most", 1.03),
    measure.Question("ms per epoch, tracked", TRACKED, NEITHER, "at most", 1.02),
]


def milliseconds(epochs: list[float]) -> float:
    """Return the median of all epochs but the first, which traces."""
    return 1e3 * statistics.median(epochs[1:])


def untracked(values: dict[str, object]) -> float:
    """Train by the project's own stage, with neither; return the milliseconds of an epoch."""
    environment = stage_environment(config.load(overrides=values))
    command = measure.module("training", json.dumps(values))
    return milliseconds(measure.read(command, environment)["epoch_seconds"])


def tracked(values: dict[str, object]) -> float:
    """Train as a user does; return the milliseconds of an epoch."""
    return milliseconds(measure.read(measure.stratagem("train", "--fresh", "--json", settings=values))["epoch_seconds"])


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    values = {"dataset.name": dataset, "train.epochs": epochs, **measure.SAME_TRAINING, **NO_CHECKPOINTS}
    variants = {
        NEITHER: lambda: untracked(values),
        TRACKED: lambda: tracked(values),
        BOTH: lambda: tracked({**values, "checkpoint.every_steps": EVERY_STEPS}),
    }
    found = measure.alternate("checkpoints", repeats, variants)
    about = (
        f"{dataset}, {epochs} epochs, {repeats} repeats. Conv32-Pool-Dense64, Adam, 64 examples per step, `fit`; "
        "`stratagem train`, with MLflow and system metrics."
    )
    lines = measure.answers(QUESTIONS, found.figures)
    return measure.section(HEADING, ("tensorflow", "keras", "mlflow"), found.others, about, lines)

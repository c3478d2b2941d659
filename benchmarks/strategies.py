"""Our strategies and loops beside each other, beside the plain recipes, and beside the floor."""

import json
import os
import statistics
import sys

from benchmarks import measure
from benchmarks.pipeline import SAME_TRAINING, tutorial
from tasks import config
from tasks.process.environment import stage_environment

STEPS_PER_EXECUTION = 100
ALONE, ONE_REPLICA, TWO_REPLICAS = "one_device, custom", "mirrored on 1, custom", "mirrored on 2, custom"
OURS = {
    ALONE: {"strategy.kind": "one_device"},
    ONE_REPLICA: {"strategy.kind": "mirrored", "strategy.devices": 1},
    TWO_REPLICAS: {"strategy.kind": "mirrored", "strategy.devices": 2},
}
TUTORIAL, MIRRORED_TUTORIAL, FLOOR = "tutorial", "tutorial, mirrored on 2", "floor"
QUESTIONS = [
    measure.Question("time of a step, one replica mirrored / one device", ALONE, ONE_REPLICA, "at most", 1.03),
    measure.Question("examples/s, custom loop / the tutorial's `fit`", ALONE, TUTORIAL, "at least", 1.3),
    measure.Question(
        "examples/s, mirrored on 2: custom loop / plain `fit`", TWO_REPLICAS, MIRRORED_TUTORIAL, "at least", 1.5
    ),
    measure.Question("examples/s, custom loop / floor", ALONE, FLOOR, "at least", 0.85),
]


def ours(dataset: str, epochs: int, strategy: dict[str, object]) -> float:
    """Train with the project's own stage, without tracking; return its examples per second."""
    loop = {"train.loop": "custom", "train.steps_per_execution": STEPS_PER_EXECUTION}
    values = {"dataset.name": dataset, "train.epochs": epochs, **SAME_TRAINING, **loop, **strategy}
    environment = stage_environment(config.load(overrides=values))
    _, output = measure.run([sys.executable, "-m", "benchmarks.training", json.dumps(values)], environment)
    return json.loads(output.splitlines()[-1])["examples_per_second"]


def floor(dataset: str, epochs: int, *options: str) -> float:
    """Train with nothing but TensorFlow's operations; return the examples per second."""
    _, output = measure.run([sys.executable, "-m", "benchmarks.floor", dataset, str(epochs), *options])
    return json.loads(output.splitlines()[-1])["examples_per_second"]


def one_process(dataset: str) -> str:
    """Measure what one replica costs without the differences between processes; return the sentence."""
    loop = {"train.loop": "custom", "train.steps_per_execution": STEPS_PER_EXECUTION}
    values = {"dataset.name": dataset, **SAME_TRAINING, **loop}
    environment = stage_environment(config.load(overrides=values))
    _, output = measure.run([sys.executable, "-m", "benchmarks.calls", json.dumps(values)], environment)
    seconds = json.loads(output.splitlines()[-1])
    mirrored, alone = seconds["mirrored"], seconds["one_device"]
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mirrored, alone, strict=True)], n=4)
    return (
        f"One process after the other differs by more than the 0.03 that are asked for. With both step functions in "
        f"one process, {len(alone)} calls of each in turn, a step takes {statistics.median(mirrored) * 1e3:.2f} ms "
        f"mirrored on one device and {statistics.median(alone) * 1e3:.2f} ms on one device: {middle:.3f} times as long "
        f"(middle half of the pairs: {low:.3f} to {high:.3f})."
    )


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    # What is compared stands side by side, as far as can be: the machine may be busier later.
    variants = {
        FLOOR: lambda: floor(dataset, epochs),
        TUTORIAL: lambda: tutorial(dataset, epochs)[1]["examples_per_second"],
        **{name: lambda strategy=strategy: ours(dataset, epochs, strategy) for name, strategy in OURS.items()},
        MIRRORED_TUTORIAL: lambda: tutorial(dataset, epochs, "--devices", "2")[1]["examples_per_second"],
    }
    speeds = measure.alternate("strategies", repeats, variants)
    lines = [
        "## Strategies",
        "",
        f"{measure.machine('tensorflow', 'keras')}. Dataset {dataset}, {epochs} epochs, {repeats} repeats: each "
        "variant is a process of its own, and they take turns; median (range). Conv32-Pool-Dense64, Adam, 64 examples "
        "a replica and step. Examples/s are of all steps after the first call of the step function, which traces.",
        "",
        f"**The two devices of this table are {'the same ' if (os.cpu_count() or 1) < 3 else 'parts of the same '}"
        f"{os.cpu_count()} cores.** One device uses all of them already, so a second one adds its own work and gains "
        "nothing. The table shows what distribution costs here, not what it gains on a machine with two GPUs.",
        "",
        "| variant | examples/s |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in speeds.items()),
        "",
        *measure.answers(QUESTIONS, speeds),
        "",
        one_process(dataset),
        "",
        f"Ours are trained by the project's own stage (`tasks.train`) with {STEPS_PER_EXECUTION} steps a call and no "
        "tracking. `tutorial` is TensorFlow's tutorial as its source writes it (`benchmarks/tutorial.py`), on one "
        "device and under MirroredStrategy on two; `floor` (`benchmarks/floor.py`) has the data resident and a whole "
        "epoch in one `tf.function`, with no metric, no callback, no checkpoint.",
        "",
    ]
    return "\n".join(lines)

"""Examples per second in training, and what an evaluation takes, beside the tutorial and the floor."""

import json
import sys
from functools import partial

from benchmarks import measure
from benchmarks.pipeline import SAME_TRAINING, tutorial
from benchmarks.strategies import floor
from tasks import config
from tasks.process.environment import stage_environment

FLOAT32, BFLOAT16, PERCEPTRON = "convnet, ours", "convnet, ours, mixed_bfloat16", "perceptron, ours"
TUTORIAL, IMPROVED, FLOOR = "convnet, tutorial", "convnet, tutorial improved", "convnet, floor"
PERCEPTRON_TUTORIAL, PERCEPTRON_IMPROVED = "perceptron, tutorial", "perceptron, tutorial improved"
BFLOAT16_FLOOR, PERCEPTRON_FLOOR = "convnet, floor, mixed_bfloat16", "perceptron, floor"
OURS = {
    FLOAT32: {},
    BFLOAT16: {"train.dtype_policy": "mixed_bfloat16"},
    PERCEPTRON: {"model.name": "mlp", "model.options": {}},
}
QUESTIONS = [
    measure.Question("examples/s, convnet, float32: ours / tutorial", FLOAT32, TUTORIAL, "at least", 1.6),
    measure.Question("... / tutorial with prefetch and 20 steps a call", FLOAT32, IMPROVED, "at least", 1),
    measure.Question("... / floor", FLOAT32, FLOOR, "at least", 0.95),
    measure.Question("examples/s, convnet, mixed_bfloat16: ours / tutorial", BFLOAT16, TUTORIAL, "at least", 2.1),
    measure.Question("... / floor", BFLOAT16, BFLOAT16_FLOOR, "at least", 0.95),
    measure.Question("examples/s, perceptron: ours / tutorial", PERCEPTRON, PERCEPTRON_TUTORIAL, "at least", 2.8),
    measure.Question(
        "... / tutorial with prefetch and 20 steps a call", PERCEPTRON, PERCEPTRON_IMPROVED, "at least", 1
    ),
    measure.Question("... / floor", PERCEPTRON, PERCEPTRON_FLOOR, "at least", 0.95),
]
EVALUATION = measure.Question("seconds of an evaluation: ours / `model.evaluate`", "ours", "tutorial", "at most", 0.5)
ACCURACY = measure.Question("test accuracy: mixed_bfloat16 / float32, both ours", BFLOAT16, FLOAT32, "at least", 0.998)


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    evaluation: dict[str, list[float]] = {"ours": [], "tutorial": []}
    accuracy: dict[str, list[float]] = {FLOAT32: [], BFLOAT16: [], TUTORIAL: []}
    compiled: dict[str, bool] = {}

    def ours(name: str) -> float:
        values = {"dataset.name": dataset, "train.epochs": epochs, **SAME_TRAINING, **OURS[name]}
        environment = stage_environment(config.load(overrides=values))
        _, output = measure.run([sys.executable, "-m", "benchmarks.training", json.dumps(values)], environment)
        found = json.loads(output.splitlines()[-1])
        compiled[name] = found["jit_compile"]
        if name in accuracy:
            accuracy[name].append(found["test/accuracy"])
        if name == FLOAT32:
            evaluation["ours"].append(found["evaluation_seconds"])
        return found["examples_per_second"]

    def peer(name: str, *options: str) -> float:
        _, found = tutorial(dataset, epochs, *options)
        if name == TUTORIAL:
            evaluation["tutorial"].append(found["evaluation_seconds"])
            accuracy[name].append(found["test/accuracy"])
        return found["examples_per_second"]

    speeds = measure.alternate(
        "speed",
        repeats,
        {
            TUTORIAL: partial(peer, TUTORIAL),
            FLOAT32: partial(ours, FLOAT32),
            FLOOR: lambda: floor(dataset, epochs),
            BFLOAT16: partial(ours, BFLOAT16),
            BFLOAT16_FLOOR: lambda: floor(dataset, epochs, "convnet", "mixed_bfloat16"),
            IMPROVED: partial(peer, IMPROVED, "--improved"),
            PERCEPTRON_TUTORIAL: partial(peer, PERCEPTRON_TUTORIAL, "--model", "mlp"),
            PERCEPTRON: partial(ours, PERCEPTRON),
            PERCEPTRON_FLOOR: lambda: floor(dataset, epochs, "mlp"),
            PERCEPTRON_IMPROVED: partial(peer, PERCEPTRON_IMPROVED, "--model", "mlp", "--improved"),
        },
    )
    lines = [
        "## Training",
        "",
        f"{measure.machine('tensorflow', 'keras')}. Dataset {dataset}, {epochs} epochs, {repeats} repeats: each "
        "variant is a process of its own, and they take turns; median (range). 64 examples a step, Adam. Examples/s "
        "are of all steps after the first call of the step function, which traces.",
        "",
        "| variant | examples/s |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in speeds.items()),
        "",
        *measure.answers(QUESTIONS, speeds),
        *measure.answers([EVALUATION], evaluation)[2:],
        *measure.answers([ACCURACY], accuracy)[2:],
        "",
        f"Test accuracy after {epochs} epochs: "
        + ", ".join(f"{name} {measure.spread(values, 4)}" for name, values in accuracy.items())
        + ". Ours has default settings: calls of as many steps as fit a quarter of a second, and XLA for "
        + (" and ".join(name for name, chosen in compiled.items() if chosen) or "none of these")
        + ".",
        "",
        "`convnet` is Conv32-Pool-Dense64 of TensorFlow's tutorial, `perceptron` 784-256-256-10 of Keras' guide, both "
        "in `benchmarks/tutorial.py` as their sources write them; *improved* adds what everybody knows, prefetch and "
        "steps_per_execution. `floor` (`benchmarks/floor.py`) has the data resident and a whole epoch in one "
        "`tf.function`, with no metric, no callback and no checkpoint; the perceptron's step is compiled by XLA. In "
        "ours XLA compiles the loop as well.",
        "",
    ]
    return "\n".join(lines)

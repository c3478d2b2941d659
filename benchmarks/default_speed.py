"""The default table: the commands as a user types them, next to the tutorial, plain Keras and the floor.

Only the model, the number of epochs, the batch size and the strategy are set. Three repeats take at most 20 minutes.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from benchmarks import measure
from benchmarks.measure import Question

HEADING = "## Default settings\n"
SHORT, SHORT_EPOCHS = "digits", 2
UNITS = 32
SCRIPT = "tutorial"
IMPROVED = "tutorial with prefetch and 20 steps per call"
FLOOR = "floor"
CONVNET, PERCEPTRON, MIRRORED = "convnet", "perceptron", "mirrored x2"
JAX, JAX_X2 = "32 units on JAX", "32 units on JAX, x2"
OURS: dict[str, dict[str, object]] = {
    CONVNET: {"model.name": "convnet"},
    PERCEPTRON: {"model.name": "mlp"},
    **{
        name: {
            "model.name": "mlp",
            "model.options": {"units": [UNITS]},
            "strategy.kind": "data_parallel",
            "strategy.devices": devices,
        }
        for name, devices in ((JAX, 1), (JAX_X2, 2))
    },
    MIRRORED: {"model.name": "convnet", "strategy.kind": "mirrored", "strategy.devices": 2},
}
TUTORIALS = {
    f"{SCRIPT}, {CONVNET}": (),
    f"{IMPROVED}, {CONVNET}": ("--improved",),
    f"{SCRIPT}, {PERCEPTRON}": ("--model", "mlp"),
    f"{SCRIPT}, {MIRRORED}": ("--devices", "2"),
}
PLAIN, PLAIN_X2, RUN, BARE = "plain Keras", "plain Keras x2", "run of digits", "tutorial's script"
SPEEDS = [
    Question("examples/s, convnet", CONVNET, f"{SCRIPT}, {CONVNET}", "at least", 1.5),
    Question("...", CONVNET, f"{IMPROVED}, {CONVNET}", "at least", 1.25),
    Question("...", CONVNET, f"{FLOOR}, {CONVNET}", "at least", 1.1),
    Question("examples/s, perceptron", PERCEPTRON, f"{SCRIPT}, {PERCEPTRON}", "at least", 2.8),
    Question("...", PERCEPTRON, f"{FLOOR}, {PERCEPTRON}", "at least", 0.95),
    Question(f"examples/s, {UNITS} units, `data_parallel` on JAX", JAX, PLAIN, "at least", 1.2),
    Question(f"examples/s, {UNITS} units, `data_parallel` on 2 devices", JAX_X2, PLAIN_X2, "at least", 1.2),
    Question("examples/s, `mirrored` on 2 devices", MIRRORED, f"{SCRIPT}, {MIRRORED}", "at least", 1.5),
    Question(f"seconds of a run of {SHORT}, {SHORT_EPOCHS} epochs, no server", RUN, BARE, "at most", 1.15),
]
MEMORY = Question("peak memory of the largest process, convnet, MB", CONVNET, f"{SCRIPT}, {CONVNET}", "at most", 0.9)
COMMANDS = {"--help": 0.15, "runs": 0.4, "status": 0.4}


def tutorial(dataset: str, epochs: int, *options: str) -> tuple[measure.Done, dict[str, Any]]:
    """Run the tutorial's script on the same TFDS files."""
    done = measure.watch(measure.module("tutorial", dataset, f"data/{dataset}/raw", epochs, *options))
    return done, json.loads(done.output.splitlines()[-1])


def ours(recipe: str | None, settings: dict[str, object]) -> tuple[measure.Done, dict[str, Any]]:
    """Run `stratagem run [RECIPE]` with these settings, apart from the user's own runs and models."""
    settings = {**settings, "tracking.experiment": "benchmarks", "register.model_name": "benchmarks"}
    command = measure.stratagem("run", *([recipe] if recipe else []), "--json", "--fresh", settings=settings)
    done = measure.watch(command, measure.without_server())
    return done, json.loads(done.output)


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    memory: dict[str, list[float]] = {}
    recipe = dataset if (measure.ROOT / "recipes" / f"{dataset}.yaml").is_file() else None

    def train(name: str) -> float:
        settings = {"train.per_replica_batch_size": 64, "train.epochs": epochs, "dataset.name": dataset, **OURS[name]}
        done, record = ours(recipe, settings)
        memory.setdefault(name, []).append(done.peak_megabytes)
        return float(record["examples_per_second"])

    def script(name: str) -> float:
        done, record = tutorial(dataset, epochs, *TUTORIALS[name])
        memory.setdefault(name, []).append(done.peak_megabytes)
        return float(record["examples_per_second"])

    def floor(model: str) -> float:
        return float(measure.read(measure.module("floor", dataset, epochs, model))["examples_per_second"])

    def plain(devices: int) -> float:
        command = measure.module("plain_jax", dataset, epochs, UNITS, devices)
        return float(measure.read(command, {**os.environ, "KERAS_BACKEND": "jax"})["examples_per_second"])

    variants: dict[str, Callable[[], float]] = {
        **{name: lambda name=name: train(name) for name in OURS},
        **{name: lambda name=name: script(name) for name in TUTORIALS},
        f"{FLOOR}, {CONVNET}": lambda: floor("convnet"),
        f"{FLOOR}, {PERCEPTRON}": lambda: floor("mlp"),
        PLAIN: lambda: plain(1),
        PLAIN_X2: lambda: plain(2),
        RUN: lambda: ours(None, {"dataset.name": SHORT, "train.epochs": SHORT_EPOCHS})[0].seconds,
        BARE: lambda: tutorial(SHORT, SHORT_EPOCHS)[0].seconds,
        **{
            # `status` ends with 1, because no server runs.
            word: lambda word=word: (
                measure.watch(measure.stratagem(word), measure.without_server(), codes=(0, 1)).seconds
            )
            for word in COMMANDS
        },
    }
    # What is compared runs side by side, as far as possible: the machine may be busier later.
    # On so few steps as digits has, TensorFlow aborts the tutorial under MirroredStrategy.
    questions = [asked for asked in SPEEDS if asked.ours != MIRRORED or dataset != SHORT]
    order = [name for asked in questions for name in (asked.ours, asked.peer) if name is not None] + list(COMMANDS)
    found = measure.alternate("default_speed", repeats, {name: variants[name] for name in dict.fromkeys(order)})
    commands = [
        Question(f"seconds of `stratagem {word}`", word, None, "at most", bound) for word, bound in COMMANDS.items()
    ]
    lines = [
        *measure.answers(questions, found.figures),
        *measure.answers([MEMORY], memory)[2:],
        *measure.answers(commands, found.figures)[2:],
        "",
        "Ours is `stratagem run`, with validation, tracking, checkpoints, evaluation and registration. `tutorial` is "
        "[TensorFlow's](https://www.tensorflow.org/tutorials/distribute/keras) (`benchmarks/tutorial.py`), alone or "
        "under the same strategy; the perceptron (784-256-256-10) is that of Keras' guide. `floor` keeps the data in "
        "memory and trains a whole epoch in one `tf.function`, without metrics, callbacks or checkpoints. Two devices "
        "share the same cores here: the row shows what distribution costs, not what it gains.",
    ]
    about = (
        f"{dataset}, {epochs} epochs, batch size 64, {repeats} repeats. Examples/s count all steps after the first "
        "call, which traces."
    )
    return measure.section(HEADING, ("tensorflow", "keras", "jax", "prefect", "mlflow"), found.others, about, lines)

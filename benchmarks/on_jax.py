"""Both loops on JAX beside plain Keras with arrays in `fit`: a perceptron so small that what feeds it decides.

`python -m benchmarks.on_jax DATASET EPOCHS STEPS_PER_EXECUTION` is the plain one, and prints its speed as a JSON line.
"""

import json
import sys
import time
from functools import partial

import numpy as np

from benchmarks import measure
from benchmarks.pipeline import SAME_TRAINING
from tasks import config
from tasks.process.environment import stage_environment

HEADING = "## JAX\n"
UNITS = 32
FIT, CUSTOM, SINGLE = "ours, fit", "ours, custom", "ours, fit, 1 step a call"
PLAIN, MANY = "plain Keras", "plain Keras, 25 steps a call"
OURS = {FIT: {}, CUSTOM: {"train.loop": "custom"}, SINGLE: {"train.steps_per_execution": 1}}
QUESTIONS = [
    measure.Question("examples/s, `fit` / plain Keras", FIT, PLAIN, "at least", 1.2),
    measure.Question("... `custom` / plain Keras", CUSTOM, PLAIN, "at least", 1.2),
    measure.Question("... `fit`, 1 step a call / plain Keras", SINGLE, PLAIN, "at least", 1),
    measure.Question("... `fit` / plain Keras, 25 steps a call", FIT, MANY, "at least", 1),
]


def settings_of(dataset: str, epochs: int) -> dict[str, object]:
    """Return the settings of ours, which has steps traced after the training."""
    model = {"model.name": "mlp", "model.options": {"units": [UNITS]}, "train.traced_steps": 500}
    where = {"strategy.kind": "data_parallel", "strategy.devices": 1}
    return {"dataset.name": dataset, "train.epochs": epochs, **SAME_TRAINING, **model, **where}


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    environment = stage_environment(config.load(overrides=settings_of(dataset, epochs)))
    host: dict[str, list[float]] = {name: [] for name in OURS}

    def ours(name: str) -> float:
        values = settings_of(dataset, epochs) | OURS[name]
        _, output = measure.run([sys.executable, "-m", "benchmarks.training", json.dumps(values)], environment)
        found = json.loads(output.splitlines()[-1])
        host[name].append(found["step_time"]["host_ms"])
        return float(found["examples_per_second"])

    def plain(steps: int) -> float:
        command = [sys.executable, "-m", "benchmarks.on_jax", dataset, str(epochs), str(steps)]
        return float(json.loads(measure.run(command, environment)[1])["examples_per_second"])

    variants = {PLAIN: partial(plain, 1), FIT: partial(ours, FIT), MANY: partial(plain, 25)}
    variants |= {name: partial(ours, name) for name in (CUSTOM, SINGLE)}
    speeds = measure.alternate("jax", repeats, variants)
    lines = [
        HEADING,
        f"{measure.machine('jax', 'keras')}. Dataset {dataset}, {epochs} epochs, {repeats} repeats: each variant is a "
        f"process of its own, and they take turns; median (range). A perceptron of {UNITS} units, 64 examples a step, "
        "Adam, `data_parallel` on one CPU device. Examples/s are of all steps after the first call (plain: the first "
        "epoch). No GPU has been measured with this loop.",
        "",
        "| variant | examples/s |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in speeds.items()),
        "",
        *measure.answers(QUESTIONS, speeds),
        "",
        "What the host takes of a step while nothing computes, in ms, by a trace of 500 steps after the training: "
        + "; ".join(f"{name} {measure.spread(values, 3)}" for name, values in host.items())
        + ". With 1 step a call, callbacks and the look at the loss come in each step, which waits for it on a CPU; by "
        "default a call takes up to a quarter of a second.",
        "",
    ]
    return "\n".join(lines)


def main(name: str, epochs: int, steps_per_execution: int) -> None:
    """Train with nothing but Keras, and time all epochs but the first, which compiles."""
    import keras

    class Clock(keras.callbacks.Callback):
        times: list[float] = []

        def on_epoch_begin(self, epoch, logs=None):
            self.times.append(time.perf_counter())

    images = np.load(f"data/{name}/prepared/train_images.npy")
    labels = np.load(f"data/{name}/prepared/train_labels.npy")
    layers = keras.layers
    hidden = [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(UNITS, activation="relu")]
    model = keras.Sequential([keras.Input(images.shape[1:]), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    clock = Clock()
    model.fit(images, labels, batch_size=64, epochs=epochs, callbacks=[clock], verbose=0)
    seconds = time.perf_counter() - clock.times[1]
    print(json.dumps({"examples_per_second": len(images) * (epochs - 1) / seconds}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""A whole run of ours beside the plain recipe's whole script: short and long, with and without a Prefect server."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import measure

BIN = Path(sys.executable).parent
SHORT, SHORT_EPOCHS = "digits", 2
# Twelve epochs, as the tutorial trains: more than a minute of the script's time where the dataset is MNIST.
LONG_EPOCHS = 12
# The tutorial's training in our settings: the same model, batch, optimizer, learning rate; no validation, nothing
# augmented.
SAME_TRAINING = {
    "model.name": "convnet",
    "schedule.kind": "constant",
    "schedule.learning_rate": 0.001,
    "train.per_replica_batch_size": 64,
    "input.validation": None,
    "input.augmentation.crop_padding": 0,
    "checkpoint.monitor": "train/loss",
}
FAST = {"train.loop": "custom", "train.autotune": True}
SCRIPT, ALONE, SERVED = "script, short", "run, short, no server", "run, short, server up"
UNCHANGED = "run --if-changed, nothing changed"
LONG, LONG_SCRIPT, LONG_IMPROVED = "run, long", "script, long", "script with prefetch and 20 steps a call, long"
QUESTIONS = [
    measure.Question("short: run with a Prefect server up / script", SERVED, SCRIPT, "at most", 1.35),
    measure.Question("short: run without a server / script", ALONE, SCRIPT, "at most", 1.7),
    measure.Question("long: run / script", LONG, LONG_SCRIPT, "at most", 1.0),
    measure.Question("... / script with prefetch and 20 steps a call", LONG, LONG_IMPROVED, "at most", 1.0),
    measure.Question("`--if-changed` with nothing changed / the run before it", UNCHANGED, ALONE, "at most", 0.15),
]


def ours(
    dataset: str, values: Mapping[str, object], *options: str, environment: Mapping[str, str] | None = None
) -> tuple[measure.Done, dict[str, object]]:
    """Run `stratagem run` with the tutorial's training."""
    # Not among the user's own runs and models.
    apart = {"tracking.experiment": "benchmarks", "register.model_name": "benchmarks"}
    values = {"dataset.name": dataset, **SAME_TRAINING, **apart, **values}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    done = measure.watch([str(BIN / "stratagem"), "run", "--json", *settings, *options], environment or alone)
    return done, json.loads(done.output)


def tutorial(dataset: str, epochs: int, *options: str) -> tuple[measure.Done, dict[str, float]]:
    """Run the plain recipe on the same TFDS files."""
    arguments = [dataset, f"data/{dataset}/raw", str(epochs), *options]
    done = measure.watch([sys.executable, "-m", "benchmarks.tutorial", *arguments])
    return done, json.loads(done.output.splitlines()[-1])


@contextlib.contextmanager
def prefect_server() -> Iterator[dict[str, str]]:
    """A Prefect server of its own; gives the environment of a command that uses it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PREFECT_HOME": home, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        command = [str(BIN / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}/api"
            while server.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                time.sleep(0.5)
            yield {**environment, "PREFECT_API_URL": url}
        finally:
            server.terminate()
            server.wait()


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    memory: dict[str, list[float]] = {}
    stages: list[dict[str, float]] = []
    accuracies: dict[str, list[float]] = {}
    training: list[float] = []

    def kept(name: str, done: measure.Done, record: Mapping[str, object], accuracy: float) -> float:
        memory.setdefault(name, []).append(done.peak_megabytes)
        accuracies.setdefault(name, []).append(accuracy)
        if name == ALONE:
            stages.append(record["seconds"])
        return done.seconds

    def run(name: str, of: str, values: Mapping[str, object], *options: str, **served: Mapping[str, str]) -> float:
        done, record = ours(of, values, *options, **served)
        return kept(name, done, record, record["metrics"]["test/accuracy"])

    def script(name: str, of: str, epochs: int, *options: str) -> float:
        done, record = tutorial(of, epochs, *options)
        if name == LONG_SCRIPT:
            training.append(record["training_seconds"])
        return kept(name, done, record, record["test/accuracy"])

    def served() -> float:
        with prefect_server() as environment:
            return run(SERVED, SHORT, short, "--fresh", environment=environment)

    def long() -> float:
        with measure.no_tunings():
            return run(LONG, dataset, {"train.epochs": LONG_EPOCHS, **FAST}, "--fresh")

    short = {"train.epochs": SHORT_EPOCHS}
    measure.run([str(BIN / "stratagem"), "prepare", "--set", f"dataset.name={SHORT}"])
    seconds = measure.alternate(
        "pipeline",
        repeats,
        {
            SCRIPT: lambda: script(SCRIPT, SHORT, SHORT_EPOCHS),
            SERVED: served,
            ALONE: lambda: run(ALONE, SHORT, short, "--fresh"),
            UNCHANGED: lambda: run(UNCHANGED, SHORT, short, "--if-changed"),
            LONG_SCRIPT: lambda: script(LONG_SCRIPT, dataset, LONG_EPOCHS),
            LONG_IMPROVED: lambda: script(LONG_IMPROVED, dataset, LONG_EPOCHS, "--improved"),
            LONG: long,
            "stratagem --help": lambda: measure.run([str(BIN / "stratagem"), "--help"])[0],
        },
    )
    question = measure.Question(
        "long: peak memory of the largest process, run / script", LONG, LONG_SCRIPT, "at most", 1.25
    )
    by_stage = {name: measure.spread([one[name] for one in stages], 1) for name in stages[0]}
    lines = [
        "## A whole run",
        "",
        f"{measure.machine('tensorflow', 'keras', 'prefect', 'mlflow', 'dvc')}. {repeats} repeats, alternated; median "
        f"(range). Short: {SHORT}, {SHORT_EPOCHS} epochs. Long: {dataset}, {LONG_EPOCHS} epochs, ours with "
        "`train.autotune=true`, whose trial is made in each of these runs. The long script's steps take "
        f"{measure.spread(training, 0)} s of it.",
        "",
        "| what | seconds | peak memory of the largest process, MB | test accuracy |",
        "|---|---|---|---|",
        *(
            f"| {name} | {measure.spread(values)} | {measure.spread(memory[name], 0) if name in memory else ''} | "
            f"{measure.spread(accuracies[name], 4) if name in accuracies else ''} |"
            for name, values in seconds.items()
        ),
        "",
        *measure.answers(QUESTIONS, seconds),
        *measure.answers([question], memory)[2:],
        "",
        "The script is the [tutorial](https://www.tensorflow.org/tutorials/distribute/keras) as its source writes it "
        "(`benchmarks/tutorial.py`): `tfds.load`, `map(scale).cache().shuffle(10000).batch(64)`, Conv32-Pool-Dense64, "
        "`fit`, `evaluate`; on the same TFDS files. Ours does the same training and also looks at the data through DVC "
        "(a no-op here), checkpoints each epoch, evaluates the restored checkpoint, tracks, exports and registers.",
        "",
        f"Seconds inside a short run without a server, by stage: "
        f"{', '.join(f'{name} {value}' for name, value in by_stage.items())}. `total` is the flow's; the rest is the "
        "start of Python, Prefect and its server.",
        "",
    ]
    return "\n".join(lines)

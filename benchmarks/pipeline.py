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
from typing import Any

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
SHORT_HEADING, LONG_HEADING = "## A short run\n", "## A long run\n"
SCRIPT, IMPROVED = "script", "script with prefetch and 20 steps a call"
ALONE, SERVED, LONG = "run, no server", "run, server up", "run"
UNCHANGED = "run --if-changed, nothing changed"
SHORT_QUESTIONS = [
    measure.Question("run with a Prefect server up / script", SERVED, SCRIPT, "at most", 1.25),
    measure.Question("run without a server / script", ALONE, SCRIPT, "at most", 1.5),
    measure.Question("`--if-changed` with nothing changed / the run before it", UNCHANGED, ALONE, "at most", 0.15),
]
LONG_QUESTIONS = [
    measure.Question("run / script", LONG, SCRIPT, "at most", 1.0),
    measure.Question("... / script with prefetch and 20 steps a call", LONG, IMPROVED, "at most", 1.0),
]
LONG_MEMORY = measure.Question("peak memory of the largest process: run / script", LONG, SCRIPT, "at most", 1.25)
SCRIPTS = (
    "The script is the [tutorial](https://www.tensorflow.org/tutorials/distribute/keras) as its source writes it "
    "(`benchmarks/tutorial.py`): `tfds.load`, `map(scale).cache().shuffle(10000).batch(64)`, Conv32-Pool-Dense64, "
    "`fit`, `evaluate`; on the same TFDS files. Ours does the same training and also looks at the data through DVC "
    "(a no-op here), checkpoints each epoch, evaluates the restored checkpoint, tracks, exports and registers."
)


def ours(
    dataset: str, values: Mapping[str, object], *options: str, environment: Mapping[str, str] | None = None
) -> tuple[measure.Done, dict[str, Any]]:
    """Run `stratagem run` with the tutorial's training."""
    # Not among the user's own runs and models.
    apart = {"tracking.experiment": "benchmarks", "register.model_name": "benchmarks"}
    values = {"dataset.name": dataset, **SAME_TRAINING, **apart, **values}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    done = measure.watch([str(BIN / "stratagem"), "run", "--json", *settings, *options], environment or alone)
    return done, json.loads(done.output)


def ours_as_typed(
    recipe: str | None, values: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> tuple[measure.Done, dict[str, Any]]:
    """Run `stratagem run RECIPE` with nothing set but these values, and with where its run and its model are kept."""
    values = {**values, "tracking.experiment": "benchmarks", "register.model_name": "benchmarks"}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [str(BIN / "stratagem"), "run", *([recipe] if recipe else []), "--json", "--fresh", *settings]
    done = measure.watch(command, environment or alone)
    return done, json.loads(done.output)


def tutorial(dataset: str, epochs: int, *options: str) -> tuple[measure.Done, dict[str, Any]]:
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


class Measured:
    """What the runs of a section left, by variant: peak memory in MB, test accuracy, and their records."""

    def __init__(self) -> None:
        self.memory: dict[str, list[float]] = {}
        self.accuracies: dict[str, list[float]] = {}
        self.records: dict[str, list[dict[str, Any]]] = {}

    def run(
        self, name: str, of: str, values: Mapping[str, object], *options: str, **served: Mapping[str, str]
    ) -> float:
        """Run ours and return its seconds."""
        done, record = ours(of, values, *options, **served)
        return self._keep(name, done, record, record["metrics"]["test/accuracy"])

    def script(self, name: str, of: str, epochs: int, *options: str) -> float:
        """Run the plain recipe and return its seconds."""
        done, record = tutorial(of, epochs, *options)
        return self._keep(name, done, record, record["test/accuracy"])

    def _keep(self, name: str, done: measure.Done, record: dict[str, Any], accuracy: float) -> float:
        self.memory.setdefault(name, []).append(done.peak_megabytes)
        self.accuracies.setdefault(name, []).append(accuracy)
        self.records.setdefault(name, []).append(record)
        return done.seconds

    def table(self, seconds: Mapping[str, list[float]]) -> list[str]:
        """Return the lines of the table."""
        return [
            "| what | seconds | peak memory of the largest process, MB | test accuracy |",
            "|---|---|---|---|",
            *(
                f"| {name} | {measure.spread(values)} | "
                f"{measure.spread(self.memory[name], 0) if name in self.memory else ''} | "
                f"{measure.spread(self.accuracies[name], 4) if name in self.accuracies else ''} |"
                for name, values in seconds.items()
            ),
            "",
        ]


def short_section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure runs that are over in seconds; return the page's section."""
    found = Measured()

    def served() -> float:
        with prefect_server() as environment:
            return found.run(SERVED, SHORT, values, "--fresh", environment=environment)

    values = {"train.epochs": SHORT_EPOCHS}
    measure.run([str(BIN / "stratagem"), "prepare", "--set", f"dataset.name={SHORT}"])
    seconds = measure.alternate(
        "short",
        repeats,
        {
            SCRIPT: lambda: found.script(SCRIPT, SHORT, SHORT_EPOCHS),
            SERVED: served,
            ALONE: lambda: found.run(ALONE, SHORT, values, "--fresh"),
            UNCHANGED: lambda: found.run(UNCHANGED, SHORT, values, "--if-changed"),
            "stratagem --help": lambda: measure.run([str(BIN / "stratagem"), "--help"])[0],
        },
    )
    stages = [one["seconds"] for one in found.records[ALONE]]
    by_stage = ", ".join(f"{name} {measure.spread([one[name] for one in stages], 1)}" for name in stages[0])
    lines = [
        SHORT_HEADING,
        f"{measure.machine('tensorflow', 'keras', 'prefect', 'mlflow', 'dvc')}. {repeats} repeats, alternated; median "
        f"(range). {SHORT}, {SHORT_EPOCHS} epochs.",
        "",
        *found.table(seconds),
        *measure.answers(SHORT_QUESTIONS, seconds),
        "",
        SCRIPTS,
        "",
        f"Seconds inside a run without a server, by stage: {by_stage}. `total` is the flow's; the rest is the start of "
        "Python, Prefect and its server.",
        "",
    ]
    return "\n".join(lines)


def long_section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure runs that train for a minute; return the page's section."""
    found = Measured()

    seconds = measure.alternate(
        "long",
        repeats,
        {
            SCRIPT: lambda: found.script(SCRIPT, dataset, LONG_EPOCHS),
            IMPROVED: lambda: found.script(IMPROVED, dataset, LONG_EPOCHS, "--improved"),
            LONG: lambda: found.run(LONG, dataset, {"train.epochs": LONG_EPOCHS}, "--fresh"),
        },
    )
    training = [one["training_seconds"] for one in found.records[SCRIPT]]
    lines = [
        LONG_HEADING,
        f"{measure.machine('tensorflow', 'keras', 'prefect', 'mlflow', 'dvc')}. {repeats} repeats, alternated; median "
        f"(range). {dataset}, {LONG_EPOCHS} epochs, ours without a Prefect server. The script's steps take "
        f"{measure.spread(training, 0)} s of it.",
        "",
        *found.table(seconds),
        *measure.answers(LONG_QUESTIONS, seconds),
        *measure.answers([LONG_MEMORY], found.memory)[2:],
        "",
        SCRIPTS,
        "",
    ]
    return "\n".join(lines)

"""`make bench`: alternate our runs and the plain recipe's in one go, and write docs/benchmarks.md.

Every figure is of whole processes, started in turn on the same machine; ratios are of medians, with the range of the
single ones.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# The tutorial's training in our settings: the same model, batch, optimizer, learning rate; no validation, nothing
# augmented.
SAME_TRAINING = {
    "model.name": "convnet",
    "schedule.kind": "constant",
    "schedule.learning_rate": 0.001,
    "train.per_replica_batch_size": 64,
    "input.validation": "null",
    "input.augmentation.crop_padding": 0,
    "checkpoint.monitor": "train/loss",
}


def measure(command: list[str]) -> tuple[float, str]:
    """Run a command to its end; return its seconds and its standard output."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def ours(dataset: str, epochs: int, *options: str) -> tuple[float, dict[str, object]]:
    """Run `stratagem run` with the tutorial's training."""
    values = {"dataset.name": dataset, "train.epochs": epochs, **SAME_TRAINING}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    seconds, output = measure([str(BIN / "stratagem"), "run", "--json", *settings, *options])
    return seconds, json.loads(output)


def tutorial(dataset: str, epochs: int) -> tuple[float, dict[str, object]]:
    """Run the plain recipe on the same TFDS files."""
    arguments = [dataset, f"data/{dataset}/raw", str(epochs)]
    seconds, output = measure([sys.executable, "-m", "benchmarks.tutorial", *arguments])
    return seconds, json.loads(output.splitlines()[-1])


def spread(values: list[float], digits: int = 2) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def row(what: str, mine: list[float], peer: list[float], digits: int = 1) -> str:
    """Return a line of the table: both medians with their ranges, and the ratio with that of the pairs."""
    ratios = [a / b for a, b in zip(mine, peer, strict=True)]
    ratio = statistics.median(mine) / statistics.median(peer)
    return (
        f"| {what} | {spread(mine, digits)} | {spread(peer, digits)} "
        f"| {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    """Measure, print the page and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    known = ROOT / "data" / "mnist" / "prepared"
    parser.add_argument("--dataset", default="mnist" if known.is_dir() else "digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    dataset, epochs, repeats = arguments.dataset, arguments.epochs, arguments.repeats

    measure([str(BIN / "stratagem"), "prepare", "--set", f"dataset.name={dataset}"])
    runs, scripts, unchanged, helps = [], [], [], []
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
        runs.append(ours(dataset, epochs, "--set", f"train.seed={time.time_ns() % 2**31}"))
        scripts.append(tutorial(dataset, epochs))
        helps.append(measure([str(BIN / "stratagem"), "--help"])[0])
    ours(dataset, epochs)
    unchanged.extend(ours(dataset, epochs, "--if-changed")[0] for _ in range(repeats))

    processor = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("tensorflow", "keras", "prefect", "mlflow", "dvc"))
    accuracies = {
        "ours": [run["metrics"]["test/accuracy"] for _, run in runs],
        "tutorial": [script["test/accuracy"] for _, script in scripts],
    }
    stages = {name: spread([run["seconds"][name] for _, run in runs], 1) for name in runs[0][1]["seconds"]}
    walls, peers = [s for s, _ in runs], [s for s, _ in scripts]
    speeds = [[record["examples_per_second"] for _, record in side] for side in (runs, scripts)]
    share = statistics.median(unchanged) / statistics.median(walls)
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores, {processor}, Python "
        f"{platform.python_version()}, {versions}. Dataset {dataset}, {epochs} epochs, {repeats} repeats, alternated; "
        "median (range). No Prefect server was running, so each `stratagem run` started one of its own.",
        "",
        "The peer is the [tutorial](https://www.tensorflow.org/tutorials/distribute/keras) as its source writes it "
        "(`benchmarks/tutorial.py`): `tfds.load`, `map(scale).cache().shuffle(10000).batch(64)`, Conv32-Pool-Dense64, "
        "`fit`; on the same TFDS files. Ours does the same training and also looks at the data through DVC (a no-op "
        "here), checkpoints each epoch, evaluates the restored checkpoint, tracks, exports and registers.",
        "",
        "| what | ours | tutorial | ours / tutorial |",
        "|---|---|---|---|",
        row("whole run, seconds", walls, peers),
        row("examples/s in training", *speeds, 0),
        row("test accuracy", accuracies["ours"], accuracies["tutorial"], 4),
        "",
        "| what | seconds | of a whole run |",
        "|---|---|---|",
        f"| `stratagem run --if-changed`, nothing changed | {spread(unchanged)} | {share:.2f} |",
        f"| `stratagem --help` | {spread(helps)} | |",
        "",
        f"Seconds inside a run, by stage: {', '.join(f'{name} {value}' for name, value in stages.items())}. `total` is "
        "the flow's; the rest of the whole run is the start of Python, Prefect and its server.",
        "",
    ]
    page = "\n".join(lines)
    (ROOT / "docs" / "benchmarks.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()

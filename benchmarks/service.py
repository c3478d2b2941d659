"""When tf.data service pays: what a batch costs the process that trains, with its batches made there or elsewhere.

On one machine the service takes the cores that it is to spare. So beside examples/s this counts the processor time of
both processes, which says what a service on another machine would take from this one, and which other programs here
hardly change. `python -m benchmarks.service AUGMENTATION none|local DATASET BATCH_SIZE` measures one and prints a line
of JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks import measure
from tasks import config
from tasks.input import sources
from tasks.operations import dvc_data
from tasks.process.environment import stage_environment
from tasks.system import network
from tasks.system.machine import free_ports

HEADING = "## tf.data service\n"
BATCH_SIZE, STEPS, EPOCHS = 64, 100, 3
OFF = {"input.augmentation.flip": False, "input.augmentation.crop_padding": 0}
AUGMENTATIONS = {
    "none": OFF,
    "flip and crop": {"input.augmentation.flip": True, "input.augmentation.crop_padding": 2},
    "RandAugment, 2 layers": {**OFF, "input.augmentation.rand_augment": {"num_layers": 2, "magnitude": 9}},
}
FIGURES = ("own", "elsewhere", "speed")


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for repeat in range(repeats):
        for name in AUGMENTATIONS:
            for way in ("none", "local"):
                command = [sys.executable, "-m", "benchmarks.service", name, way, dataset, str(BATCH_SIZE)]
                _, output = measure.run(command, stage_environment(config.load()))
                found.setdefault((name, way), []).append(json.loads(output.splitlines()[-1]))
                print(f"service: repeat {repeat + 1} of {repeats}, {name}, {way}: {output.strip()}", file=sys.stderr)
    lines = [
        HEADING,
        f"{measure.machine('tensorflow')}. Dataset {dataset}, {repeats} repeats, which take turns; median (range). "
        f"Each reads {EPOCHS} epochs of {STEPS} batches of {BATCH_SIZE} and does nothing with them; the first, which "
        "traces, is left out.",
        "",
        "| augmentation | `input.service` | processor time of the training's process, microseconds an example | "
        "of the service's | examples/s |",
        "|---|---|---|---|---|",
    ]
    for (name, way), measured in found.items():
        figures = (
            measure.spread([one[key] for one in measured], digits)
            for key, digits in zip(FIGURES, (1, 1, 0), strict=True)
        )
        lines.append(f"| {name} | {way} | {' | '.join(figures)} |")
    own = {pair: statistics.median(one["own"] for one in measured) for pair, measured in found.items()}
    lines += [
        "",
        "| augmentation | what of its processor time a training keeps with the service elsewhere |",
        "|---|---|",
    ]
    lines += [f"| {name} | {own[name, 'local'] / own[name, 'none']:.2f} of it |" for name in AUGMENTATIONS]
    lines += [
        "",
        "A service on another machine pays where a training waits for its batches and the share above is well below 1: "
        "a costly augmentation. At 1 or more the service costs the training more than the work that it takes over: the "
        "batch comes through a socket, is unpacked and copied. On the training's own machine both take from the same "
        "cores, and their times add up to more. Go by the processor times: where other programs want the cores, too, "
        "two processes get more of them than one, and examples/s show that.",
        "",
    ]
    return "\n".join(lines)


def main(augmentation: str, way: str, dataset: str, batch_size: int) -> None:
    """Read, and print."""
    import psutil

    server = None
    overrides = {
        "dataset.name": dataset,
        "input.validation": None,
        "checkpoint.monitor": "train/loss",
        "train.steps_per_epoch": STEPS,
        "input.service": way,
        **AUGMENTATIONS[augmentation],
    }
    if way == "local":
        os.environ[network.INPUT_SERVICE] = f"grpc://127.0.0.1:{free_ports(1)[0]}"
        command = [sys.executable, "-m", "tasks", "input_service"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        server.stdout.readline()
    batches = sources.training_batches(config.load(overrides=overrides), dvc_data.load_prepared(dataset), batch_size)

    def seconds_elsewhere() -> float:
        return sum(psutil.Process(server.pid).cpu_times()[:2]) if server else 0.0

    for epoch in range(EPOCHS):
        if epoch == 1:
            began, own, elsewhere = time.perf_counter(), time.process_time(), seconds_elsewhere()
        batches.epoch = epoch
        seen = sum(len(labels) for _, labels in batches.dataset.as_numpy_iterator())
        if seen != STEPS * batch_size:
            raise ValueError(f"{seen} examples")
    examples = (EPOCHS - 1) * seen
    print(
        json.dumps(
            {
                "own": 1e6 * (time.process_time() - own) / examples,
                "elsewhere": 1e6 * (seconds_elsewhere() - elsewhere) / examples,
                "speed": examples / (time.perf_counter() - began),
            }
        )
    )
    if server:
        server.kill()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))

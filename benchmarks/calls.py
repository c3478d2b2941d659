"""Calls of the step function under two strategies, alternated in one process: what a replica of its own costs, without
the differences between one process and the next. Prints both times of a step as one JSON line.

`python -m benchmarks.calls '{"dataset.name": "mnist"}'`, in the environment of a stage process.
"""

import json
import sys
import time

from tasks import config, strategies
from tasks.operations import dvc_data

STRATEGIES = {
    # First: it makes the logical CPU, which TensorFlow allows only before it has used one.
    "mirrored": {"strategy.kind": "mirrored", "strategy.devices": 1},
    "one_device": {"strategy.kind": "one_device"},
}
NUM_CALLS = 40


def main(overrides: dict[str, object]) -> None:
    """Build one training for each strategy, and call their step functions in turn."""
    from tasks.training import setup, steps
    from tasks.training.autotune import Calls

    prepared = dvc_data.load_prepared(config.load(overrides=overrides).dataset.name)
    functions = {}
    for name, chosen in STRATEGIES.items():
        settings = config.load(overrides=overrides | chosen)
        strategy = strategies.build(settings.strategy)
        training = setup.fresh(settings, prepared, strategy)
        functions[name] = strategy, steps.train_function(training, Calls(training))

    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for number in range(NUM_CALLS + 1):
        for name, (strategy, function) in functions.items():
            began = time.perf_counter()
            with strategy.scope():
                float(function(None)["loss"])
            if number:  # The first call traces.
                seconds[name].append((time.perf_counter() - began) / settings.train.steps_per_execution)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""One worker of `benchmarks.network`: steps of the project's own step function, alone and with all workers in turn.

`python -m benchmarks.over_network '{"dataset.name": "digits"}' '[[64], [512, 512]]' 12 4`, in the environment of a
stage process with TF_CONFIG: the settings, the hidden units of each model, how many conditions of the network each
model meets, and how many calls are timed in each. The first worker waits for a line on standard input before each
condition, and prints a line of JSON after it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from tasks import config, strategies
from tasks.operations import dvc_data

STEPS_A_CALL = 2


def main(overrides: dict[str, object], models: list[list[int]], conditions: int, calls: int) -> None:
    """Measure each model under each condition that the parent makes."""
    from tasks.training import setup, steps
    from tasks.training.autotune import Calls

    prepared = dvc_data.load_prepared(str(overrides["dataset.name"]))
    fixed = {**overrides, "train.loop": "custom", "train.steps_per_execution": STEPS_A_CALL}
    workers = config.load(overrides={**fixed, "strategy.kind": "multi_worker", "strategy.launcher": "tf_config"})
    together = strategies.build(workers.strategy)
    chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0

    def function(strategy: strategies.Strategy, kind: str, units: list[int]) -> tuple[Callable[[], float], int]:
        of_model = {"model.name": "mlp", "model.options": {"units": units}, "strategy.kind": kind}
        training = setup.fresh(config.load(overrides=fixed | of_model), prepared, strategy)
        call: Any = steps.train_function(training, Calls(training))

        def timed() -> float:
            began = time.perf_counter()
            with strategy.scope():
                float(call(None)["loss"])
            return (time.perf_counter() - began) / STEPS_A_CALL

        timed()  # It traces.
        return timed, int(sum(variable.value.shape.num_elements() for variable in training.model.trainable_variables))

    for units in models:
        with_all, parameters = function(together, "multi_worker", units)
        alone, _ = function(strategies.on_one_device(), "one_device", units)
        for _ in range(conditions):
            if chief:
                sys.stdin.readline()
            together.sum_over_workers([1])  # Nobody begins before the network is as it is to be.
            found: dict[str, list[float]] = {"compute_seconds": [], "step_seconds": []}
            with_all()
            for _ in range(calls):
                found["compute_seconds"].append(alone())
                together.sum_over_workers([1])
                found["step_seconds"].append(with_all())
            if chief:
                print(json.dumps({"parameters": parameters, **found}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

"""How long a step and a checkpoint take on one device of this machine, found out by steps of which nothing is kept."""

import math
import statistics
import time

from tasks import config, strategies
from tasks.records import Pace, PreparedDataset
from tasks.system.errors import UserError
from tasks.training import model_state, setup, steps
from tasks.training.autotune import Calls

MIN_CALLS, MAX_CALLS = 5, 50
ENOUGH_SECONDS = 3.0


def measure(settings: config.Settings, prepared: PreparedDataset) -> Pace:
    """Train for a few seconds, and return what a step took.

    Args:
        settings: their strategy is a single device, with the batch and the steps a call that are asked for.
        prepared: the data.

    Raises:
        UserError: the batch is larger than the data.
    """
    strategy = strategies.build(settings.strategy)
    size = settings.train.per_replica_batch_size or settings.train.global_batch_size or 0
    training = setup.fresh(settings, prepared, strategy)
    if training.batches.num_examples < size:
        raise UserError(
            f"train.per_replica_batch_size = {size}: the training split has {training.batches.num_examples} examples. "
            "Give fewer, or --step-seconds as measured elsewhere"
        )
    calls = Calls(training)
    count = calls.next(training.batches.steps)
    call = steps.train_function(training, calls)
    found: list[float] = []
    while len(found) <= MIN_CALLS or (len(found) < MAX_CALLS and sum(found[1:]) * count < ENOUGH_SECONDS):
        began = time.perf_counter()
        with strategy.scope():
            float(call(None)["loss"])
        found.append((time.perf_counter() - began) / count)
    return Pace(
        parameters=sum(math.prod(variable.shape) for variable in training.model.trainable_variables),
        examples=size,
        step_seconds=tuple(found[1:]),  # The first call traces.
        checkpoint_seconds=statistics.median(_snapshot_seconds(training.model) for _ in range(3)),
        device=strategy.describe(),
    )


def _snapshot_seconds(model: object) -> float:
    began = time.perf_counter()
    model_state.snapshot(model)
    return time.perf_counter() - began

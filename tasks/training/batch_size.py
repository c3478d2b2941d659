"""How many examples a step has, and where an epoch goes on when a resumed training has another number."""

import logging
from typing import Any

import keras

from tasks import config
from tasks.strategies import Strategy
from tasks.system import upstream
from tasks.system.errors import UserError
from tasks.training.checkpoints import State

log = logging.getLogger(__name__)


def find_global_batch_size(section: config.Train, num_replicas: int) -> int:
    """Return the examples in one step of all replicas together.

    Raises:
        UserError: ``global_batch_size`` does not divide by the replicas.
    """
    if section.per_replica_batch_size is not None:
        return section.per_replica_batch_size * num_replicas
    size = section.global_batch_size or 0
    if size % num_replicas:
        lower = size - size % num_replicas
        raise UserError(
            f"train.global_batch_size = {size} does not divide by {num_replicas} replicas: {size} = {num_replicas} * "
            f"{size // num_replicas} + {size % num_replicas}. Give {f'{lower} or ' if lower else ''}"
            f"{lower + num_replicas}, or train.per_replica_batch_size instead"
        )
    return size


def resumed_batch_size(section: config.Train, state: State, num_replicas: int) -> int:
    """Return the global batch size to go on with: that of before, unless the settings name another one.

    Raises:
        UserError: it does not divide by the replicas.
    """
    if section.global_batch_size is not None:
        return section.global_batch_size
    if state.global_batch_size % num_replicas:
        raise UserError(
            f"the run was started with {state.global_batch_size} examples a step of all replicas, which do not divide "
            f"by {num_replicas} replicas: resume it on a number of devices that divides them"
        )
    if state.global_batch_size != find_global_batch_size(section, num_replicas):
        log.info("a step keeps its %d examples of all replicas", state.global_batch_size)
    return state.global_batch_size


def in_batches_of(state: State, global_batch_size: int, steps: int) -> State:
    """Return where a training is in its epoch, which has ``steps`` of another size from here on.

    No more than a batch is read twice; an epoch always has a step left, which ends it.
    """
    if global_batch_size == state.global_batch_size:
        return state
    place = state.step_in_epoch * state.global_batch_size // global_batch_size
    return state.model_copy(update={"global_batch_size": global_batch_size, "step_in_epoch": min(place, steps - 1)})


def check_last_batch(
    model: Any, strategy: Strategy, section: config.Input, num_examples: int, global_batch_size: int
) -> None:
    """Raise ``UserError`` when a replica would see no example in a pass' last batch and has to take their mean."""
    rest = num_examples % global_batch_size
    if section.drop_remainder or not strategy.distributed or not 0 < rest < strategy.num_replicas:
        return
    means = [layer.name for layer in upstream.layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if means:
        raise UserError(
            f"{num_examples} training examples leave {rest} for the last batch, {strategy.num_replicas} replicas share "
            f"it, and the mean that {means[0]} takes of no examples is not a number: give input.drop_remainder=true, "
            "or another train.global_batch_size"
        )

"""Assemble a training from settings, data, a strategy and a state to start from.

It decides the global batch size, and where an epoch continues if a resumed training has another batch size.
"""

import logging
from typing import Any

import keras

from tasks import config
from tasks.input import sources
from tasks.input.batches import Batches, InputShare
from tasks.records import PreparedDataset
from tasks.strategies import Strategy
from tasks.system import upstream
from tasks.system.errors import UserError
from tasks.training import Training, model, phase_at
from tasks.training.checkpoints import State
from tasks.training.model_state import Arrays
from tasks.training.position import Position

log = logging.getLogger(__name__)


def find_global_batch_size(section: config.Train, num_replicas: int) -> int:
    """Return the number of examples per step over all replicas.

    Raises:
        UserError: ``global_batch_size`` is not divisible by the number of replicas.
    """
    if section.per_replica_batch_size is not None:
        return section.per_replica_batch_size * num_replicas
    size = section.global_batch_size or 0
    if size % num_replicas:
        lower = size - size % num_replicas
        raise UserError(
            f"train.global_batch_size = {size} is not divisible by {num_replicas} replicas: {size} = {num_replicas} * "
            f"{size // num_replicas} + {size % num_replicas}. Set {f'{lower} or ' if lower else ''}"
            f"{lower + num_replicas}, or train.per_replica_batch_size instead"
        )
    return size


def resumed_batch_size(section: config.Train, state: State, num_replicas: int) -> int:
    """Return the global batch size of a resumed training: the previous one, unless the settings have another.

    Raises:
        UserError: it is not divisible by the number of replicas.
    """
    if section.global_batch_size is not None:
        return section.global_batch_size
    if state.global_batch_size % num_replicas:
        raise UserError(
            f"the run started with {state.global_batch_size} examples per step, which {num_replicas} replicas cannot "
            "share evenly: resume it on a number of devices that divides them"
        )
    if state.global_batch_size != find_global_batch_size(section, num_replicas):
        log.info("each step keeps its %d examples", state.global_batch_size)
    return state.global_batch_size


def in_batches_of(state: State, global_batch_size: int, steps: int) -> State:
    """Convert a state to another global batch size, with ``steps`` per epoch.

    At most one batch is read twice; at least one step remains in the epoch and ends it.
    """
    if global_batch_size == state.global_batch_size:
        return state
    place = state.step_in_epoch * state.global_batch_size // global_batch_size
    return state.model_copy(update={"global_batch_size": global_batch_size, "step_in_epoch": min(place, steps - 1)})


def check_last_batch(
    built: Any, strategy: Strategy, section: config.Input, num_examples: int, global_batch_size: int
) -> None:
    """Raise ``UserError`` if a replica would have no examples for batch normalisation in a pass's last batch."""
    rest = num_examples % global_batch_size
    if section.drop_remainder or not strategy.distributed or not 0 < rest < strategy.num_replicas:
        return
    means = [layer.name for layer in upstream.layers_of(built) if isinstance(layer, keras.layers.BatchNormalization)]
    if means:
        raise UserError(
            f"{num_examples} training examples leave {rest} for the last batch of {strategy.num_replicas} replicas, "
            f"and {means[0]} cannot compute the mean of no examples: set input.drop_remainder=true, or another "
            "train.global_batch_size"
        )


def find_batches(
    settings: config.Settings, prepared: PreparedDataset, strategy: Strategy, global_batch_size: int
) -> tuple[Batches, Batches | None]:
    """Return this worker's training and validation batches."""
    share = InputShare(strategy.num_local_replicas, *strategy.reads)
    training = sources.training_batches(settings, prepared, global_batch_size, share)
    if settings.input.validation is None:
        return training, None
    return training, sources.ordered_batches(settings, prepared, "validation", global_batch_size, share)


def build(
    settings: config.Settings,
    prepared: PreparedDataset,
    strategy: Strategy,
    data: tuple[Batches, Batches | None],
    state: State,
    arrays: Arrays,
) -> Training:
    """Return a training at ``state``, without callbacks.

    Args:
        settings: ``model``, ``input.normalization``, ``optimizer``, ``schedule`` and ``train`` are read.
        data: training and validation batches of size ``state.global_batch_size``.
        state: the state of the checkpoint to resume from, or a first state.
        arrays: the arrays of that checkpoint, or of ``initial.find_weights``.
    """
    batches, validation = data
    built, loss = model.build(settings, prepared, strategy, batches, state)
    position = Position(batches, state)
    if arrays:
        model.restore(built, arrays, position, phase_at(settings, state.epoch))
    return Training(settings, strategy, built, loss, batches, validation, position)

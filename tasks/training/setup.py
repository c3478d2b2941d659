"""Puts a training together, from settings, data, a strategy, and where it begins."""

from tasks import config
from tasks.input import sources
from tasks.input.batches import Batches
from tasks.records import PreparedDataset
from tasks.strategies import Strategy
from tasks.training import Training, model
from tasks.training.batch_size import find_global_batch_size
from tasks.training.checkpoints import State
from tasks.training.model_state import Arrays
from tasks.training.phases import phase_at
from tasks.training.position import Position


def first_state(settings: config.Settings, prepared: PreparedDataset, global_batch_size: int) -> State:
    """Return where a training begins that has no checkpoint."""
    return State(
        step=0,
        epoch=0,
        step_in_epoch=0,
        global_batch_size=global_batch_size,
        seed=settings.train.seed,
        settings_digest=settings.digest(),
        data_version=prepared.data_version,
        history={},
    )


def find_batches(
    settings: config.Settings, prepared: PreparedDataset, strategy: Strategy, global_batch_size: int
) -> tuple[Batches, Batches | None]:
    """Return this worker's training and validation batches."""
    place = (strategy.num_local_replicas, *strategy.reads)
    training = sources.training_batches(settings, prepared, global_batch_size, *place)
    if settings.input.validation is None:
        return training, None
    return training, sources.ordered_batches(settings, prepared, "validation", global_batch_size, *place)


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
        prepared: gives the shape of an image and the number of classes.
        strategy: where it is trained.
        data: training and validation batches, of ``state.global_batch_size``.
        state: of the checkpoint to go on from, or ``first_state``.
        arrays: of that checkpoint, or of ``initial.find_weights``.
    """
    batches, validation = data
    built, loss = model.build(settings, prepared, strategy, batches, state)
    position = Position(batches, state)
    if arrays:
        model.restore(built, arrays, position, phase_at(settings, state.epoch))
    return Training(settings, strategy, built, loss, batches, validation, position)


def fresh(settings: config.Settings, prepared: PreparedDataset, strategy: Strategy) -> Training:
    """Return a training at its first step."""
    size = find_global_batch_size(settings.train, strategy.num_replicas)
    data = find_batches(settings, prepared, strategy, size)
    return build(settings, prepared, strategy, data, first_state(settings, prepared, size), {})

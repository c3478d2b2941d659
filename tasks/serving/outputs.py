"""A model's outputs for the test split, in the order of its examples, computed where a training of the strategy would
compute them: each replica, worker or device takes its share of each batch."""

import contextlib
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input import sources
from tasks.input.array import ArraySource
from tasks.input.batches import Batches
from tasks.modeling import models
from tasks.records import PreparedDataset, as_input
from tasks.strategies import Strategy
from tasks.training import model_state
from tasks.training.model_state import Arrays

PART = 250
"""Rows that a model from a file computes at a time."""


@dataclass(frozen=True)
class Outputs:
    """What a model gives for each of n examples."""

    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``."""
    values: npt.NDArray[np.float64]
    """(n, num_outputs): logits, or the numbers of a regression."""
    own_losses: npt.NDArray[np.float64]
    """What the examples that a device computed together cost by the model's own losses, (n,)."""
    examples_by_device: dict[str, int]
    """How many examples lay on each device."""


Share = tuple[npt.NDArray[np.float64], float]
"""What one device computed of a batch for consecutive examples: outputs (n, num_outputs), and the sum of the model's
own losses, such as regularisation."""
OutputsFunction = Callable[[Any], tuple[list[Share], dict[str, int]]]
"""Takes the features of a batch; returns the shares in the examples' order, and how many lay on each device."""


def compute(settings: config.Settings, prepared: PreparedDataset, strategy: Strategy, arrays: Arrays) -> Outputs:
    """Return the outputs of a fresh model for all test examples. Every worker of a cluster calls this; what it returns
    is the same on each.

    Args:
        settings: ``model``, ``input``, ``evaluate`` and ``train.seed`` are read.
        prepared: the data.
        strategy: where.
        arrays: of a checkpoint; its group ``model`` is read.

    Raises:
        UserError: the checkpoint is of another model.
    """
    if strategy.is_one_program:
        # JAX refuses a variable that begins otherwise on another process.
        keras.utils.set_random_seed(settings.train.seed)
    with strategy.scope():  # On JAX it is read for each layer.
        model = models.build(settings.model, prepared, settings.input.normalization)
        model_state.assign(model, arrays, ("model",))
        # JAX computes a batch that does not divide by the replicas on each of them.
        size = settings.evaluate.global_batch_size
        size = max(size - size % strategy.num_replicas, strategy.num_replicas)
        # One program computes the examples of all workers, and tells each of them the outputs of all.
        place = (1, 0, 1) if strategy.is_one_program else (1, strategy.worker, strategy.num_workers)
        with contextlib.closing(sources.ordered_batches(settings, prepared, "test", size, *place)) as test:
            if strategy.coordinator is not None:
                from tasks.training import coordinator

                found = coordinator.outputs(strategy, test, lambda x: _call(model, x))
                shares = ((labels, [(values, loss)], {worker: len(labels)}) for labels, values, loss, worker in found)
                return _joined(test, strategy, shares)
            on_jax = keras.backend.backend() == "jax"
            function = _function_on_jax(model, strategy) if on_jax else _function_on_tensorflow(model, strategy)
            # An array not of tf.data, which takes longer to start than these batches take to be read.
            with_numpy = on_jax or isinstance(test.source, ArraySource)
            batches = test.arrays() if with_numpy else test.dataset.as_numpy_iterator()
            return _joined(test, strategy, ((labels, *function(x)) for x, labels, *_ in batches))


def _joined(
    test: Batches,
    strategy: Strategy,
    found: Iterable[tuple[npt.NDArray[Any], list[Share], dict[str, int]]],
) -> Outputs:
    """Return the outputs of all workers, from the labels and shares of each of this worker's batches."""
    table, label_shape, dtype = None, (), np.dtype(np.int64)
    examples: Counter[str] = Counter()
    for step, (labels, shares, on_devices) in enumerate(found):
        values = np.concatenate([share for share, _ in shares])
        own_losses = np.repeat([own_loss for _, own_loss in shares], [len(share) for share, _ in shares])
        # A row an example: its own loss, its labels, which float64 holds as they are, and its outputs.
        rows = np.column_stack([own_losses, labels.reshape(len(labels), -1), values])
        if table is None:
            table, label_shape, dtype = np.zeros([test.num_examples, rows.shape[1]]), labels.shape[1:], labels.dtype
        table[test.own_part(step)] = rows
        examples.update(on_devices)
    if table is None:
        raise ValueError("there are no batches")
    if test.num_workers > 1:
        # The other workers' rows are zeros here, and zeros are the bits of 0: the sum has every row as it was computed.
        table = strategy.sum_over_workers(table.view(np.int64)).view(np.float64)
    if strategy.num_workers > 1:
        counts = strategy.sum_over_workers([examples[name] for name in strategy.devices]).tolist()
        examples = Counter(dict(zip(strategy.devices, counts, strict=True)))
    end = 1 + math.prod(label_shape)
    own_labels = table[:, 1:end].astype(dtype).reshape(len(table), *label_shape)
    return Outputs(own_labels, table[:, end:], table[:, 0], dict(sorted(examples.items())))


def _function_on_tensorflow(model: Any, strategy: Strategy) -> OutputsFunction:
    import tensorflow as tf

    num_replicas = strategy.num_local_replicas

    def part(x: Any) -> tuple[Any, Any]:
        if num_replicas > 1:
            with tf.device("/device:CPU:0"):  # A replica's device gets its own share alone.
                size, replica = tf.shape(tf.nest.flatten(x)[0])[0], strategy.local_replica()
                first, last = size * replica // num_replicas, size * (replica + 1) // num_replicas
                x = tf.nest.map_structure(lambda one: one[first:last], x)
        return _call(model, x)

    # Keras lets AutoGraph convert nothing of a model either, and looking for something takes 0.09 s.
    @tf.function(autograph=False, reduce_retracing=True)
    def on_all_replicas(x: Any) -> Any:
        return strategy.run(part, (x,))

    def device_of(tensor: Any) -> str:
        # `device` names the task, but the device where the function was called; the memory's knows no task.
        memory = tf.DeviceSpec.from_string(tensor.backing_device)
        name: str = (
            tf.DeviceSpec.from_string(tensor.device)
            .replace(device_type=memory.device_type, device_index=memory.device_index)
            .to_string()
        )
        return name

    def function(x: Any) -> tuple[list[Share], dict[str, int]]:
        # As tensors: a function of NumPy's arrays in a mapping is traced anew for each.
        outputs, own_losses = map(strategy.local_results, on_all_replicas(tf.nest.map_structure(tf.constant, x)))
        shares = [
            (np.asarray(some).astype("float64"), float(loss)) for some, loss in zip(outputs, own_losses, strict=True)
        ]
        return shares, {device_of(some): len(some) for some in outputs}

    return function


def _call(model: Any, x: Any) -> tuple[Any, Any]:
    """Return the outputs of a batch, and the sum of the model's own losses, which Keras' ``predict`` leaves out."""
    outputs, _, losses = model.stateless_call(*_state(model), x, training=False, return_losses=True)
    return outputs, sum(losses, keras.ops.zeros([]))


def _state(model: Any) -> list[list[Any]]:
    """Return the values of a model's variables, as ``stateless_call`` takes them."""
    parts = model.trainable_variables, model.non_trainable_variables
    return [[variable.value for variable in part] for part in parts]


def _function_on_jax(model: Any, strategy: Strategy) -> OutputsFunction:
    import jax
    from jax.experimental import multihost_utils

    state = _state(model)

    @jax.jit
    def compiled(trainable: Any, others: Any, x: Any) -> tuple[Any, list[Any]]:
        outputs, _, losses = model.stateless_call(trainable, others, x, training=False, return_losses=True)
        return outputs, losses

    def whole(array: Any) -> Any:
        if array.is_fully_addressable:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    def function(x: Any) -> tuple[list[Share], dict[str, int]]:
        size = len(keras.tree.flatten(x)[0])
        outputs, losses = compiled(*state, strategy.place_batch(x, size))
        share = whole(outputs).astype("float64"), sum(float(whole(loss)) for loss in losses)
        shards = outputs.addressable_shards
        return [share], {f"{one.device.platform}:{one.device.id}": len(one.data) for one in shards}

    return function


def of_keras_file(
    file: str, features: Mapping[str, Any], own_code: str | None = None, root: str = ""
) -> npt.NDArray[np.float64]:
    """Return what the model in a .keras file gives for rows, (n, num_outputs).

    Args:
        file: what is loaded in Keras' safe mode.
        features: as prepared, each (n, *shape); may be mapped from a file. Without any the model is given zeros.
        own_code: the module that registers the classes of the user's own, if the model has some.
        root: the folder where that is looked for.
    """
    if own_code is not None:
        sys.path.insert(0, root)
        importlib.import_module(own_code)
    model = keras.models.load_model(file, compile=False)
    if not features:
        zeros = keras.tree.map_structure(
            lambda one: np.zeros([size or 1 for size in one.shape], one.dtype), model.input
        )
        return np.asarray(model.predict_on_batch(zeros), np.float64)
    count = len(next(iter(features.values())))
    parts = [
        model.predict_on_batch(as_input({name: array[first : first + PART] for name, array in features.items()}))
        for first in range(0, count, PART)
    ]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])

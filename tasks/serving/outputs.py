"""Computes a model's outputs for the test split, in the order of its examples, on the same devices as a training with
the strategy: each replica, worker or device computes its share of each batch."""

import contextlib
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input import sources
from tasks.input.batches import WHOLE, Batches, InputShare
from tasks.modeling import models
from tasks.records import PreparedDataset, as_input
from tasks.strategies import Strategy
from tasks.training import model_state
from tasks.training.model_state import Arrays

PART = 250
"""The batch size for a model from a file."""


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for n examples."""

    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``."""
    values: npt.NDArray[np.float64]
    """(n, num_outputs): logits, or the predictions of a regression."""
    own_losses: npt.NDArray[np.float64]
    """(n,): the sum of the model's own losses for the examples that a device computed together."""
    examples_by_device: dict[str, int]
    """The number of examples on each device."""


Share = tuple[npt.NDArray[np.float64], float]
"""One device's results for consecutive examples of a batch: outputs (n, num_outputs), and the sum of the model's own
losses, such as regularisation."""
OutputsFunction = Callable[[Any], tuple[list[Share], dict[str, int]]]
"""Takes the features of a batch; returns the shares in the examples' order, and the number of examples per device."""


def compute(settings: config.Settings, prepared: PreparedDataset, strategy: Strategy, arrays: Arrays) -> Outputs:
    """Return the outputs of a checkpoint's model for all test examples. Every worker of a cluster calls this and gets
    the same result. It reads ``model``, ``input``, ``evaluate`` and ``train.seed`` of the settings, and the group
    ``model`` of the arrays.

    Raises:
        UserError: the checkpoint belongs to another model.
    """
    if strategy.is_one_program:
        # JAX requires the same initial values of a variable on every process.
        keras.utils.set_random_seed(settings.train.seed)
    with strategy.scope():  # On JAX it is read for each layer.
        model = models.build(settings.model, prepared, settings.input.normalization)
        model_state.assign(model, arrays, ("model",))
        # If a batch is not divisible by the number of replicas, JAX computes all of it on each replica.
        size = settings.evaluate.global_batch_size
        size = max(size - size % strategy.num_replicas, strategy.num_replicas)
        # One program computes the examples of all workers and returns all outputs to each worker.
        share = WHOLE if strategy.is_one_program else InputShare(1, strategy.worker, strategy.num_workers)
        with contextlib.closing(sources.ordered_batches(settings, prepared, "test", size, share)) as test:
            on_jax = keras.backend.backend() == "jax"
            function = _function_on_jax(model, strategy) if on_jax else _function_on_tensorflow(model, strategy)
            return _joined(test, strategy, ((labels, *function(x)) for x, labels, *_ in test.arrays()))


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
        # One row per example: its own loss, its labels, which float64 represents exactly, and its outputs.
        rows = np.column_stack([own_losses, labels.reshape(len(labels), -1), values])
        if table is None:
            table, label_shape, dtype = np.zeros([test.num_examples, rows.shape[1]]), labels.shape[1:], labels.dtype
        table[test.own_part(step)] = rows
        examples.update(on_devices)
    if table is None:
        raise ValueError("there are no batches")
    if test.share.num_workers > 1:
        # The rows of other workers are 0 here, with all bits 0: the sum of the bits is exactly the computed values.
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
            with tf.device("/device:CPU:0"):  # Each replica's device gets only its own share.
                size, replica = tf.shape(tf.nest.flatten(x)[0])[0], strategy.local_replica()
                first, last = size * replica // num_replicas, size * (replica + 1) // num_replicas
                x = tf.nest.map_structure(lambda one: one[first:last], x)
        return _call(model, _state(model), x)

    # Keras does not convert models with AutoGraph either, and AutoGraph's search for code takes 0.09 s.
    @tf.function(autograph=False, reduce_retracing=True)
    def on_all_replicas(x: Any) -> Any:
        return strategy.run(part, (x,))

    def device_of(tensor: Any) -> str:
        # `device` names the right task but the calling device; `backing_device` names the right device but no task.
        memory = tf.DeviceSpec.from_string(tensor.backing_device)
        name: str = (
            tf.DeviceSpec.from_string(tensor.device)
            .replace(device_type=memory.device_type, device_index=memory.device_index)
            .to_string()
        )
        return name

    def function(x: Any) -> tuple[list[Share], dict[str, int]]:
        # Converted to tensors, because the function is traced again for each mapping of NumPy arrays.
        outputs, own_losses = map(strategy.local_results, on_all_replicas(tf.nest.map_structure(tf.constant, x)))
        shares = [
            (np.asarray(some).astype("float64"), float(loss)) for some, loss in zip(outputs, own_losses, strict=True)
        ]
        return shares, {device_of(some): len(some) for some in outputs}

    return function


def _call(model: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """Return the outputs of a batch, and the sum of the model's own losses, which Keras' ``predict`` omits."""
    outputs, _, losses = model.stateless_call(*state, x, training=False, return_losses=True)
    return outputs, sum(losses, keras.ops.zeros([]))


def _state(model: Any) -> list[list[Any]]:
    """Return the values of a model's variables as arguments for ``stateless_call``."""
    parts = model.trainable_variables, model.non_trainable_variables
    return [[variable.value for variable in part] for part in parts]


def _function_on_jax(model: Any, strategy: Strategy) -> OutputsFunction:
    import jax
    from jax.experimental import multihost_utils

    state, compiled = _state(model), jax.jit(partial(_call, model))

    def whole(array: Any) -> Any:
        if array.is_fully_addressable:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    def function(x: Any) -> tuple[list[Share], dict[str, int]]:
        size = len(keras.tree.flatten(x)[0])
        outputs, own_loss = compiled(state, strategy.place_batch(x, size))
        share = whole(outputs).astype("float64"), float(whole(own_loss))
        shards = outputs.addressable_shards
        return [share], {f"{one.device.platform}:{one.device.id}": len(one.data) for one in shards}

    return function


def of_keras_file(
    file: str, features: Mapping[str, Any], own_code: str | None = None, root: str = ""
) -> npt.NDArray[np.float64]:
    """Return the outputs of the model in a .keras file, (n, num_outputs).

    Args:
        file: the file, loaded in Keras' safe mode.
        features: the features as prepared, each (n, *shape); may be memory-mapped. If empty, the input is zeros.
        own_code: the module that registers the user's classes, if the model has any.
        root: the folder with that module.
    """
    if own_code is not None:
        sys.path.insert(0, root)
        importlib.import_module(own_code)
    model = models.load("the model", Path(file), "", own_code is not None)
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

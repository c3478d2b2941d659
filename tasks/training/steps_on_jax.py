"""The training and test steps on JAX, and the compiled functions that run them; see ``steps.py`` for TensorFlow.

One program spans all devices, so Keras' own step computes the loss of the whole global batch, and both loops use it.
A state is what Keras passes from step to step: lists with the values of the trainable variables, of all other
variables, of the optimizer's variables (in training) and of the metrics' variables.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp

from tasks.input.array import ArraySource, read_at_random
from tasks.input.augment import augment_batch, is_images
from tasks.input.batches import Batches
from tasks.strategies import Strategy
from tasks.training import Training
from tasks.training.autotune import Calls, Steps
from tasks.training.trace import marked

State = tuple[list[Any], ...]
# Takes a state, runs the steps of a call, and returns the metrics so far by name and the new state.
StepsFunction = Callable[[State, Steps], tuple[dict[str, Any], State]]
# Takes a state and the values of ``Steps``; returns after how many of the steps the loss was still finite, the metrics
# by name, and the new state.
ManySteps = Callable[[State, Any, int, int], tuple[Any, dict[str, Any], State]]

LENGTHS = 32, 1
"""Steps of one compiled loop. XLA compiles each length separately, so a call combines loops of these lengths."""
MAX_SIDE = 2000
"""Largest side, in pixels, of images that a device augments, because integers have 32 bits there."""


def train_function(training: Training, calls: Calls) -> StepsFunction:
    """Return the train function of the loops."""
    return calls.function(_many_steps(training, training.batches, "train_step"), trains=True)


def test_function(training: Training, batches: Batches, calls: Calls) -> StepsFunction:
    """Return the test function for the split of ``batches``."""
    return calls.function(_many_steps(training, batches, "test_step"), trains=False)


def iterated(strategy: Strategy, batches: Batches) -> Iterable[Any]:
    """Return what a loop iterates once per epoch: placed batches, or Nones if a step gathers from resident arrays."""
    return itertools.repeat(None) if _resident(batches) else _PlacedBatches(strategy, batches)


class _PlacedBatches:
    """The batches of the rest of an epoch: the host reads them and places them on the devices."""

    def __init__(self, strategy: Strategy, batches: Batches) -> None:
        self.strategy = strategy
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for step, batch in zip(self.batches.unread, marked(self.batches.arrays()), strict=True):
            yield self.strategy.place_batch(batch, self.batches.size(step))


def _resident(batches: Batches) -> ArraySource | None:
    """Return the source of a split that the devices hold completely, else None."""
    source = batches.source
    if not isinstance(source, ArraySource) or not source.fits_accelerator:
        return None
    sides = [max(array.shape[1:3]) for array in jax.tree.leaves(source.mapped()[0]) if is_images(array)]
    return source if batches.augmentation is None or max(sides, default=0) <= MAX_SIDE else None


def _many_steps(training: Training, batches: Batches, name: str) -> ManySteps:
    """Return a function that runs steps ``first`` to ``first + count - 1`` of a split; ``name`` is Keras' step."""
    model, strategy = training.model, training.strategy
    step, resident = getattr(model, name), _resident(batches)
    read: Callable[..., Any] = _gather(strategy, batches) if resident else lambda data, rows, place, size: data
    data = None
    if resident:
        data = jax.tree.map(strategy.replicate, resident.resident(strategy.replicate))
        if batches.shuffle:
            read_at_random(resident.mapped())  # JAX copies no array to a CPU: it reads the mapped file.
    lengths = (1,) if strategy.on_cpus or not resident else LENGTHS
    none = strategy.replicate(np.int32(0))
    functions: dict[tuple[int, int], Any] = {}
    last, shardings = None, None

    @lru_cache(maxsize=2)  # A pass, and the one after it.
    def on_devices(number: int) -> Any:
        return jax.tree.map(strategy.replicate, batches.pass_rows(number))

    def compiled(size: int, length: int) -> Any:
        """Return a function that runs ``length`` steps of ``size`` examples each. Like Keras' own, it donates the
        memory of its input state."""

        def steps(state: State, finite: Any, data: Any, rows: Any, place: Any) -> Any:
            def one(carried: Any, number: Any) -> Any:
                state, finite = carried
                _, state = step(state, read(data, rows, place + number * size, size))
                good = jnp.isfinite(state[-1][0])  # The sum of the epoch's losses so far.
                return (state, finite + good.astype(finite.dtype)), None

            if length == 1:
                # XLA would keep a one-step loop that sums gradients between devices and run it on one thread: on two
                # CPU devices a step took eight times as long.
                (state, finite), _ = one((state, finite), jnp.int32(0))
            else:
                (state, finite), _ = lax.scan(one, (state, finite), jnp.arange(length, dtype=jnp.int32))
            with keras.StatelessScope(list(zip(model.metrics_variables, state[-1], strict=True))):
                return state, finite, model.get_metrics_result()

        return jax.jit(steps, donate_argnums=0, out_shardings=(shardings, none.sharding, None))

    def runs(first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the first step and the length of each compiled loop of a call."""
        for steps in batches.alike(range(first, first + count), lengths[0]):
            length = lengths[0] if len(steps) == lengths[0] else 1
            yield from ((start, length) for start in steps[::length])

    def many(state: State, iterator: Any, first: int, count: int) -> tuple[Any, dict[str, Any], State]:
        nonlocal last, shardings
        if state is not last:
            # Values from the variables may not be committed to their devices: JAX would compile a second time.
            shardings = jax.tree.map(lambda array: array.sharding, state)
            state = jax.device_put(state, shardings)
        finite, logs = none, {}
        for start, length in runs(first, count):
            number, step_in_pass = divmod(start, batches.steps_in_pass)
            source = (data, on_devices(number)) if resident else (next(iterator), None)
            place = np.int32(step_in_pass * batches.global_batch_size)
            kind = batches.size(start), length
            # The very first compilation counts as part of a call; later compilations do not.
            with training.position.aside() if functions and kind not in functions else nullcontext():
                function = functions.get(kind) or functions.setdefault(kind, compiled(*kind))
                state, finite, logs = function(state, finite, *source, place)
        last = state
        return finite, logs, state

    return many


def _gather(strategy: Strategy, batches: Batches) -> Callable[..., Any]:
    """Return a function that gathers and augments a batch inside a step: ``gather(data, pass_rows, place, size)``."""
    section = batches.augmentation

    def gather(data: Any, pass_rows: Any, place: Any, size: int) -> Any:
        rows, draws = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, place, size), pass_rows)
        batch = jax.tree.map(lambda array: array.at[rows].get(mode="promise_in_bounds"), data)
        if section is not None:
            batch = augment_batch(batch, draws, section, batches.num_classes)
        return strategy.lay_out(batch)

    return gather

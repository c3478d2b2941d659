"""Choose how many steps a call of the step function runs and whether XLA compiles them. Apart from rounding, this only
affects speed.

There are no trial runs: the number of steps per call follows from the time of the training's own calls, and XLA
compiles the models that were measured to train faster with it. Checkpoints store that choice, because it changes the
rounding of sums.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import keras

from tasks.input.array import ArraySource
from tasks.input.batches import Batches
from tasks.system import upstream
from tasks.training import Training
from tasks.training.position import Call

CALL_SECONDS = 0.25
"""Longest time of a call with several steps: a signal waits for its end, and the progress bar stands still."""
MAX_STEPS = 200
GROWTH = 8
"""Largest factor between the steps of successive calls: 1, 1, 8, 64, 200."""

log = logging.getLogger(__name__)


class Steps(NamedTuple):
    """The steps of a call."""

    iterator: Any
    """An iteration over an epoch's data, which the call may not read."""
    first: int
    num_steps: int


class Calls:
    """Number of steps of each call. With ``train.steps_per_execution=auto`` a call ends at the end of an epoch and at a
    checkpoint; if a user's callback has a method for each batch, every call runs a single step."""

    def __init__(self, training: Training) -> None:
        """Reads ``train.steps_per_execution`` and ``checkpoint.every_steps``. With several workers the chief's
        measurements decide."""
        section = training.settings.train
        self.position = training.position
        self.batches = training.batches
        self.strategy = training.strategy
        self.every_steps = training.settings.checkpoint.every_steps
        given = section.steps_per_execution
        self.grows = given == "auto" and not any(getattr(one, "asks_for_batches", False) for one in training.callbacks)
        self.many = 1 if given == "auto" else given
        """Steps of a full call."""
        self.most = min(MAX_STEPS if self.grows else self.many, training.batches.steps)
        self._traced = False

    def over(self, batches: Batches, data: Iterable[Any]) -> Iterator[Steps]:
        """Yield the steps of each call for the rest of an epoch of the training's or of other batches; the calls read
        an iteration over ``data``."""
        iterator, first, end = iter(data), batches.unread.start, batches.unread.stop
        while first < end:
            count = min(self.many, end - first)
            if batches is self.batches and self.grows and self.every_steps:
                count = min(count, self.every_steps - first % self.every_steps)
            yield Steps(iterator, first, count)
            first += count

    def function(self, many: Callable[..., tuple[Any, ...]], trains: bool) -> Callable[..., Any]:
        """Return the function that a loop calls with ``Steps``, on JAX after a state, to train or to measure a split.

        Args:
            many: takes the state, if any, and the values of ``Steps``; returns after how many of them the loss was
                finite, the metrics by name, and on JAX a new state.
            trains: whether the call advances the training.
        """

        def function(*given: Any) -> Any:
            *state, steps = given
            began = self.position.now()
            finite, *found = many(*state, *steps)
            if trains:
                is_ahead, loss = not self.strategy.on_cpus, found[0].get("loss")
                self.position.call = Call(steps.first, steps.num_steps, loss, is_ahead, finite, began, self.measure)
            return found[0] if len(found) == 1 else tuple(found)

        return function

    def measure(self, count: int, seconds: float) -> None:
        """Use the time of a call of ``count`` steps to choose the number of steps of the next calls."""
        if not self.grows or count < self.many:
            return  # A shorter call has more overhead per step.
        if not self._traced:
            self._traced = True  # The first call traces.
            return
        fit = min(int(CALL_SECONDS * count / seconds), GROWTH * self.many, self.most)
        if self.strategy.num_workers > 1:
            fit = int(self.strategy.sum_over_workers([fit if self.strategy.is_chief else 0])[0])
            self.grows = fit > self.many  # Workers communicate only while the calls grow.
        self.many = max(1, fit)


DENSE = (
    keras.Sequential,
    keras.layers.Activation,
    keras.layers.Dense,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.InputLayer,
    keras.layers.LeakyReLU,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.Reshape,
)
"""The layers of a perceptron. XLA made a convnet 7 times slower on two CPU cores."""
MIN_PARAMETERS = 100_000
"""With 784-256-256-10 a step took 0.8 times as long, with 1024 units 0.75 times; some smaller models took longer."""
MIN_STEPS = 2200
"""Shorter trainings do not recover XLA's compile time: 0.4 s for a perceptron, whose steps become 0.2 ms shorter."""


def choose_compiler(training: Training, begun: bool) -> Training:
    """Return the training with ``train.jit_compile`` set to true or false; log when ``auto`` chooses XLA.

    Args:
        training: ``jit_compile``, ``deterministic``, ``dtype_policy`` and ``epochs`` of its ``train`` are read.
        begun: whether the run has checkpoints. A resumed training keeps their choice if the strategy allows it.
    """
    section, position = training.settings.train, training.position
    if section.jit_compile != "auto":
        return training
    is_wanted = position.start.jit_compile if begun else section.epochs * training.batches.steps >= MIN_STEPS
    compiles = is_wanted and _gains_from_xla(training)
    if compiles and not begun:
        log.info(
            "XLA       compiles the steps, because dense layers then train faster on a CPU (train.jit_compile=auto)"
        )
    position.start = position.start.model_copy(update={"jit_compile": compiles})
    chosen = section.model_copy(update={"jit_compile": compiles})
    return replace(training, settings=training.settings.model_copy(update={"train": chosen}))


def _gains_from_xla(training: Training) -> bool:
    """Return whether XLA speeds up a long training: only dense layers in float32 on one CPU with gathered batches, the
    case that was measured."""
    section, strategy, model = training.settings.train, training.strategy, training.model
    return (
        (strategy.backend, section.dtype_policy, section.deterministic) == ("tensorflow", "float32", False)
        and strategy.on_cpus
        and not strategy.distributed
        and isinstance(training.batches.source, ArraySource)
        and all(type(layer) in DENSE or type(layer).__name__ == "Functional" for layer in upstream.layers_of(model))
        and model.count_params() >= MIN_PARAMETERS
    )

"""How many steps a call of the step function does, and whether XLA compiles them: speed alone, beyond rounding.

Nothing is tried out. The calls grow with the time that the training's own calls take. XLA compiles what was measured to
be faster so; a training keeps that choice, because it changes how sums are rounded.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from tasks import records
from tasks.input.array import ArraySource
from tasks.records import Tuning
from tasks.system import upstream
from tasks.system.errors import UserError
from tasks.training import Training
from tasks.training.position import Call

CALL_SECONDS = 0.25
"""No call takes longer, if a step does not: a signal waits for its end, and the bar stands still."""
MAX_STEPS = 200
GROWTH = 8
"""How many times as many steps as the call before one may do: 1, 1, 8, 64, 200."""

log = logging.getLogger(__name__)


class Calls:
    """How many steps each call does. With ``train.steps_per_execution=auto`` calls end where one of a single step would
    have ended for a reason: at an epoch's end, at a checkpoint, and where the profiler begins and ends."""

    def __init__(self, training: Training) -> None:
        """``train.steps_per_execution``, ``train.profile_steps`` and ``checkpoint.every_steps`` are read. Several
        workers do as the chief measures."""
        section = training.settings.train
        self.position = training.position
        self.strategy = training.strategy
        self.every_steps = training.settings.checkpoint.every_steps
        given = section.steps_per_execution
        self.grows = given == "auto"
        self.many = 1 if given == "auto" else given
        """Steps of a call that nothing cuts short."""
        self.most = min(MAX_STEPS if given == "auto" else given, training.batches.steps)
        first, last = section.profile_steps or (1, 0)
        self._ends = (first - 1, last)
        self._traced = False

    def train(self, many: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        """Return the function that a loop calls to train on from the position, which must be moved on after it.

        Args:
            many: takes what the loop hands over (an epoch's iterator, on JAX after a state), the number of the first
                step and how many; returns after how many of them the loss was a finite number, the metrics' values by
                name, and on JAX a new state.
        """

        def function(*given: Any) -> Any:
            position, began = self.position, self.position.now()
            first, count = position.step, self.next(position.batches.steps - position.step_in_epoch)
            finite, *found = many(*given, first, count)
            loss = found[0].get("loss")
            position.call = Call(first, count, loss, not self.strategy.on_cpus, finite, began, self.measure)
            return found[0] if len(found) == 1 else tuple(found)

        return function

    def test(self, many: Callable[..., tuple[Any, ...]], steps: int) -> Callable[..., Any]:
        """Return the function that a loop calls to measure a split of so many steps, by calls as long as those of the
        training; after its last step the next call begins anew. For ``many`` see ``train``."""
        done = 0

        def function(*given: Any) -> Any:
            nonlocal done
            first, count = done, self.within(steps - done)
            done = (done + count) % steps
            _, *found = many(*given, first, count)
            return found[0] if len(found) == 1 else tuple(found)

        return function

    def next(self, left: int) -> int:
        """Return the number of steps of the training's next call, where ``left`` steps remain in the epoch."""
        step = self.position.step
        bounds = [self.many, left]
        if self.grows:
            bounds += [end - step for end in self._ends if end > step]
            bounds += [self.every_steps - step % self.every_steps] if self.every_steps else []
        return min(bounds)

    def within(self, left: int) -> int:
        """Return the number of steps of a test function's next call, where ``left`` steps remain."""
        return min(self.many, left)

    def measure(self, count: int, seconds: float) -> None:
        """Learn from a call of ``count`` steps how many the next ones do."""
        if not self.grows or count < self.many:
            return  # A call that was cut short says little, and more for each step.
        if not self._traced:
            self._traced = True  # The first call traces.
            return
        fit = min(int(CALL_SECONDS * count / seconds), GROWTH * self.many, self.most)
        if self.strategy.num_workers > 1:
            fit = int(self.strategy.sum_over_workers([fit if self.strategy.is_chief else 0])[0])
            self.grows = fit > self.many  # They ask each other no more than that.
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
"""With 784-256-256-10 a step took 0.8 times as long, with 1024 units 0.75 times; of smaller ones some took longer."""
MIN_STEPS = 4000
"""A training of fewer steps does not win back what XLA takes to compile: 0.7 s, and again for a short batch."""


def choose_compiler(training: Training, kept: Path, begun: bool) -> Training:
    """Return the training with ``train.jit_compile`` decided, and log why ``auto`` has XLA compile it.

    Args:
        training: ``jit_compile``, ``deterministic``, ``dtype_policy`` and ``epochs`` of its ``train`` are read.
        kept: the run's record of the choice, which a resumed run goes by where the strategy allows it.
        begun: whether the run has checkpoints.
    """
    section = training.settings.train
    if section.jit_compile != "auto":
        return training
    chosen = section.model_copy(update={"jit_compile": _compiles(training, kept, begun)})
    return replace(training, settings=training.settings.model_copy(update={"train": chosen}))


def _compiles(training: Training, kept: Path, begun: bool) -> bool:
    against = _reason_against(training)
    try:
        before = records.load(Tuning, kept)
    except UserError:
        if begun:
            return False  # The record was lost, and most trainings are not compiled.
        too_short = training.settings.train.epochs * training.batches.steps < MIN_STEPS
        against = against or ("it is too short to win back the time that compiling takes" if too_short else "")
        chosen = Tuning(jit_compile=not against, reason=against or "dense layers train faster so on a CPU")
        records.save(chosen, kept)
        if chosen.jit_compile:
            log.info("XLA       compiles the steps: %s (train.jit_compile=auto)", chosen.reason)
        return chosen.jit_compile
    return before.jit_compile and not against


def _reason_against(training: Training) -> str:
    """Return why XLA is not to compile a training of any length, or nothing."""
    section, strategy, model = training.settings.train, training.strategy, training.model
    if strategy.backend != "tensorflow" or strategy.distributed or strategy.coordinator is not None:
        return f"nothing is chosen under strategy.kind={strategy.kind}"
    if not strategy.on_cpus or section.dtype_policy != "float32":
        return "it was measured in float32 on CPUs alone"
    if section.deterministic:
        return "train.deterministic=true keeps to TensorFlow's own kernels"
    if not isinstance(training.batches.source, ArraySource):
        return "a stream hands over its batches one by one"
    others = {type(layer).__name__ for layer in upstream.layers_of(model) if type(layer) not in DENSE}
    others -= {"Functional"}
    if not others and model.count_params() < MIN_PARAMETERS:
        return "it has little to gain with so few parameters"
    return f"of layers of other kinds ({', '.join(sorted(others))})" if others else ""

"""Traces a few training steps for TensorBoard's Profile tab, and says what a step's time goes into."""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import keras

from tasks import config
from tasks.training.callbacks import MetricSink, Position

log = logging.getLogger(__name__)

Intervals = list[tuple[float, float]]
Batch = TypeVar("Batch")

CALL = "train"
"""Marks a call of the train function in a trace. TensorBoard takes it for a step."""
WAIT = "input_wait"
"""Marks a wait for input outside a compiled function."""
OPERATION = re.compile(r"[^:]+:(?!Collective|Nccl)\w+")
"""How TensorFlow names an operation in a trace: `adam/Sqrt_5:Sqrt`, the node and its type."""
COLLECTIVE = re.compile(r"(all-(reduce|gather|to-all)|reduce-scatter|collective-|nccl|Memcpy|Memset)")
"""How XLA's collectives and a GPU's copies and collectives begin."""


class Profiler(keras.callbacks.Callback):
    """Traces training steps ``first_step`` to ``last_step``, counted from the run's start, beginning with 1.

    With several steps a call, all calls are traced that do one of them. The trace lies in ``folder``, where TensorBoard
    looks for it (with the package xprof). When it is complete, ``send`` gets ``performance/input_wait_ms``,
    ``performance/compute_ms`` and ``performance/other_ms`` a step, as ``split`` finds them.

    The first call of a process builds the graph and compiles it. It is in the trace, and not in the split, which is of
    the calls after it; a range of nothing but that call gives no split. A call that builds another graph later on (a
    short last batch under Keras' own ``fit``) has that in ``other``.

    Place it directly after ``Position``, which says where the training is. Train in a ``with`` of it, whose end ends a
    trace whose range the training did not reach the end of: a process can trace one thing at a time.
    """

    def __init__(self, position: Position, first_step: int, last_step: int, folder: Path, send: MetricSink) -> None:
        super().__init__()
        self.position = position
        self.first_step = first_step
        self.last_step = last_step
        self.folder = folder
        self.send = send
        self._tracing = False
        self._call = ExitStack()
        self._done = 0
        self._first_call = True
        self._num_steps = 0
        self._steps_per_execution = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not at on_train_end: a training that goes on inside an epoch is two of Keras' `fit`.
        if kind is not None:
            self._close()
        elif self._tracing:
            self._finish()
        elif self.position.start.step < self.first_step > self.position.step:
            log.warning(
                "train.profile_steps = [%d, %d]: the training ended after step %d, and nothing was traced",
                self.first_step,
                self.last_step,
                self.position.step,
            )

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        # Not at each step: on JAX every reading of `model` puts the whole state back into the variables.
        self._steps_per_execution = self.model.steps_per_execution

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        done = self._done = self.position.step
        if not self._tracing:
            left_in_epoch = self.position.batches.steps - self.position.step_in_epoch
            last_of_call = done + min(self._steps_per_execution, left_in_epoch)
            if done >= self.last_step or last_of_call < self.first_step:
                return
            with self.position.aside():
                _start(self.folder)
            self._tracing = True
        counted = {} if self._first_call else {"epoch": self.position.epoch}
        self._call.enter_context(_mark_call(done + 1, counted))

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # Keras has read the loss for its callbacks, so an accelerator has done what the call handed to it.
        self._call.close()
        if self._tracing and not self._first_call:
            self._num_steps += self.position.step - self._done
        self._first_call = False
        if self._tracing and self.position.step >= self.last_step:
            with self.position.aside():
                self._finish()

    def _close(self) -> None:
        self._call.close()
        if self._tracing:
            _stop()
            self._tracing = False

    def _finish(self) -> None:
        self._close()
        trace = max(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        log.info("profile   %s", os.path.relpath(trace, config.project_root()))
        if not self._num_steps:
            log.warning(
                "train.profile_steps = [%d, %d]: they were done by the call that traces and compiles, so there is no "
                "split of their time: name later steps too",
                self.first_step,
                self.last_step,
            )
            return
        parts = split(trace, self._num_steps)
        log.info("profile   a step: %s", ", ".join(f"{name} {value:.2f} ms" for name, value in parts.items()))
        self.send(self.position.step, {f"performance/{name}_ms": value for name, value in parts.items()})


def split(trace: Path, num_steps: int) -> dict[str, float]:
    """Return what the time of the traced calls went into: ``input_wait``, ``compute`` and ``other``, in ms a step.

    The three add up to the time from the beginning of an epoch's first traced call to the end of its last one.

    - ``compute``: some operation of the step is running: on a GPU or TPU where there is one, else on the CPU's threads.
      Copies to a device and collectives are not in it.
    - ``input_wait``: nothing computes, and the step waits for its next batch: TensorFlow's ``IteratorGetNext``, which
      runs inside the compiled function, and what ``input_wait`` marks outside.
    - ``other``: the rest: Python, callbacks, collectives, copies, and launching.

    Where a step gathers its batch itself, from arrays that are resident, the gather is one of its operations.

    Args:
        trace: the .xplane.pb of a ``Profiler``. Both backends write this format, and JAX' reader serves for both.
        num_steps: training steps in the calls that count.
    """
    from jax.profiler import ProfileData

    windows: dict[int, tuple[float, float]] = {}
    waits: Intervals = []
    host: Intervals = []
    device: Intervals = []
    data = ProfileData.from_file(str(trace))
    for plane in data.planes:
        on_device = plane.name.startswith(("/device:GPU", "/device:TPU"))
        for line in plane.lines:
            for event in line.events:
                interval = (event.start_ns, event.start_ns + event.duration_ns)
                if on_device:
                    if line.name.startswith(("Stream", "XLA Ops")) and not COLLECTIVE.match(event.name):
                        device.append(interval)
                elif event.name == WAIT or ("GetNext" in event.name and event.name.endswith("::DoCompute")):
                    waits.append(interval)
                elif event.name == CALL:
                    epoch = dict(event.stats).get("epoch")
                    if epoch is not None:
                        first, last = windows.get(epoch, interval)
                        windows[epoch] = min(first, interval[0]), max(last, interval[1])
                elif line.name.startswith("tf_Compute"):
                    if OPERATION.fullmatch(event.name):
                        host.append(interval)
                # The input pipeline has threads of its own.
                elif not line.name.startswith("tf_data") and not COLLECTIVE.match(event.name) and _is_xla(event):
                    host.append(interval)
    calls = list(windows.values())
    computing = device or host
    compute, busy = _covered(computing, calls), _covered([*computing, *waits], calls)
    times = {"input_wait": busy - compute, "compute": compute, "other": _covered(calls, calls) - busy}
    return {name: nanoseconds / 1e6 / num_steps for name, nanoseconds in times.items()}


def _is_xla(event: Any) -> bool:
    return any(name == "hlo_op" for name, _ in event.stats)


def _covered(intervals: Iterable[tuple[float, float]], windows: Intervals) -> float:
    """Return how much of disjoint windows some interval covers."""
    total = 0.0
    ordered = sorted(intervals)
    for opens, closes in windows:
        reached = opens
        for first, last in ordered:
            first, last = max(first, reached), min(last, closes)
            if last > first:
                total += last - first
                reached = last
    return total


def input_wait() -> AbstractContextManager[Any]:
    """Mark in a trace that the training waits for input here; it costs next to nothing when nobody traces."""
    if keras.backend.backend() == "jax":
        import jax

        annotation: AbstractContextManager[Any] = jax.profiler.TraceAnnotation(WAIT)
        return annotation
    import tensorflow as tf

    trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(WAIT)
    return trace


def marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, and mark the wait for each in a trace: JAX has no operation that reads input."""
    while True:
        with input_wait():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def _mark_call(step: int, counted: dict[str, int]) -> AbstractContextManager[Any]:
    if keras.backend.backend() == "jax":
        import jax

        annotation: AbstractContextManager[Any] = jax.profiler.StepTraceAnnotation(CALL, step_num=step, **counted)
        return annotation
    import tensorflow as tf

    trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(CALL, step_num=step, _r=1, **counted)
    return trace


def _start(folder: Path) -> None:
    if keras.backend.backend() == "jax":
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # On by default, and slows every call of a Python function.
        jax.profiler.start_trace(folder, profiler_options=options)
    else:
        import tensorflow as tf

        tf.profiler.experimental.start(str(folder))


def _stop() -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.stop_trace()
    else:
        import tensorflow as tf

        tf.profiler.experimental.stop()

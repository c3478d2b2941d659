"""Traces a few training steps for TensorBoard's Profile tab, and says what a step's time goes into."""

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import keras

from tasks import config
from tasks.training import trace
from tasks.training.callbacks.progress import MetricSink
from tasks.training.position import Position

log = logging.getLogger(__name__)


class Profiler(keras.callbacks.Callback):
    """Traces training steps ``first_step`` to ``last_step``, counted from the run's start, beginning with 1.

    With several steps a call, all calls are traced that do one of them. The trace lies in ``folder``, where TensorBoard
    looks for it (with the package xprof). When it is complete, ``send`` gets ``performance/compute_ms``,
    ``performance/collectives_ms``, ``performance/input_wait_ms`` and ``performance/host_ms`` a step, as ``trace.split``
    finds them.

    The first call of a process builds the graph and compiles it. It is in the trace, but not in the split; a range of
    only that call gives no split. A later call that builds another graph (a short last batch under Keras' own ``fit``)
    counts that time as ``host``.

    ``tracer`` begins, marks, ends and splits a trace: the module ``trace``, or a test's own.

    Place it directly after ``Position``, which says where the training is. Train in a ``with`` block of it: its end
    also ends a trace whose last step the training did not reach, because a process can trace one thing at a time.
    """

    def __init__(
        self,
        position: Position,
        first_step: int,
        last_step: int,
        folder: Path,
        send: MetricSink,
        tracer: Any = trace,
    ) -> None:
        super().__init__()
        self.tracer = tracer
        self.position = position
        self.first_step = first_step
        self.last_step = last_step
        self.folder = folder
        self.send = send
        self._tracing = False
        self._call = ExitStack()
        self._done = 0
        self._first_call = True
        self.num_steps = 0
        """Steps in traced calls, without those of the process's first call."""
        self._steps_per_execution = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not at on_train_end: a training that goes on inside an epoch is two of Keras' `fit`.
        if kind is not None:
            self.close()
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
            self.position.wait()
            with self.position.aside():
                self.tracer.start(self.folder)
            self._tracing = True
        counted = {} if self._first_call else {"epoch": self.position.epoch}
        self._call.enter_context(self.tracer.mark_call(done + 1, counted))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._first_call or self.position.step >= self.last_step:
            self.position.wait()  # The mark of the last call ends with its steps.
        self._call.close()
        if self._tracing and not self._first_call:
            self.num_steps += self.position.step - self._done
        self._first_call = False
        if self._tracing and self.position.step >= self.last_step:
            with self.position.aside():
                self._finish()

    def close(self) -> None:
        """End the trace, if one is being made."""
        self._call.close()
        if self._tracing:
            self.tracer.stop()
            self._tracing = False

    def _finish(self) -> None:
        self.close()
        written = max(self.folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        log.info("profile   %s", os.path.relpath(written, config.project_root()))
        if not self.num_steps:
            log.warning(
                "train.profile_steps = [%d, %d]: they were done by the call that traces and compiles, so there is no "
                "split of their time: name later steps too",
                self.first_step,
                self.last_step,
            )
            return
        parts = self.tracer.split(written, self.num_steps)
        log.info("profile   a step: %s", ", ".join(f"{name} {value:.2f} ms" for name, value in parts.items()))
        self.send(self.position.step, {f"performance/{name}_ms": value for name, value in parts.items()})

"""How fast a training is."""

import time

import keras

from tasks.system import clock
from tasks.training.position import Position


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all training steps after the first call, without validation, checkpoints and
    the profiler's own work; and the first call, which traces and compiles, by itself.

    Where each size of a batch is compiled for itself, as by XLA, the first call with an epoch's short last batch is
    left out, too: with it, an epoch of digits on JAX seemed a 23rd as fast (717 examples/s in place of 16,681).
    """

    def __init__(self, position: Position, began: float, compiles_each_size: bool = False) -> None:
        super().__init__()
        self.position = position
        self._compiles_each_size = compiles_each_size
        self._compiled: set[int] = set()
        self.began = began
        """When the stage began, by ``time.perf_counter``."""
        self.setup_seconds = 0.0
        self.first_call_seconds: float | None = None
        self.epoch_seconds: list[float] = []
        self.seconds = 0.0
        self.num_examples = 0
        self._epoch_began = 0.0
        self._since = 0.0
        self._step = 0

    @property
    def examples_per_second(self) -> float | None:
        """None when there was no call but those that trace and compile."""
        return self.num_examples / self.seconds if self.num_examples else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self._epoch_began, self._since = time.perf_counter(), self._now()
        self._step = self.position.step
        if self.first_call_seconds is None:
            self.setup_seconds = self._epoch_began - self.began

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        # Keras has read the loss for its callbacks, so an accelerator has done what the call handed to it.
        now, step = self._now(), self.position.step
        sizes = [self.position.batches.size(done) for done in range(self._step, step)]
        compiled = self._compiles_each_size and not self._compiled.issuperset(sizes)
        self._compiled.update(sizes)
        if self.first_call_seconds is None:
            self.first_call_seconds = now - self._since
            clock.write("stages", "first step", time.monotonic() - self.first_call_seconds)
        elif not compiled:
            self.num_examples += sum(sizes)
            self.seconds += now - self._since
        self._since, self._step = now, step

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        begun_here = epoch > self.position.start.epoch or not self.position.start.step_in_epoch
        if begun_here and self.position.epoch > epoch:
            self.epoch_seconds.append(time.perf_counter() - self._epoch_began)

    def _now(self) -> float:
        return time.perf_counter() - self.position.aside_seconds

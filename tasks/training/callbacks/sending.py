"""What a training hands to whoever tracks its run."""

from collections.abc import Callable, Mapping

import keras

from tasks.modeling import metrics
from tasks.training.position import Position

MetricSink = Callable[[int, Mapping[str, float]], None]


class SendMetrics(keras.callbacks.Callback):
    """Hands each epoch's metrics to whoever tracks the run."""

    def __init__(self, send: MetricSink, position: Position) -> None:
        super().__init__()
        self.send = send
        self.position = position

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.send(self.position.step + self.position.offset, metrics.by_split(logs or {}))

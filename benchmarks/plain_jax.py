"""The peer on JAX: a small perceptron in plain Keras, with arrays passed to `fit`. Prints one JSON line.

`python -m benchmarks.plain_jax DATASET EPOCHS UNITS DEVICES`, with KERAS_BACKEND=jax; the dataset must be prepared.
With several devices, which share the cores, Keras' DataParallel divides each batch of 64 examples per device.
"""

import json
import sys
import time

import jax
import keras
import numpy as np
from keras import layers


class Clock(keras.callbacks.Callback):
    """When each epoch began."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self.times.append(time.perf_counter())


def main(name: str, epochs: int, units: int, devices: int) -> None:
    """Train, and time all epochs but the first, which compiles."""
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    images = np.load(f"data/{name}/prepared/train_images.npy")
    labels = np.load(f"data/{name}/prepared/train_labels.npy")
    hidden = [layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(units, activation="relu")]
    model = keras.Sequential([keras.Input(images.shape[1:]), *hidden, layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    clock = Clock()
    model.fit(images, labels, batch_size=64 * devices, epochs=epochs, callbacks=[clock], verbose=0)
    print(json.dumps({"examples_per_second": len(images) * (epochs - 1) / (time.perf_counter() - clock.times[1])}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

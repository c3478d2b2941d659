"""The peer: TensorFlow's "Distributed training with Keras" tutorial as its source writes it.

https://www.tensorflow.org/tutorials/distribute/keras. Prints one JSON line. `python -m benchmarks.tutorial DATASET
DATA_DIR EPOCHS [OPTIONS]`; `--help` lists the options.
"""

import argparse
import contextlib
import importlib
import json
import time

BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = 64


def decay(epoch: int) -> float:
    """Return the tutorial's learning rate of an epoch."""
    if epoch < 3:
        return 1e-3
    return 1e-4 if epoch < 7 else 1e-5


def main(
    name: str, data_dir: str, epochs: int, devices: int, architecture: str, improved: bool, decays: bool, curve: bool
) -> None:
    """Train and evaluate as the tutorial does."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    imported = time.perf_counter()
    if name == "digits":  # Embedded here; TFDS knows it once its module is imported.
        importlib.import_module("tasks.data.builders.digits")

    scope = contextlib.nullcontext
    if devices > 1:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
        scope = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(devices)]).scope
    batch_size = BATCH_SIZE_PER_REPLICA * devices

    data, info = tfds.load(name, with_info=True, as_supervised=True, data_dir=data_dir, download=False)
    train, test = data["train"], data["test"]

    def scale(image, label):
        image = tf.cast(image, tf.float32)
        image /= 255
        return image, label

    train_dataset = train.map(scale).cache().shuffle(BUFFER_SIZE).batch(batch_size)
    eval_dataset = test.map(scale).batch(batch_size)
    options = {}
    if improved:
        train_dataset, eval_dataset = (one.prefetch(tf.data.AUTOTUNE) for one in (train_dataset, eval_dataset))
        options = {"steps_per_execution": 20}

    shape, num_classes = info.features["image"].shape, info.features["label"].num_classes
    with scope():
        if architecture == "convnet":
            layers = [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=shape),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
            ]
        elif architecture == "convnet2":
            layers = [
                tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=shape),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Conv2D(64, 3, activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(64, activation="relu"),
            ]
        else:
            layers = [
                tf.keras.layers.Flatten(input_shape=shape),
                tf.keras.layers.Dense(256, activation="relu"),
                tf.keras.layers.Dense(256, activation="relu"),
            ]
        model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(num_classes)])
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(),
            metrics=["accuracy"],
            **options,
        )

    # With several steps a call, Keras tells of the last one of each.
    steps_of_call = options.get("steps_per_execution", 1)

    class Throughput(tf.keras.callbacks.Callback):
        """Training steps after the first call, input wait included: what `examples_per_second` counts in ours."""

        seconds, steps, since, first = 0.0, 0, 0.0, True

        def on_epoch_begin(self, epoch, logs=None):
            self.since = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            now = time.perf_counter()
            if not self.first:
                self.seconds, self.steps = self.seconds + now - self.since, self.steps + steps_of_call
            self.first, self.since = False, now

    class Curve(tf.keras.callbacks.Callback):
        """Seconds since the imports, without the evaluations, and test accuracy, after each epoch."""

        seconds, since, found = 0.0, imported, ()

        def on_epoch_begin(self, epoch, logs=None):
            self.since = time.perf_counter() if epoch else self.since

        def on_epoch_end(self, epoch, logs=None):
            self.seconds += time.perf_counter() - self.since
            _, accuracy = self.model.evaluate(eval_dataset, verbose=0)
            self.found = (*self.found, (self.seconds, float(accuracy)))

    throughput, points = Throughput(), Curve()
    callbacks = [throughput, *([tf.keras.callbacks.LearningRateScheduler(decay)] if decays else [])]
    model.fit(train_dataset, epochs=epochs, callbacks=[*callbacks, *([points] if curve else [])], verbose=0)
    _, accuracy = model.evaluate(eval_dataset, verbose=0)
    # The last batch of an epoch is short: count it as it is.
    num_examples = info.splits["train"].num_examples
    calls = -(-num_examples // (batch_size * steps_of_call))
    missing = epochs * (calls * steps_of_call * batch_size - num_examples)
    examples = throughput.steps * batch_size - missing
    print(
        json.dumps(
            {
                "examples_per_second": examples / throughput.seconds,
                "test/accuracy": float(accuracy),
                "curve": points.found,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("data_dir")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--devices", type=int, default=1, help="logical CPUs, under MirroredStrategy")
    parser.add_argument(
        "--model",
        dest="architecture",
        choices=["convnet", "convnet2", "mlp"],
        default="convnet",
        help="convnet2: the tutorial on custom training; mlp: Keras' guide",
    )
    parser.add_argument("--improved", action="store_true", help="with prefetch and steps_per_execution")
    parser.add_argument("--decay", dest="decays", action="store_true", help="with the tutorial's learning rates")
    parser.add_argument("--curve", action="store_true", help="with the test accuracy after each epoch")
    main(**vars(parser.parse_args()))

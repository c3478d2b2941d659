"""The peer: TensorFlow's "Distributed training with Keras" tutorial as its source writes it, on one device.

https://www.tensorflow.org/tutorials/distribute/keras. Prints one JSON line. `python -m benchmarks.tutorial DATASET
DATA_DIR EPOCHS`
"""

import json
import sys
import time

BUFFER_SIZE = 10000
BATCH_SIZE = 64


def main(name: str, data_dir: str, epochs: int) -> None:
    """Train and evaluate as the tutorial does."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    if name == "digits":  # Embedded here; TFDS knows it once its module is imported.
        import tasks.datasets.digits  # noqa: F401

    data, info = tfds.load(name, with_info=True, as_supervised=True, data_dir=data_dir, download=False)
    train, test = data["train"], data["test"]

    def scale(image, label):
        image = tf.cast(image, tf.float32)
        image /= 255
        return image, label

    train_dataset = train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
    eval_dataset = test.map(scale).batch(BATCH_SIZE)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(32, 3, activation="relu", input_shape=info.features["image"].shape),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(info.features["label"].num_classes),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )

    class Throughput(tf.keras.callbacks.Callback):
        """Training steps after the first call, input wait included: what `examples_per_second` counts in ours."""

        seconds, steps, since, first = 0.0, 0, 0.0, True

        def on_epoch_begin(self, epoch, logs=None):
            self.since = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            now = time.perf_counter()
            if not self.first:
                self.seconds, self.steps = self.seconds + now - self.since, self.steps + 1
            self.first, self.since = False, now

    throughput = Throughput()
    model.fit(train_dataset, epochs=epochs, callbacks=[throughput], verbose=0)
    _, accuracy = model.evaluate(eval_dataset, verbose=0)
    # The last batch of an epoch is short: count it as it is.
    missing = epochs * (-info.splits["train"].num_examples % BATCH_SIZE)
    examples = throughput.steps * BATCH_SIZE - missing
    print(json.dumps({"examples_per_second": examples / throughput.seconds, "test/accuracy": float(accuracy)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

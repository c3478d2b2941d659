"""The floor: the tutorial's model and optimizer with the data resident and a whole epoch in one `tf.function`.

Prints one JSON line. `python -m benchmarks.floor DATASET EPOCHS`; the dataset must be prepared.
"""

import json
import sys
import time

import numpy as np

BATCH_SIZE = 64


def main(name: str, epochs: int) -> None:
    """Train, and time all epochs but the first, which traces."""
    import tensorflow as tf

    images = tf.constant(np.load(f"data/{name}/prepared/train_images.npy"))
    labels = tf.constant(np.load(f"data/{name}/prepared/train_labels.npy"))
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input(images.shape[1:]),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(int(tf.reduce_max(labels)) + 1),
        ]
    )
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    steps = len(labels) // BATCH_SIZE

    @tf.function
    def epoch(order):
        for i in tf.range(steps):
            rows = tf.ensure_shape(order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE], (BATCH_SIZE,))
            batch = tf.cast(tf.gather(images, rows), tf.float32) / 255
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, rows), model(batch))
                loss = tf.reduce_mean(losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    generator = np.random.default_rng(0)
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        epoch(tf.constant(generator.permutation(len(labels))))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"examples_per_second": steps * BATCH_SIZE * (epochs - 1) / sum(seconds[1:])}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

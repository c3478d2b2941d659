"""The floor: the tutorial's model and optimizer with the data resident and a whole epoch in one `tf.function`.

Prints one JSON line. `python -m benchmarks.floor DATASET EPOCHS [convnet|mlp]`; the dataset must be
prepared. XLA compiles the perceptron's step, which it makes faster, and not the convnet's, which it makes slower.
"""

import json
import sys
import time

import numpy as np

BATCH_SIZE = 64


def main(name: str, epochs: int, architecture: str = "convnet") -> None:
    """Train, and time all epochs but the first, which traces."""
    import tensorflow as tf

    images = tf.constant(np.load(f"data/{name}/prepared/train_images.npy"))
    labels = tf.constant(np.load(f"data/{name}/prepared/train_labels.npy"))
    layers = [
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
    ]
    if architecture == "mlp":
        layers = [
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(256, activation="relu"),
        ]
    last = tf.keras.layers.Dense(int(tf.reduce_max(labels)) + 1, dtype="float32")
    model = tf.keras.Sequential([tf.keras.layers.Input(images.shape[1:]), *layers, last])
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    steps = len(labels) // BATCH_SIZE

    @tf.function(jit_compile=architecture == "mlp")
    def step(batch, its_labels):
        with tf.GradientTape() as tape:
            logits = model(tf.cast(batch, tf.float32) / 255)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(its_labels, logits))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function
    def epoch(order):
        for i in tf.range(steps):
            rows = tf.ensure_shape(order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE], (BATCH_SIZE,))
            step(tf.gather(images, rows), tf.gather(labels, rows))

    generator = np.random.default_rng(0)
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        epoch(tf.constant(generator.permutation(len(labels))))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"examples_per_second": steps * BATCH_SIZE * (epochs - 1) / sum(seconds[1:])}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""The least that a first training step takes: `import tensorflow`, the tutorial's model, and one traced call of `fit`.

`python -m benchmarks.first_step`; the seconds of the whole process count.
"""

import numpy as np
import tensorflow as tf


def main() -> None:
    """Train one step."""
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=tf.keras.optimizers.Adam(), metrics=["accuracy"])
    model.fit(np.zeros((64, 8, 8, 1), "float32"), np.zeros(64, "int64"), batch_size=64, verbose=0)


if __name__ == "__main__":
    main()

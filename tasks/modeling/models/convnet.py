"""Conv32-Pool-Dense64, the model of TensorFlow's "Distributed training with Keras" tutorial."""

import keras


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype."""
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Conv2D(32, 3, activation="relu", name="conv1")(images)
    x = keras.layers.MaxPooling2D(name="pool1")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(64, activation="relu", name="dense1")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout1")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="convnet")

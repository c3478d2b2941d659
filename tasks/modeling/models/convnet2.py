"""Conv32-Conv64-Dense64, the model of TensorFlow's "Custom training with tf.distribute.Strategy" tutorial."""

import keras


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0, padding: str = "valid") -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    The tutorial pads nothing. Images of fewer than 10 pixels a side then leave nothing to the second pool: give them
    ``padding`` ``same``.
    """
    images = keras.Input(input_shape, name="image")
    x = images
    for i, filters in enumerate((32, 64), start=1):
        x = keras.layers.Conv2D(filters, 3, padding=padding, activation="relu", name=f"conv{i}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{i}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(64, activation="relu", name="dense1")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout1")(x)
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Dense(num_classes, dtype=full, name="logits")(x)
    return keras.Model(images, logits, name="convnet2")

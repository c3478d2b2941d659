"""Conv32-Conv64-Dense64, the model of TensorFlow's "Custom training with tf.distribute.Strategy" tutorial."""

import keras

from tasks.modeling.models._layers import dropped, output_layer


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0, padding: str = "valid") -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype.

    The tutorial uses no padding. Images with a side of less than 10 pixels are then too small for the second pool and
    need ``padding`` ``same``.
    """
    images = keras.Input(input_shape, name="image")
    x = images
    for i, filters in enumerate((32, 64), start=1):
        x = keras.layers.Conv2D(filters, 3, padding=padding, activation="relu", name=f"conv{i}")(x)
        x = keras.layers.MaxPooling2D(name=f"pool{i}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(64, activation="relu", name="dense1")(x)
    x = dropped(x, dropout, "dropout1")
    return keras.Model(images, output_layer(num_classes)(x), name="convnet2")

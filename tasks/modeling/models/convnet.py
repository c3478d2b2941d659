"""Conv32-Pool-Dense64, the model of TensorFlow's "Distributed training with Keras" tutorial."""

import keras

from tasks.modeling.models._layers import dropped, output_layer


def build(input_shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> keras.Model:
    """Return images (batch, height, width, channels) -> logits (batch, num_classes), of the policy's variable dtype."""
    images = keras.Input(input_shape, name="image")
    x = keras.layers.Conv2D(32, 3, activation="relu", name="conv1")(images)
    x = keras.layers.MaxPooling2D(name="pool1")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(64, activation="relu", name="dense1")(x)
    x = dropped(x, dropout, "dropout1")
    return keras.Model(images, output_layer(num_classes)(x), name="convnet")

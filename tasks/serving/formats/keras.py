"""The training's .keras file with layers, weights and optimizer state, for Keras on any backend."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.serving.formats import Format


def load_model(folder: Path) -> Callable[[Any], Any]:
    """Return Keras' function from a batch to its outputs."""
    import keras

    predict: Callable[[Any], Any] = keras.models.load_model(folder / "model.keras", compile=False).predict_on_batch
    return predict


FORMAT = Format(
    write=lambda model, keras_file, folder: shutil.copyfile(keras_file, folder / "model.keras"), load=load_model
)

"""The .keras file as the training wrote it: layers, weights, what the optimizer remembers; for Keras on any backend."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.serving.formats import Format


def load_model(folder: Path) -> Callable[[Any], Any]:
    """Return what Keras gives for a batch."""
    import keras

    predict: Callable[[Any], Any] = keras.models.load_model(folder / "model.keras", compile=False).predict_on_batch
    return predict


FORMAT = Format(
    write=lambda model, keras_file, folder: shutil.copyfile(keras_file, folder / "model.keras"), load=load_model
)

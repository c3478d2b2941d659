"""The .keras file as the training wrote it: layers, weights, what the optimizer remembers; for Keras on any backend."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.exports import Format

NAME = "model.keras"


def _load(folder: Path) -> Callable[[Any], Any]:
    import keras

    predict: Callable[[Any], Any] = keras.models.load_model(folder / NAME, compile=False).predict_on_batch
    return predict


FORMAT = Format(write=lambda model, keras_file, folder: shutil.copyfile(keras_file, folder / NAME), load=_load)

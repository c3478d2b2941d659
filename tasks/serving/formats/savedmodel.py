"""TensorFlow's SavedModel, which needs neither Keras nor the code of the layers; the function is ``serve``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.serving.formats import Format


def load_model(folder: Path) -> Callable[[Any], Any]:
    """Return TensorFlow's function from a batch to its outputs."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder))
    return lambda batch: loaded.serve(batch).numpy()


FORMAT = Format(
    write=lambda model, keras_file, folder: model.export(folder, format="tf_saved_model", verbose=False),
    load=load_model,
)

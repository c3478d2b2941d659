"""The .keras file as the training wrote it: layers, weights, what the optimizer remembers; for Keras on any backend."""

import shutil

from tasks.exports import Format, load_keras

NAME = "model.keras"

FORMAT = Format(
    write=lambda model, keras_file, folder: shutil.copyfile(keras_file, folder / NAME),
    load=lambda folder: load_keras(folder / NAME),
)

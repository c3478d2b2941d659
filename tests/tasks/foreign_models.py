"""Files of models by somebody else, whose configuration asks for what is not here."""

import zipfile

import keras


def write_huge_model(file):
    """Write a file of some kilobytes whose layer has 2 * 10**12 weights."""
    _write(file, b'"units": 1,', b'"units": 1000000000000,')


def write_model_of_unknown_class(file):
    """Write a file that names a class of its author's."""
    _write(file, b'"module": "keras.layers", "class_name": "Dense"', b'"module": "theirs", "class_name": "Theirs"')


def _write(file, before, after):
    inputs = keras.Input((2,), name="number")
    model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    keras.saving.save_model(model, plain := str(file) + ".keras")
    with zipfile.ZipFile(plain) as given, zipfile.ZipFile(file, "w") as made:
        for name in given.namelist():
            made.writestr(name, given.read(name).replace(before, after))

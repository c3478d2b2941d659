"""LiteRT (once TensorFlow Lite), by Keras, for phones and small devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.exports import Format, by_name

NAME = "model.tflite"
NOT_IN_IT = "its multiplications would be TensorFlow's own operations, which LiteRT's runtime does not have"


def load(folder: Path) -> Callable[[Any], Any]:
    """Return what computes the outputs of a batch by the folder's file."""
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(str(folder / NAME)).get_signature_runner()
    names, (output,) = list(run.get_input_details()), run.get_output_details()
    return lambda batch: run(**by_name(names, batch))[output]


FORMAT = Format(
    write=lambda model, keras_file, folder: model.export(folder / NAME, format="litert", verbose=False),
    load=load,
    packages=("ai_edge_litert",),
    refuses=dict.fromkeys(("mixed_float16", "mixed_bfloat16", "float64"), NOT_IN_IT),
)

"""LiteRT (formerly TensorFlow Lite), for phones and small devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.serving.formats import Format


def load_model(folder: Path) -> Callable[[Any], Any]:
    """Return LiteRT's function from a batch to its outputs."""
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(str(folder / "model.tflite")).get_signature_runner()
    (taken, *_), (given,) = run.get_input_details(), run.get_output_details()
    return lambda batch: run(**(batch if isinstance(batch, dict) else {taken: batch}))[given]


def litert_format(options: Callable[[], dict[str, Any]], rounds: bool = False) -> Format:
    """Return a format of LiteRT.

    Args:
        options: returns the options of TensorFlow's converter; called only for writing, as it may import TensorFlow.
        rounds: see ``Format``.
    """
    not_in_it = "its multiplications would be TensorFlow's own operations, which LiteRT's runtime does not have"
    return Format(
        write=lambda model, _, folder: model.export(
            folder / "model.tflite", format="litert", verbose=False, **options()
        ),
        load=load_model,
        packages=("ai_edge_litert",),
        refuses=dict.fromkeys(("mixed_float16", "mixed_bfloat16", "float64"), not_in_it),
        rounds=rounds,
        extra="litert",
    )


FORMAT = litert_format(dict)

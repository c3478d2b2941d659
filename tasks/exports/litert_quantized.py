"""LiteRT with large weights rounded to 8 bits (dynamic range quantization), a quarter of the size.

Source: https://ai.google.dev/edge/litert/models/post_training_quantization.
"""

from pathlib import Path
from typing import Any

from tasks.exports import Format, load_litert

NAME = "model.tflite"
NOT_IN_IT = "its multiplications would be TensorFlow's own operations, which LiteRT's runtime does not have"


def _write(model: Any, keras_file: Path, folder: Path) -> None:
    import tensorflow as tf

    model.export(folder / NAME, format="litert", verbose=False, optimizations=[tf.lite.Optimize.DEFAULT])


FORMAT = Format(
    write=_write,
    load=lambda folder: load_litert(folder / NAME),
    packages=("ai_edge_litert",),
    refuses=dict.fromkeys(("mixed_float16", "mixed_bfloat16", "float64"), NOT_IN_IT),
    rounds=True,
    extra="litert",
)

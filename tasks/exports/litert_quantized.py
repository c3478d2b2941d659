"""LiteRT with large weights rounded to 8 bits (dynamic range quantization), a quarter of the size.

Source: https://ai.google.dev/edge/litert/models/post_training_quantization.
"""

from pathlib import Path
from typing import Any

from tasks.exports import Format, litert


def _write(model: Any, keras_file: Path, folder: Path) -> None:
    import tensorflow as tf

    model.export(folder / litert.NAME, format="litert", verbose=False, optimizations=[tf.lite.Optimize.DEFAULT])


FORMAT = Format(
    write=_write,
    load=litert.load,
    packages=litert.FORMAT.packages,
    refuses=litert.FORMAT.refuses,
    rounds=True,
    extra="litert",
)

"""LiteRT with large weights rounded to 8 bits (dynamic range quantization), a quarter of the size.

Source: https://ai.google.dev/edge/litert/models/post_training_quantization.
"""

from typing import Any

from tasks.serving.formats.litert import litert_format


def _rounding() -> dict[str, Any]:
    import tensorflow as tf

    return {"optimizations": [tf.lite.Optimize.DEFAULT]}


FORMAT = litert_format(_rounding, rounds=True)

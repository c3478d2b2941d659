"""ONNX, written by Keras and tf2onnx, for ONNX Runtime on many platforms and in many languages."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.serving.formats import Format


def _write(model: Any, keras_file: Path, folder: Path) -> None:
    model(model.inputs)  # Keras 3.15 cannot write a loaded model as ONNX before the model was called.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Keras tests whether NumPy has `np.object`.
        model.export(folder / "model.onnx", format="onnx", verbose=False)


def load_model(folder: Path) -> Callable[[Any], Any]:
    """Return ONNX Runtime's function from a batch to its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    first = session.get_inputs()[0].name
    return lambda batch: session.run(None, batch if isinstance(batch, dict) else {first: batch})[0]


FORMAT = Format(
    write=_write,
    load=load_model,
    packages=("onnxruntime", "tf2onnx"),
    refuses={
        "mixed_float16": "ONNX Runtime rounds half precision in another way, 7e-4 off for a perceptron of two layers",
        "mixed_bfloat16": "tf2onnx mixes float16 and bfloat16 in one operation, which ONNX Runtime does not load",
    },
)

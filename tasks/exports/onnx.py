"""ONNX, by Keras and tf2onnx, for ONNX Runtime on many machines and in many languages."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.exports import Format, by_name

NAME = "model.onnx"


def _write(model: Any, keras_file: Path, folder: Path) -> None:
    model(model.inputs)  # Keras 3.15 writes no ONNX of a model that was loaded, and not called since.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Keras looks for `np.object`, which tf2onnx may want.
        model.export(folder / NAME, format="onnx", verbose=False)


def _load(folder: Path) -> Callable[[Any], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / NAME, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return lambda batch: session.run(None, by_name(names, batch))[0]


FORMAT = Format(
    write=_write,
    load=_load,
    packages=("onnxruntime", "tf2onnx"),
    refuses={
        "mixed_float16": "ONNX Runtime rounds half precision in another way, 7e-4 off for a perceptron of two layers",
        "mixed_bfloat16": "tf2onnx mixes float16 and bfloat16 in one operation, which ONNX Runtime does not load",
    },
)

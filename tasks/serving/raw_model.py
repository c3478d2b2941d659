"""A trained model that takes raw values: loaded by Keras, with what makes its input, and what its outputs mean."""

import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding import Encoder, WholeEncoder
from tasks.data.encoding.rows import answers
from tasks.records import Target, as_input
from tasks.serving.raw_inputs import Wanted
from tasks.system.errors import UserError, cut, one_line
from tasks.tracking import trained_models
from tasks.tracking.trained_models import TrainedModel

Arrays = dict[str, npt.NDArray[Any]]
Meaning = Callable[[npt.NDArray[np.float32]], dict[str, list[Any]]]
"""Makes columns of outputs, with a value for each example."""


class RawModel:
    """A model in memory.

    Attributes:
        name: as a person calls it.
        target: what its outputs stand for; of a model that does not say it, numbers.
        takes: shape and dtype of each array that it takes, by name.
        features: what makes these of raw values, as ``encoding.Encoder`` takes it; none where arrays are taken alone.
        wanted: what may be given.
    """

    def __init__(self, found: TrainedModel) -> None:
        """Load a model, in Keras' safe mode.

        Raises:
            UserError: Keras cannot, or nobody knows what makes its input of raw values.
        """
        self.name = found.name
        self._model = _load(found)
        takes = {one.name: (tuple(one.shape[1:]), str(one.dtype)) for one in self._model.inputs}
        encoding = found.encoding or _guess_encoding(takes)
        self.features: Mapping[str, Any] = encoding["features"] if encoding else {}
        if self.features:
            takes = {name: (tuple(feature["shape"]), feature["dtype"]) for name, feature in self.features.items()}
        self.takes = takes
        self.vocabularies = encoding["vocabularies"] if encoding else {}
        self.wanted = Wanted(
            {column["name"]: column["kind"] for one in self.features.values() for column in one["columns"]},
            tuple(takes),
        )
        num_outputs = int(self._model.output_shape[-1])
        self.target = found.target or Target(
            task="regression", num_outputs=num_outputs, columns=tuple(f"output {one}" for one in range(num_outputs))
        )

    @functools.cached_property
    def input_encoder(self) -> Encoder:
        """What makes the model's input of raw values, or refuses them; several threads may use it."""
        return Encoder(self.features, self.vocabularies)

    def encoder(self, workers: Callable[..., Iterable[Any]] = map) -> WholeEncoder:
        """Return what makes the model's input of raw values; it is not for several threads at once."""
        return WholeEncoder(self.features, self.vocabularies, workers)

    def outputs(self, features: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Return what the model gives for n examples, float32 (n, num_outputs).

        Args:
            features: as prepared, each (n, *shape).
        """
        if not len(next(iter(features.values()))):
            return np.zeros((0, self.target.num_outputs), np.float32)
        return np.asarray(self._model.predict_on_batch(as_input(features)), np.float32)


def meaning(target: Target, top_k: int, all_shares: bool) -> Meaning:
    """Return what outputs mean, as columns: the class and how likely it is, the labels, or the numbers."""
    names = target.class_names or target.columns or ("prediction",)
    return functools.partial(answers, target.task, names, top_k=top_k, all_shares=all_shares)


def _guess_encoding(takes: Mapping[str, tuple[tuple[Any, ...], str]]) -> dict[str, Any] | None:
    """Return what makes the input of files of images, for a model that takes one image."""
    if len(takes) != 1:
        return None
    ((name, (shape, _)),) = takes.items()
    if len(shape) != 3 or shape[-1] not in (1, 3) or None in shape:
        return None
    column = {"name": name, "kind": "image", "width": 1}
    feature = {"kind": "image", "shape": shape, "dtype": "uint8", "columns": [column]}
    return {"features": {name: feature}, "vocabularies": {}}


def _load(found: TrainedModel) -> Any:
    if found.module is not None and found.code is not None:
        _import(found.module, found.code)
    try:
        return keras.models.load_model(found.keras_file, compile=False)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        own = (
            f"its classes are to be registered in {found.module}, which lies in {found.code}"
            if found.module
            else "classes and functions of your own are found in a run or in a registered model, not in a file alone"
        )
        raise UserError(
            f"{found.name}: Keras cannot load {found.keras_file} ({type(error).__name__}: {cut(lines[-1])}): {own}"
        ) from error


def _import(module: str, folder: Path) -> None:
    """Import the user's own code from a folder: anew where another version of a model has brought another one."""
    if folder != config.project_root():
        own = {path.stem for path in folder.iterdir()}
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        importlib.invalidate_caches()
    kept = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        importlib.import_module(module)
    except Exception as error:
        raise UserError(f"importing {module} from {folder} failed ({one_line(error)})") from error
    finally:
        sys.path[:] = kept


def load(reference: str) -> RawModel:
    """Return the model that a person names, see ``trained_models.find_trained_model``; ask MLflow if only it knows."""
    if (found := trained_models.find_trained_model(reference)) is not None:
        return RawModel(found)
    from tasks.tracking.models import fetch_model

    # Keras reads a file whole; who follows an alias would fill a disk with copies that stay.
    with tempfile.TemporaryDirectory() as folder:
        return RawModel(fetch_model(reference, folder))


def devices() -> tuple[str, ...]:
    """Return the accelerators that a model computes on here; the CPU where there is none."""
    import tensorflow as tf

    found = [one.name for one in tf.config.list_logical_devices()]
    return tuple(name for name in found if ":CPU:" not in name) or tuple(found)

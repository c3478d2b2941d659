"""A trained Keras model for raw values, with the encoding of its input and the meaning of its outputs."""

import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding import Encoder
from tasks.data.encoding.answers import answers
from tasks.data.encoding.inputs import Wanted
from tasks.modeling import models
from tasks.records import Target, as_input
from tasks.system.errors import UserError, one_line
from tasks.tracking import trained_models
from tasks.tracking.trained_models import TrainedModel

Arrays = dict[str, npt.NDArray[Any]]
Meaning = Callable[[npt.NDArray[np.float32]], dict[str, list[Any]]]
"""Converts outputs to columns with one value per example."""


class RawModel:
    """A model in memory.

    Attributes:
        name: the model's name in messages.
        target: the meaning of its outputs; numbers if unknown.
        takes: the shape and dtype of each input array, by name.
        encoder: encodes raw values as these arrays; None if the model only takes arrays.
        wanted: the accepted inputs.
    """

    def __init__(self, found: TrainedModel, workers: Callable[..., Iterable[Any]] = map) -> None:
        """Load a model from its files, in Keras' safe mode; for ``workers`` see ``encoding.Encoder``.

        Raises:
            UserError: Keras cannot load it.
        """
        self.name = found.name
        self._model = _load(found)
        takes = {one.name: (tuple(one.shape[1:]), str(one.dtype)) for one in self._model.inputs}
        encoding = found.encoding or _guess_encoding(takes) or {"features": {}, "vocabularies": {}}
        features: Mapping[str, Any] = encoding["features"]
        self.encoder = Encoder(features, encoding["vocabularies"], workers=workers) if features else None
        if features:
            takes = {name: (tuple(feature["shape"]), feature["dtype"]) for name, feature in features.items()}
        self.takes = takes
        self.wanted = Wanted.of(encoding, takes)
        num_outputs = int(self._model.output_shape[-1])
        self.target = found.target or Target(
            task="regression", num_outputs=num_outputs, columns=tuple(f"output {one}" for one in range(num_outputs))
        )

    def outputs(self, features: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Return the model's outputs, float32 (n, num_outputs), for features as prepared, each (n, *shape)."""
        if not len(next(iter(features.values()))):
            return np.zeros((0, self.target.num_outputs), np.float32)
        return np.asarray(self._model.predict_on_batch(as_input(features)), np.float32)


def meaning(target: Target, top_k: int, all_shares: bool) -> Meaning:
    """Return the function that converts outputs to columns: classes with probabilities, labels, or numbers."""
    names = target.class_names or target.columns or ("prediction",)
    return functools.partial(answers, target.task, names, top_k=top_k, all_shares=all_shares)


def _guess_encoding(takes: Mapping[str, tuple[tuple[Any, ...], str]]) -> dict[str, Any] | None:
    """Return the encoding of image files for a model whose only input is an image; None for other models."""
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
    advice = ": your own classes and functions are available for a run or a registered model, but not for a file"
    if found.module is not None:
        advice = f": its classes must be registered in {found.module} in {found.code}"
    return models.load(found.name, found.keras_file, advice, own_code=found.module is not None)


def _import(module: str, folder: Path) -> None:
    """Import the user's code from a folder, replacing that of another version of the model."""
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


def load(reference: str | None, workers: Callable[..., Iterable[Any]] = map) -> RawModel:
    """Return a model by a user's reference: a run, a file, or an address in the registry; None is the only champion."""
    if not trained_models.is_registered(reference):
        return RawModel(trained_models.find_trained_model(str(reference)), workers)
    from tasks.tracking.models import fetch_model

    # Keras reads the whole file, so the copy is removed: a server that follows an alias would fill the disk.
    with tempfile.TemporaryDirectory() as folder:
        return RawModel(fetch_model(reference, folder), workers)


def devices() -> tuple[str, ...]:
    """Return the accelerators of this process, or the CPU if it has none."""
    import tensorflow as tf

    found = [one.name for one in tf.config.list_logical_devices()]
    return tuple(name for name in found if ":CPU:" not in name) or tuple(found)

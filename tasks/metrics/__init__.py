"""Metrics by name: the file is the key, and its ``METRIC`` says how a training and an evaluation compute it.

``NAME`` is then measured while a training trains and validates, is ``test/NAME`` of an evaluation, and can be what a
checkpoint, early stopping and the gate of the registry go by.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import config


@dataclass(frozen=True)
class Metric:
    """A number that says how good predictions are."""

    better: Literal["higher", "lower"]
    in_training: Callable[[str], Any]
    """Makes the ``keras.metrics.Metric`` of a name, inside the strategy's scope."""
    of_predictions: Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float]
    """Takes labels (n,) and logits (n, classes)."""


def find(name: str) -> Metric:
    """Return the metric of a name, a file of this folder."""
    metric: Metric = importlib.import_module(f"tasks.metrics.{name}").METRIC
    return metric


def find_all() -> dict[str, Metric]:
    """Return all metrics by their names."""
    return {name: find(name) for name in config.names_of("metrics")}


def better(name: str) -> Literal["higher", "lower"]:
    """Return which values of a metric such as ``validation/loss`` or ``test/accuracy`` are the better ones."""
    kind = name.partition("/")[2]
    return "lower" if kind == "loss" else find(kind).better


def by_split(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return Keras' logs under our names: ``loss`` is ``train/loss``, ``val_loss`` is ``validation/loss``."""
    return {
        f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}": float(value)
        for name, value in logs.items()
    }


def in_logs(name: str) -> str:
    """Return what Keras' logs call ``train/NAME`` or ``validation/NAME``."""
    return name.replace("train/", "").replace("validation/", "val_")

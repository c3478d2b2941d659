"""What a model gave for each test example, kept in a file; and which test rows these are."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.records import PreparedDataset
from tasks.system import files


class Predictions(NamedTuple):
    """Of n test examples, in the order of the prepared arrays."""

    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``: (n,), or (n, labels or numbers)."""
    outputs: npt.NDArray[np.float32]
    """(n, num_outputs): logits, or the numbers of a regression."""


def test_rows(prepared: PreparedDataset) -> str:
    """Return what the test rows of two data versions have in common if they are the same: a sha256 over those of the
    test split's arrays, weights left out, which count in a training alone."""
    split = prepared.splits["test"]
    paths = (*split.features.values(), split.labels)
    digests = {Path(path).name: split.sha256.get(path, "") for path in paths}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def takes_digest(prepared: PreparedDataset) -> str:
    """Return what two data versions have in common if a model of one can be given the examples of the other: features,
    columns, vocabularies, and what the outputs stand for."""
    features = {
        name: [
            one.kind,
            one.shape,
            one.dtype,
            [[column.name, column.kind, column.width] for column in one.columns],
            prepared.sha256.get(one.vocabulary) if one.vocabulary is not None else None,
        ]
        for name, one in prepared.features.items()
    }
    target = prepared.target
    what = [features, target.task, target.num_outputs, target.class_names, target.columns]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def save(path: Path, labels: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> str:
    """Write labels and outputs as an .npz file, whole or not at all; return the file's sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.savez(file, labels=labels, outputs=outputs.astype(np.float32))
        digest = files.digest(temporary)
    return digest


def load(path: Path, sha256: str) -> Predictions | None:
    """Return what such a file holds; None where it is gone, or is not the one of this sha256."""
    try:
        if files.digest(path) != sha256:
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return Predictions(arrays["labels"], arrays["outputs"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def probabilities(task: str, outputs: Any) -> Any:
    """Return the probability of each class or label, or a regression's numbers: float64 (n, num_outputs).

    Each export has these lines in its predict.py.

    Args:
        task: classification, multilabel or regression.
        outputs: (n, num_outputs): logits, or the numbers of a regression.
    """
    values = np.asarray(outputs, np.float64)
    if task == "regression":
        return values
    if task == "multilabel":
        return 1 / (1 + np.exp(-np.clip(values, -700, 700)))
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)

"""A model's stored predictions for the test examples, digests of the test rows, and calibration bins."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.records import PreparedDataset
from tasks.system import files

BINS = 15
"""The number of bins, as in Guo et al. (2017)."""


class Predictions(NamedTuple):
    """Labels and outputs of n test examples, in the order of the prepared arrays."""

    labels: npt.NDArray[Any]
    """As in ``records.PreparedSplit``: (n,), or (n, labels or numbers)."""
    outputs: npt.NDArray[np.float32]
    """(n, num_outputs): logits, or the numbers of a regression."""


def test_rows(prepared: PreparedDataset) -> str:
    """Return a sha256 that two data versions share if their test rows are equal: over the arrays of the test split
    except weights, which only training uses."""
    split = prepared.splits["test"]
    paths = (*split.features.values(), split.labels)
    digests = {Path(path).name: split.sha256.get(path, "") for path in paths}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def takes_digest(prepared: PreparedDataset) -> str:
    """Return a sha256 that two data versions share if a model of one accepts examples of the other: over features,
    columns, vocabularies, and the meaning of the outputs."""
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
    """Write labels and outputs as an .npz file atomically; return its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.savez(file, labels=labels, outputs=outputs.astype(np.float32))
        digest = files.digest(temporary)
    return digest


def load(path: Path, sha256: str) -> Predictions | None:
    """Return the predictions in a file; None if it is missing or has another sha256."""
    try:
        if files.digest(path) != sha256:
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return Predictions(arrays["labels"], arrays["outputs"])
    except OSError:  # With the right sha256, the content is what `save` wrote.
        return None


class Bins(NamedTuple):
    """Predictions binned by confidence, in equal intervals from 0 to 1, each (BINS,)."""

    counts: npt.NDArray[np.int64]
    confidence: npt.NDArray[np.float64]
    """The mean; 0 in an empty bin."""
    accuracy: npt.NDArray[np.float64]
    means: str
    """The name of ``accuracy``: accuracy, or share that has the label."""

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance between confidence and accuracy over all predictions.

        Source: Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks (2017), equation 3.
        """
        gaps = np.abs(self.confidence - self.accuracy)
        return float((self.counts * gaps).sum() / max(self.counts.sum(), 1))


def bins(confidence: npt.NDArray[Any], right: npt.NDArray[Any], means: str = "accuracy") -> Bins:
    """Return the bins of predictions, given their confidence, from 0 to 1, and whether each is right, both (n,)."""
    # A confidence on an edge belongs to the lower bin, as in the paper: (m - 1) / M < p <= m / M.
    places = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(places, minlength=BINS)
    sums = [np.bincount(places, weights=values, minlength=BINS) for values in (confidence, right)]
    confidences, shares = (one / np.maximum(counts, 1) for one in sums)
    return Bins(counts, confidences, shares, means)

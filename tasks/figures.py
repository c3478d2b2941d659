"""What an evaluation computes of labels (n,) and logits (n, classes) beside its loss and its metrics."""

from typing import Any

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float64]


def top_5_accuracy(labels: Labels, logits: Logits) -> float | None:
    """Return the share of examples whose class is among the five largest logits; None for up to five classes."""
    if logits.shape[1] <= 5:
        return None
    best = np.argsort(logits, axis=1, kind="stable")[:, -5:]
    return float((best == labels[:, None]).any(axis=1).mean())


FIGURES = {"top_5_accuracy": top_5_accuracy}
"""Numbers that a training does not have: each is ``test/NAME``, where it is not None."""


def compute(labels: Labels, logits: Logits) -> dict[str, float]:
    """Return all of ``FIGURES`` that there are for so many classes, under their names of an evaluation."""
    found = {f"test/{name}": figure(labels, logits) for name, figure in FIGURES.items()}
    return {name: value for name, value in found.items() if value is not None}


# By hand, and not by scikit-learn, whose import takes 0.4 s of a processor.


def confusion(labels: Labels, logits: Logits) -> npt.NDArray[np.int64]:
    """Return how many examples of each class, a row, were taken for each class, a column: int64 (classes, classes)."""
    num_classes = logits.shape[1]
    counts = np.bincount(labels * num_classes + logits.argmax(axis=1), minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def by_class(confusion: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Return precision, recall, F1 and the number of examples of each class, (classes,); 0 where it would be 0 / 0."""
    right, taken, support = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    precision, recall, f1 = (
        share / np.maximum(whole, 1)
        for share, whole in ((right, taken), (right, support), (2 * right, taken + support))
    )
    return precision, recall, f1, support

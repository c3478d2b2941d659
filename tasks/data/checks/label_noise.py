"""The share of training examples whose class a simple model, trained without them, confidently contradicts.

Logistic regression in five folds, evaluated as in confident learning (C. Northcutt, L. Jiang, I. Chuang, Confident
Learning: Estimating Uncertainty in Dataset Labels, 2021): a suspect is predicted as another class with at least the
mean probability that the examples of that class have for it. Off by default, because it trains models. A suspect is
not always mislabelled: it may be a rare example, or too difficult for such a simple model.
"""

import warnings

import numpy as np
import numpy.typing as npt

from tasks.data.checks import MOST_OFFENDERS, Check, Data, Found, Offender
from tasks.data.checks._hashes import Look, greys

MOST_ROWS = 20_000
"""The most examples that are used, evenly spread."""
MOST_COLUMNS = 256
"""The most columns of a feature; for categories and words, the most frequent ones."""
FOLDS = 5


def _find(data: Data) -> Found:
    rows = data.rows.get("train", np.zeros(0, np.int64))
    if data.prepared.target.task != "classification" or not len(rows):
        return Found(0.0, "there are no classes")
    rows = rows[:: 1 + (len(rows) - 1) // MOST_ROWS]
    labels = data.labels("train")[rows]
    counts = np.bincount(labels, minlength=len(data.class_names))
    rows = rows[counts[labels] >= FOLDS]  # Each fold needs one of each class.
    labels = data.labels("train")[rows]
    if len(np.unique(labels)) < 2:
        return Found(0.0, f"fewer than two classes have {FOLDS} examples")
    names, own = np.unique(labels, return_inverse=True)
    chances = _out_of_fold(np.concatenate([_inputs(data, name, rows) for name in data.prepared.features], axis=1), own)
    means = np.array([chances[own == number, number].mean() for number in range(len(names))])
    taken = chances.argmax(axis=1)
    given = np.arange(len(rows))
    suspects = np.flatnonzero((taken != own) & (chances[given, taken] >= means[taken]))
    margins = chances[suspects, taken[suspects]] - chances[suspects, own[suspects]]
    worst = suspects[np.argsort(-margins, kind="stable")]
    return Found(
        value=len(suspects) / len(rows),
        text=f"{len(suspects):,} of {len(rows):,} training examples may have a wrong label",
        offenders=[
            Offender(
                name=data.named("train", int(rows[place])),
                split="train",
                row=int(rows[place]),
                note=f"'{data.class_names[names[own[place]]]}', taken for '{data.class_names[names[taken[place]]]}'",
            )
            for place in worst[:MOST_OFFENDERS].tolist()
        ],
        num_offenders=len(suspects),
    )


def _out_of_fold(inputs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the probability of each class for each example, from a model trained without it: (n, classes)."""
    # Imported here, because it takes seconds that only this check needs.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # An approximate solution is good enough.
        found: npt.NDArray[np.float64] = cross_val_predict(model, inputs, labels, cv=folds, method="predict_proba")
    return found


def _inputs(data: Data, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return a feature as a row of numbers for each example, float32 (n, columns)."""
    feature, array = data.prepared.features[name], data.array("train", name)
    if feature.kind == "image":
        look = Look(*feature.shape[:2])
        parts = [look.waves(greys(array[rows[first : first + 512]])) for first in range(0, len(rows), 512)]
        return np.concatenate(parts)
    values = array[rows]
    if feature.kind == "number":
        return np.asarray(values[:, :MOST_COLUMNS], np.float32)
    if feature.kind == "text":
        frequent = np.argsort(-np.bincount(values.ravel(), minlength=2)[2:], kind="stable")[:MOST_COLUMNS] + 2
        return np.stack([(values == word).any(axis=1) for word in frequent], axis=1).astype(np.float32)
    each = max(2, MOST_COLUMNS // values.shape[1])
    columns = []
    for column in values.T:
        frequent = np.argsort(-np.bincount(column), kind="stable")[:each]
        columns.append(column[:, np.newaxis] == frequent)
    return np.concatenate(columns, axis=1).astype(np.float32)


CHECK = Check(_find, threshold=0.01, action="off")

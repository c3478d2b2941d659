"""Permutation importance: how much worse the gate's metric becomes if one column of a table is shuffled.

Sources: Breiman, Random Forests (2001), section 10; Fisher, Rudin and Dominici, All Models are Wrong, but Many are
Useful (2019), for any model.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks.evaluation import evidence
from tasks.evaluation.slices import TestExamples
from tasks.records import ColumnImportance, PreparedDataset

REPEATS = 10
COLUMNS = 30
"""The most columns of a table that are shuffled: the first ones."""
ROWS, PLACES = 1000, 100_000
"""The most test rows of a repeat, and the most numbers, categories and words in them, to limit the time."""
DEVIATIONS = 2.262157
"""The two-sided 95% quantile of Student's t with 9 degrees of freedom."""


def is_measured(prepared: PreparedDataset) -> bool:
    """Return whether a dataset is a table of several columns without images, because an image model would take minutes
    for so many examples."""
    features = prepared.features.values()
    named = [column for feature in features for column in feature.columns]
    return len(named) > 1 and all(feature.kind != "image" for feature in features)


def measure(
    test: TestExamples,
    labels: npt.NDArray[Any],
    predict: Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[Any]],
    metric: str,
    of_predictions: evidence.Measure,
    better: Literal["higher", "lower"],
) -> tuple[ColumnImportance, ...]:
    """Return the importance of each column in descending order.

    Each repeat draws test rows with replacement and shuffles the values of each column among them, so the interval
    covers the randomness of both the test rows and the shuffling. ``predict`` takes features as prepared, each
    (n, *shape), and returns outputs, (n, num_outputs); ``metric`` is the name of ``of_predictions``.
    """
    sign = 1.0 if better == "higher" else -1.0
    places = sum(int(np.prod(array.shape[1:])) for array in test.arrays.values())
    count = min(len(labels), ROWS, max(PLACES // places, 1))
    generator = np.random.default_rng(0)
    columns = [
        (column, name, slice(first, first + width))
        for name in test.arrays
        for column, first, width in test.columns(name)
    ][:COLUMNS]
    lost = np.empty((REPEATS, len(columns)))
    for repeat in lost:
        rows, order = generator.integers(0, len(labels), count), generator.permutation(count)
        features = {name: np.asarray(array[rows]) for name, array in test.arrays.items()}
        whole = evidence.number(of_predictions(labels[rows], predict(features)))
        for number, (_, name, part) in enumerate(columns):
            shuffled = features[name].copy()
            shuffled[:, part] = shuffled[order, part]
            repeat[number] = whole - evidence.number(
                of_predictions(labels[rows], predict({**features, name: shuffled}))
            )
    lost = lost[np.isfinite(lost).all(axis=1)]  # A metric may be undefined where a repeat drew no example of a class.
    if len(lost) < 2:
        return ()
    means = sign * lost.mean(axis=0) + 0.0  # A zero has no sign.
    far = DEVIATIONS * lost.std(axis=0, ddof=1)
    return tuple(
        ColumnImportance(
            column=columns[place][0],
            metric=metric,
            value=float(means[place]),
            interval=(float(means[place] - far[place]), float(means[place] + far[place])),
        )
        for place in np.argsort(-means, kind="stable")
    )

"""Evidence: the interval of a metric, and whether one model is better than another by more than chance.

Plain functions of NumPy arrays. Resampling is seeded, so the same arrays give the same figures.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Labels: TypeAlias = npt.NDArray[Any]
"""For n examples: (n,) or (n, labels or numbers)."""
Outputs: TypeAlias = npt.NDArray[Any]
"""Outputs of a model for n examples: (n, num_outputs)."""
Measure: TypeAlias = Callable[[Labels, Outputs], float | None]
"""A metric: takes labels and outputs, returns a number; None or NaN where it is undefined."""
RESAMPLES = 1000
"""Resamples from which the percentiles of an interval are taken: at least 1,000 after Efron and Tibshirani (1993,
section 14.3)."""
# Resampled indices that are in memory at a time: 16 MB.
_CHUNK = 2_000_000


class Interval(NamedTuple):
    """An interval at a given confidence."""

    low: float
    high: float


class MetricDifference(NamedTuple):
    """By how much one model is better than another on the same examples; below 0 it is worse."""

    value: float
    interval: Interval
    """Two-sided."""
    p_value: float
    """One-sided: the probability of a value as large if the model is no better."""


def interval_of_mean(
    values: npt.NDArray[Any], confidence: float = 0.95, seed: int = 0, num_resamples: int = RESAMPLES
) -> Interval:
    """Return the bootstrap interval of a metric that is the mean of one value per example, (n,), such as accuracy: the
    percentiles of its values for as many examples drawn with replacement.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    return percentiles(_resampled_means(values, seed, num_resamples), confidence)


def mcnemar(right_before: npt.NDArray[np.bool_], right_after: npt.NDArray[np.bool_]) -> float:
    """Return the one-sided p-value of McNemar's exact test: is a model right more often than the previous one?

    With b examples that only the previous model gets right and c that only this one does, it is P(X >= c), X binomial
    of b + c tries at 1/2; 1 where there are none.

    Args:
        right_before: whether the previous model is right, bool (n,).
        right_after: whether this model is right, bool (n,), on the same examples.

    Source: McNemar, Psychometrika 12 (1947), 153-157; exact after Dietterich, Neural Computation 10 (1998), 1895-1923.
    """
    from scipy.special import bdtrc

    lost = int((right_before & ~right_after).sum())
    won = int((right_after & ~right_before).sum())
    # The tail above won - 1, which scipy.special has without scipy.stats, whose import takes a second of a processor.
    return float(bdtrc(won - 1, won + lost, 0.5)) if won else 1.0


def paired_bootstrap(
    measure: Measure,
    labels: Labels,
    before: Outputs,
    after: Outputs,
    better: Literal["higher", "lower"] = "higher",
    confidence: float = 0.95,
    seed: int = 0,
    num_resamples: int = RESAMPLES,
) -> MetricDifference:
    """Return by how much a metric is better for a model than for the previous one, on the same resampled examples.

    The p-value is the share of resamples in which the model is no better, counting the sample itself as one of these
    (Davison and Hinkley 1997, section 4.2.3), and resamples for which the metric is undefined.

    Args:
        measure: the metric.
        labels: of n examples.
        before: the outputs of the previous model, (n, num_outputs).
        after: the outputs of this model.
        better: whether higher or lower values of the metric are better.
        confidence: of the interval.
        seed: of the resamples.
        num_resamples: how many there are.

    Source: Efron and Tibshirani (1993), sections 13.3 and 16.4; for paired models Efron, Annals of Statistics 7 (1979).
    """
    sign = 1.0 if better == "higher" else -1.0

    def difference(rows: Any) -> float:
        was, now = measure(labels[rows], before[rows]), measure(labels[rows], after[rows])
        return sign * (number(now) - number(was))

    generator, count = np.random.default_rng(seed), len(labels)
    found = np.array([difference(generator.integers(0, count, count)) for _ in range(num_resamples)])
    return _difference(difference(slice(None)), found, confidence)


def paired_means(
    before: npt.NDArray[Any],
    after: npt.NDArray[Any],
    better: Literal["higher", "lower"] = "higher",
    confidence: float = 0.95,
    seed: int = 0,
    num_resamples: int = RESAMPLES,
) -> MetricDifference:
    """Return the same as ``paired_bootstrap``, but faster, for a metric that is a mean over the examples, (n,)."""
    gains = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    gains = gains if better == "higher" else -gains
    return _difference(float(gains.mean()), _resampled_means(gains, seed, num_resamples), confidence)


def _difference(value: float, resampled: npt.NDArray[np.float64], confidence: float) -> MetricDifference:
    no_better = int((~(resampled > 0)).sum())
    return MetricDifference(value, percentiles(resampled, confidence), (no_better + 1) / (len(resampled) + 1))


def number(value: float | None) -> float:
    """Return a metric's value, NaN if it is undefined."""
    return float("nan") if value is None else float(value)


def percentiles(found: npt.NDArray[np.float64], confidence: float) -> Interval:
    """Return the interval between the tails of values; NaN is left out."""
    found = found[~np.isnan(found)]
    if not len(found):
        return Interval(float("nan"), float("nan"))
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _resampled_means(values: npt.NDArray[Any], seed: int, num_resamples: int) -> npt.NDArray[np.float64]:
    """Return the mean of each resample of values (n,): (num_resamples,)."""
    values = np.asarray(values, np.float64)
    generator, count = np.random.default_rng(seed), len(values)
    distinct, numbers = np.unique(values, return_counts=True)
    if len(distinct) <= 100:
        # How often each value is drawn is multinomial: no example need be drawn by itself.
        drawn = generator.multinomial(count, numbers / count, num_resamples)
        means: npt.NDArray[np.float64] = drawn @ distinct / count
        return means
    num_together = max(1, _CHUNK // count)
    parts = [
        values[generator.integers(0, count, (min(num_together, num_resamples - first), count))].mean(axis=1)
        for first in range(0, num_resamples, num_together)
    ]
    return np.concatenate(parts)

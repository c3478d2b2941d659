"""Statistical tests of whether one model is better than another.

Pure functions of NumPy arrays. Resampling is seeded, so the same arrays give the same numbers.
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
"""The number of resamples for the percentiles of an interval: at least 1,000 after Efron and Tibshirani (1993,
section 14.3)."""


class Interval(NamedTuple):
    """An interval at a given confidence."""

    low: float
    high: float


class MetricDifference(NamedTuple):
    """The improvement of one model over another on the same examples; negative if it is worse."""

    value: float
    interval: Interval
    """Two-sided."""
    p_value: float
    """One-sided: the probability of at least this value if the model is no better."""


def mcnemar(right_before: npt.NDArray[Any], right_after: npt.NDArray[Any]) -> float:
    """Return the one-sided p-value of McNemar's exact test: is a model right more often than the previous one?

    If only the previous model is right on b examples and only this model on c, it is P(X >= c) for X binomial with
    b + c trials and probability 1/2; 1 if c is 0.

    Args:
        right_before: whether the previous model is right, bool (n,).
        right_after: whether this model is right, bool (n,), on the same examples.

    Source: McNemar, Psychometrika 12 (1947), 153-157; exact after Dietterich, Neural Computation 10 (1998), 1895-1923.
    """
    from scipy.special import bdtrc

    lost = int((right_before & ~right_after).sum())
    won = int((right_after & ~right_before).sum())
    # The tail above won - 1, from scipy.special, because importing scipy.stats takes a second of CPU time.
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
    """Return the improvement of a metric over the previous model, on the same resampled examples.

    The p-value is the share of resamples in which the model is no better, including the sample itself (Davison and
    Hinkley 1997, section 4.2.3) and resamples for which the metric is undefined. ``before`` holds the outputs of the
    previous model for the examples of ``labels``, ``after`` those of this model.

    Source: Efron and Tibshirani (1993), sections 13.3 and 16.4; for paired models Efron, Annals of Statistics 7 (1979).
    """
    sign = 1.0 if better == "higher" else -1.0

    def difference(rows: Any) -> float:
        was, now = measure(labels[rows], before[rows]), measure(labels[rows], after[rows])
        return sign * (number(now) - number(was))

    generator, count = np.random.default_rng(seed), len(labels)
    found = np.array([difference(generator.integers(0, count, count)) for _ in range(num_resamples)])
    no_better = int((~(found > 0)).sum())
    found = found[~np.isnan(found)]
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2]) if len(found) else (np.nan, np.nan)
    value, p_value = difference(slice(None)), (no_better + 1) / (num_resamples + 1)
    return MetricDifference(value, Interval(float(low), float(high)), p_value)


def number(value: float | None) -> float:
    """Return a metric's value, NaN if it is undefined."""
    return float("nan") if value is None else float(value)

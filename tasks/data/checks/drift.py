"""The largest Jensen-Shannon distance of any column from the previous data version, from 0 to 1.

Columns are classes, brightness and contrast of images, numbers, categories and words; see ``apart``.
"""

import numpy as np
import numpy.typing as npt

from tasks.data.checks import Check, Data, Found, Offender
from tasks.records import ColumnStatistics
from tasks.system import units

CHANCE = 0.001
"""Differences with at least this p-value count as 0."""


def _find(data: Data) -> Found:
    if data.before is None:
        return Found(0.0, "there is no previous data version")
    found = []
    for split, columns in data.statistics.splits.items():
        for name, before in data.before.splits.get(split, {}).items():
            if name in columns and columns[name] != before:
                distance, words = apart(before, columns[name])
                found.append((distance, split, name, words))
    found.sort(key=lambda one: -one[0])
    if not found or not found[0][0]:
        return Found(0.0, "no column differs from the previous data version by more than chance")
    distance, split, name, words = found[0]
    return Found(
        value=distance,
        text=f"{name} of {split} is {distance:.2f} away from the previous data version ({words})",
        offenders=[
            Offender(name=name, split=split, note=f"{split}, {distance:.2f}: {words}")
            for distance, split, name, words in found
            if distance
        ],
    )


def apart(before: ColumnStatistics, now: ColumnStatistics) -> tuple[float, str]:
    """Return the distance of two distributions of a column, from 0 to 1, and the largest difference in words.

    It is the Jensen-Shannon distance to the base 2 (J. Lin, Divergence Measures Based on the Shannon Entropy, 1991; the
    distance is its root, D. Endres and J. Schindelin, A New Metric for Probability Distributions, 2003). Classes,
    categories and words are compared by frequency, numbers by their frequency between the previous deciles. The
    distance is 0 if Pearson's chi-square test does not reject that both are samples of the same data.
    """
    # Imported here, because it takes 0.4 s of CPU time that only changed data need.
    from scipy.spatial.distance import jensenshannon
    from scipy.stats import chi2_contingency

    shares = _binned(before, now) if before.quantiles and now.quantiles else _frequencies(before, now)
    shares = shares[:, shares.any(axis=0)]
    if shares.shape[1] < 2 or not shares.any(axis=1).all():
        return 0.0, ""
    distance = float(jensenshannon(shares[0], shares[1], base=2))
    counts = shares * [[before.num_values], [now.num_values]]
    if not np.isfinite(distance) or chi2_contingency(counts).pvalue >= CHANCE:
        return 0.0, ""
    return distance, _words(before, now)


def _frequencies(before: ColumnStatistics, now: ColumnStatistics) -> npt.NDArray[np.float64]:
    """Return the share of each value, (2, values)."""
    names = before.counts | now.counts
    counts = np.array([[one.counts.get(name, 0) for name in names] for one in (before, now)], np.float64)
    shares: npt.NDArray[np.float64] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _binned(before: ColumnStatistics, now: ColumnStatistics) -> npt.NDArray[np.float64]:
    """Return the share of the values below, at and between the previous deciles, (2, bins)."""
    edges = np.unique(before.quantiles[10:100:10])
    shares = []
    for one in (before, now):
        quantiles = np.array(one.quantiles)
        first, last = (np.searchsorted(quantiles, edges, side) for side in ("left", "right"))
        # An edge between two quantiles counts as their middle; an edge that equals several has their share.
        below = np.where(first == last, first - 0.5, first) / 100
        up_to = np.where(first == last, last - 0.5, last - 1) / 100
        ends = np.clip(np.stack([below, up_to], axis=1).ravel(), 0, 1)
        shares.append(np.diff(ends, prepend=0, append=1))
    return np.array(shares)


def _words(before: ColumnStatistics, now: ColumnStatistics) -> str:
    """Return the difference in words: the mean, with Cohen's d, or the value whose share changed most."""
    if before.mean is not None and now.mean is not None and before.deviation is not None and now.deviation is not None:
        pooled = np.sqrt((before.deviation**2 + now.deviation**2) / 2)
        size = f", Cohen's d {(now.mean - before.mean) / pooled:+.2f}" if pooled else ""
        return f"mean {units.number(before.mean, 4)} -> {units.number(now.mean, 4)}{size}"
    shares = _frequencies(before, now)
    place = int(np.abs(shares[1] - shares[0]).argmax())
    name = list(before.counts | now.counts)[place]
    return f"'{name}' {shares[0, place]:.1%} -> {shares[1, place]:.1%}"


CHECK = Check(_find, threshold=0.1)

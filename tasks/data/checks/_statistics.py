"""How each column is distributed, and how far two distributions are apart."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tasks.data import quality_report
from tasks.data.checks._data import Data
from tasks.records import ColumnStatistics, DataStatistics

MOST_ROWS = 100_000
"""Of a split's numbers, so many rows tell the quantiles, evenly spread."""
MOST_COLUMNS = 100
"""Of a feature of numbers: more, as of an image laid flat, would say the same a hundred times."""
MOST_COUNTED = 1000
OTHERS = "(others)"
CHANCE = 0.001
"""A difference that is as likely between two samples of the same data is none."""


def statistics(data: Data) -> DataStatistics:
    """Return the statistics of all splits."""

    def make() -> DataStatistics:
        return DataStatistics(
            arrays=quality_report.arrays_of(data.prepared),
            splits={split: dict(_columns(data, split)) for split in data.rows if len(data.rows[split])},
        )

    found: DataStatistics = data.cached(("statistics",), make)
    return found


def _columns(data: Data, split: str) -> Iterator[tuple[str, ColumnStatistics]]:
    target, part = data.prepared.target, data.prepared.splits[split]
    if target.class_names:
        yield "class", _counted(Counter(dict(zip(target.class_names, part.class_counts, strict=True))))
    else:
        names = target.columns or [f"label {number}" for number in range(target.num_outputs)]
        yield from _numbers(names, data.labels(split)[data.rows[split]])
    for name in data.features("image"):
        looks = data.looks(split, name)
        yield from _numbers(
            [f"{name} brightness", f"{name} contrast"], np.stack([looks.brightness, looks.contrast], axis=1)
        )
    for name in data.features("number"):
        yield from _numbers(data.columns(name), _some_rows(data, split, name))
    for name in data.features("category", "text"):
        texts = data.vocabulary(name)
        is_text = data.prepared.features[name].kind == "text"
        counts = [np.zeros(len(own), np.int64) for own in texts]
        for block in data.blocks(split, name):
            for number, own in enumerate(counts):
                values = block if is_text else block[:, number]
                own += np.bincount(values.ravel(), minlength=len(own))
        for column, own, known in zip([name] if is_text else data.columns(name), counts, texts, strict=True):
            first = 1 if is_text else 0  # The rest of a short text is not a word.
            yield column, _counted(Counter(dict(zip(known[first:], own[first:].tolist(), strict=True))))


def _some_rows(data: Data, split: str, name: str) -> npt.NDArray[np.generic]:
    """Return the first columns of ``MOST_ROWS`` evenly spread rows of a feature of numbers, or of all."""
    every, first, found = 1 + (len(data.rows[split]) - 1) // MOST_ROWS, 0, []
    for block in data.blocks(split, name):
        found.append(block[-first % every :: every, :MOST_COLUMNS].copy())  # A view would keep all of the block.
        first += len(block)
    return np.concatenate(found)


def _numbers(
    names: list[str] | tuple[str, ...], values: npt.NDArray[np.generic]
) -> Iterator[tuple[str, ColumnStatistics]]:
    """Yield the statistics of each column of numbers, (n, columns)."""
    some = values[:, :MOST_COLUMNS].astype(np.float64)
    # Of numbers in their order they are found in a third of the time.
    ordered = np.sort(some.T.copy(), axis=1)
    quantiles = np.quantile(ordered, np.linspace(0, 1, 101), axis=1)
    for name, own, column in zip(names, quantiles.T, some.T, strict=False):
        yield (
            name,
            ColumnStatistics(
                num_values=len(column),
                mean=float(column.mean()),
                deviation=float(column.std()),
                quantiles=tuple(float(f"{value:.7g}") for value in own),
            ),
        )


def _counted(counts: Counter[str]) -> ColumnStatistics:
    most = dict(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MOST_COUNTED])
    total = counts.total()
    others = {OTHERS: rest} if (rest := total - sum(most.values())) else {}
    return ColumnStatistics(num_values=total, counts=most | others)


def apart(before: ColumnStatistics, now: ColumnStatistics) -> tuple[float, str]:
    """Return how far two distributions of a column are apart, from 0 to 1, and what differs most, in words.

    It is the Jensen-Shannon distance to the base 2 (J. Lin, Divergence Measures Based on the Shannon Entropy, 1991; the
    distance is its root, D. Endres and J. Schindelin, A New Metric for Probability Distributions, 2003): of classes,
    categories and words by their frequencies, of numbers by those between the earlier deciles. It is 0 where
    Pearson's chi-square test finds such a difference likely between two samples of the same data.
    """
    # Here and not above: 0.4 s of a processor, which only data that have changed cost.
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
    """Return the share of the values below, at and between the earlier deciles, (2, bins)."""
    edges = np.unique(before.quantiles[10:100:10])
    shares = []
    for one in (before, now):
        quantiles = np.array(one.quantiles)
        first, last = (np.searchsorted(quantiles, edges, side) for side in ("left", "right"))
        # An edge that is not a quantile lies in the middle of two; one that is several has that share itself.
        below = np.where(first == last, first - 0.5, first) / 100
        up_to = np.where(first == last, last - 0.5, last - 1) / 100
        ends = np.clip(np.stack([below, up_to], axis=1).ravel(), 0, 1)
        shares.append(np.diff(ends, prepend=0, append=1))
    return np.array(shares)


def _words(before: ColumnStatistics, now: ColumnStatistics) -> str:
    """Return what differs: the mean, with Cohen's d, or the value whose share changed most."""
    if before.mean is not None and now.mean is not None and before.deviation is not None and now.deviation is not None:
        pooled = np.sqrt((before.deviation**2 + now.deviation**2) / 2)
        size = f", Cohen's d {(now.mean - before.mean) / pooled:+.2f}" if pooled else ""
        return f"mean {before.mean:.4g} -> {now.mean:.4g}{size}"
    shares = _frequencies(before, now)
    place = int(np.abs(shares[1] - shares[0]).argmax())
    name = list(before.counts | now.counts)[place]
    return f"'{name}' {shares[0, place]:.1%} -> {shares[1, place]:.1%}"

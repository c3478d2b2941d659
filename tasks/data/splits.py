"""Divides examples into training, validation and test splits: by class, by whole groups, or by time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.system.errors import UserError

NAMES = ("train", "validation", "test")
WORDS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
"""Words, in lowercase, that name a split in a folder or in a split column."""
EXAMPLES, GROUPS = 2, 3
"""What is drawn: the last word of Philox' counter."""
Rows = npt.NDArray[np.int64]
Parts = dict[str, Rows]


def random_words(total: int, seed: int, what: int = EXAMPLES) -> npt.NDArray[np.uint64]:
    """Return a random word for each of ``total`` examples or groups, uint64 (total,): always the same ones.

    The examples with the smallest words are drawn, because NumPy guarantees that the words of a bit generator never
    change, but does not guarantee it for permutations.
    """
    return np.random.Philox(key=[seed, 0], counter=[0, 0, 0, what]).random_raw(total)


def smallest_of_each(labels: Rows, words: npt.NDArray[Any], shares: Rows) -> npt.NDArray[np.bool_]:
    """Return which examples have the smallest words of their class, ``shares`` examples of each class: bool (n,)."""
    # Sorting small integers takes a third of the time.
    by_class = np.argsort(labels.astype(np.min_scalar_type(len(shares))), kind="stable")
    chosen = np.zeros(len(labels), bool)
    ends = np.cumsum(np.bincount(labels, minlength=len(shares)))[:-1]
    for own, share in zip(np.split(by_class, ends), shares.tolist(), strict=True):
        chosen[own[np.argpartition(words[own], share)[:share]] if share < len(own) else own] = True
    return chosen


def counts_of(dataset: config.LocalDescription, total: int, splits: Sequence[str]) -> dict[str, int]:
    """Return the number of examples of these splits.

    Raises:
        UserError: no training examples would be left.
    """
    wanted = {name: getattr(dataset, name) for name in splits}
    counts = {
        name: count if isinstance(count, int) else max(1, round(total * count))
        for name, count in wanted.items()
        if count is not None
    }
    if sum(counts.values()) >= total:
        named = " and ".join(f"dataset.{name} = {share}" for name, share in wanted.items())
        raise UserError(
            f"{named}: {'they take' if len(wanted) > 1 else 'takes'} "
            f"{sum(counts.values())} of the {total} examples, but at least one must remain for training "
            f"(dataset.source = '{dataset.source}')"
        )
    return counts


def split_rows(labels: Rows, names: Sequence[str], dataset: config.LocalDescription) -> Parts:
    """Return the rows of the training and of the test split, see ``by_class``."""
    return by_class(labels, names, dataset, counts_of(dataset, len(labels), ["test"]))


def by_class(
    labels: Rows,
    names: Sequence[str],
    dataset: config.LocalDescription,
    counts: Mapping[str, int],
    named_target: str = "",
) -> Parts:
    """Return the rows of each split, ascending: int64 (n,) each.

    Every class contributes the same share to a split, at least one example but never all, so that the class frequencies
    of all splits agree. The same labels and seed always give the same rows.

    Args:
        labels: the class of each example, integers (n,).
        dataset: its ``seed`` chooses the rows.
        counts: the sizes of the test and the validation split, unless they are not drawn.
        named_target: the column of the classes, for the message.

    Raises:
        UserError: a class has fewer than two examples.
    """
    left, parts = np.ones(len(labels), bool), {}
    # Each split has its own seed, because the first rows of both draws would have the same words.
    for seed, name in enumerate(("test", "validation"), dataset.seed):
        if name not in counts:
            continue
        own = labels[left]
        sizes = np.bincount(own, minlength=len(names))
        if (few := np.flatnonzero(sizes < 2)).size:
            hint = f". {few.size:,} of {len(names):,} classes have too few" if few.size > 1 else ""
            if getattr(dataset, "task", None) == "auto" and names[few[0]].isdecimal():
                hint += ". If the labels are quantities: --set dataset.task=regression"
            raise UserError(
                f"dataset.source = '{dataset.source}'{named_target}: the class '{names[few[0]]}' has too few examples "
                f"({sizes[few[0]]}): it needs one to train on and one to test on. Add some, or leave the class "
                f"out{hint}"
            )
        exact = sizes * (counts[name] / len(own))
        shares = np.floor(exact).astype(np.int64)
        # The classes with the largest rounding errors get the remaining examples.
        shares[np.argsort(shares - exact, kind="stable")[: counts[name] - shares.sum()]] += 1
        held = smallest_of_each(own, random_words(len(own), seed), np.clip(shares, 1, sizes - 1))
        parts[name] = np.flatnonzero(left)[held]
        left[parts[name]] = False
    return parts | {"train": np.flatnonzero(left)}


def by_group(groups: Rows, seed: int, counts: Mapping[str, int]) -> Parts:
    """Return the rows of whole groups, drawn with the seed, whose sizes are closest to the counts.

    Args:
        groups: the group of each row, numbered from 0 without gaps, int64 (n,), with more groups than counts.
        counts: the size of each split except the training split.
    """
    sizes = np.bincount(groups)
    order = np.argsort(random_words(len(sizes), seed, GROUPS), kind="stable")
    parts, first = {}, 0
    for place, (name, count) in enumerate(counts.items()):
        sums = np.cumsum(sizes[order][first:])
        # Leave one group for each later split.
        most = len(order) - first - (len(counts) - place)
        taken = int(np.abs(sums[:most] - count).argmin()) + 1
        parts[name] = np.flatnonzero(np.isin(groups, order[first : first + taken]))
        first += taken
    parts["train"] = np.flatnonzero(np.isin(groups, order[first:]))
    return parts


def by_time(times: npt.NDArray[np.float64], counts: Mapping[str, int]) -> Parts:
    """Return the newest rows for one split, and the next older ones for the next; rows of the same time stay together.

    Raises:
        ValueError: no training rows are left; its arguments are the split and the count.
    """
    ordered = np.sort(times)
    parts, last = {}, len(times)
    for name, count in counts.items():
        first = int(np.searchsorted(ordered, ordered[max(last - count, 0)]))
        if not 0 < first < last:
            raise ValueError(name, count)
        upper = ordered[last] if last < len(times) else np.inf
        parts[name] = np.flatnonzero((times >= ordered[first]) & (times < upper))
        last = first
    parts["train"] = np.flatnonzero(times < ordered[last])
    return parts

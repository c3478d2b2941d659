"""The share of examples that are nearly another one, of any split, and not equal to the byte.

Nearly equal are images that look alike (``_hashes``), texts of the same known words in another order or number, and
numbers that are equal to a ten-thousandth of their deviation.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import CLOSE, MOST_PAIRS, correlation, equal_to_earlier, greys, of_rows, pairs
from tasks.records import Feature

FEWEST_WORDS = 3
FEWEST_NUMBERS = 3
"""With fewer, rows are near each other by chance."""
PAIRS_AT_ONCE = 1024


def _find(data: Data) -> Found:
    digests = data.all_of(data.digests)
    keys = data.all_of(lambda split: _keys(data, split))
    images, was_cut = data.features("image"), False
    if images:
        near, was_cut = _look_alike(data, images, keys)
    else:
        can = np.flatnonzero(keys)
        later, first = equal_to_earlier(keys[can])
        near = np.stack([can[first], can[later]], axis=1)
    near = near[digests[near[:, 0]] != digests[near[:, 1]]]
    _, kept = np.unique(near[:, 1], return_index=True)  # An example counts once, with the first that it is like.
    again, twins = data.where(near[kept, 1]), data.where(near[kept, 0])
    across = [place for place, pair in enumerate(zip(again, twins, strict=True)) if pair[0][0] != pair[1][0]]
    order = [*across, *sorted(set(range(len(again))) - set(across))]
    return Found(
        value=len(again) / max(1, data.num_rows),
        text=f"{len(again):,} of {data.num_rows:,} examples are nearly another one, {len(across):,} of them one of "
        f"another split{f' (the first {MOST_PAIRS:,} pairs were compared)' if was_cut else ''}",
        offenders=offenders(data, [again[place] for place in order], [twins[place] for place in order]),
        num_offenders=len(again),
    )


def _keys(data: Data, split: str) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each example of a split, equal where all that is not an image is nearly equal: uint64 (rows,).

    Without images, an example that has too little to tell by has 0.
    """
    total, can = np.zeros(len(data.rows[split]), np.uint64), np.zeros(len(data.rows[split]), bool)
    for number, (name, feature) in enumerate(data.prepared.features.items()):
        first = 0
        if feature.kind == "image":
            continue
        for hashes, are_enough in data.of_blocks(split, name, partial(_keys_of_block, feature=feature, salt=number)):
            own = slice(first, first := first + len(hashes))
            total[own] += hashes
            can[own] |= are_enough
    return total if data.features("image") else np.where(can, total | np.uint64(1), np.uint64(0))


def _keys_of_block(
    block: npt.NDArray[Any], feature: Feature, salt: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return 64 bits for each row of a feature that is not an image, and which rows have enough to tell by."""
    are_enough = np.zeros(len(block), bool)
    if feature.kind == "number":
        finest = np.maximum(np.array(feature.deviation or (1.0,)) * 1e-4, 1e-30)
        block = np.rint((block - np.array(feature.mean or (0.0,))) / finest)
        are_enough[:] = block.shape[1] >= FEWEST_NUMBERS
    elif feature.kind == "text":
        block = np.sort(np.where(block == 1, 0, block), axis=1)
        block[:, 1:][block[:, 1:] == block[:, :-1]] = 0  # Each word once.
        block.sort(axis=1)
        are_enough = (block > 1).sum(axis=1) >= FEWEST_WORDS
    return of_rows(block, salt), are_enough


def _look_alike(data: Data, images: list[str], keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], bool]:
    """Return pairs of examples whose images look alike, the smaller place first, and whether there were too many."""
    looks = [data.looks(split, images[0]) for split in data.rows]
    hashes, coarse = (np.concatenate([one[part] for one in looks]) for part in (0, 1))
    can = np.flatnonzero(np.concatenate([one.contrast for one in looks]) > 0)
    near, was_cut = pairs(hashes[can], coarse[can])
    found = can[near]
    found = found[keys[found[:, 0]] == keys[found[:, 1]]]
    for name in images:
        close = [
            _correlations(data, name, found[first : first + PAIRS_AT_ONCE]) >= CLOSE
            for first in range(0, len(found), PAIRS_AT_ONCE)
        ]
        found = found[np.concatenate(close)] if close else found
    return found, was_cut


def _correlations(data: Data, name: str, some: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    each, places = np.unique(some, return_inverse=True)
    grey = greys(data.gather(name, each))
    places = places.reshape(some.shape)
    return correlation(grey[places[:, 0]], grey[places[:, 1]])


CHECK = Check(_find, threshold=0.0)

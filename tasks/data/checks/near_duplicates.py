"""The share of examples whose images are similar but not equal to those of another example, in any split.

See ``_hashes`` for the definition of similar.
"""

import numpy as np
import numpy.typing as npt

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import CLOSE, MOST_PAIRS, correlation, greys, pairs

PAIRS_AT_ONCE = 1024


def _find(data: Data) -> Found:
    images = data.features("image")
    if not images:
        return Found(0.0, "there are no images")
    digests = np.concatenate([*data.digests.values()])
    near, was_cut = _look_alike(data, images)
    near = near[digests[near[:, 0]] != digests[near[:, 1]]]
    _, kept = np.unique(near[:, 1], return_index=True)  # An example counts once, with its first twin.
    again, twins = data.where(near[kept, 1]), data.where(near[kept, 0])
    across = [place for place, pair in enumerate(zip(again, twins, strict=True)) if pair[0][0] != pair[1][0]]
    order = [*across, *sorted(set(range(len(again))) - set(across))]
    return Found(
        value=len(again) / max(1, data.num_rows),
        text=f"{len(again):,} of {data.num_rows:,} examples look like another one, {len(across):,} of them like one "
        f"of another split{f' (the first {MOST_PAIRS:,} pairs were compared)' if was_cut else ''}",
        offenders=offenders(data, [again[place] for place in order], [twins[place] for place in order]),
        num_offenders=len(again),
    )


def _look_alike(data: Data, images: list[str]) -> tuple[npt.NDArray[np.int64], bool]:
    """Return pairs of examples with similar images, the smaller place first, and whether there were too many."""
    looks = data.looks[images[0]].values()
    hashes, coarse = (np.concatenate([one[part] for one in looks]) for part in (0, 1))
    can = np.flatnonzero(np.concatenate([one.contrast for one in looks]) > 0)
    near, was_cut = pairs(hashes[can], coarse[can])
    found = can[near]
    for name in images:
        close = [
            _correlations(data, name, found[first : first + PAIRS_AT_ONCE]) >= CLOSE
            for first in range(0, len(found), PAIRS_AT_ONCE)
        ]
        found = found[np.concatenate(close)] if close else found
    return found, was_cut


def _correlations(data: Data, name: str, some: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    each, places = np.unique(some, return_inverse=True)
    grey = greys(data.gather(name, each)).reshape(len(each), -1).astype(np.float32)
    places = places.reshape(some.shape)
    return correlation(grey[places[:, 0]], grey[places[:, 1]])


CHECK = Check(_find, threshold=0.0)

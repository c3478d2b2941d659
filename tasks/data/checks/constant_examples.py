"""The share of examples without information: an image of one colour, a text without a known word, or equal numbers.

Broken images and numbers that are not finite never become examples: the kind of dataset rejects them.
"""

import numpy as np
import numpy.typing as npt

from tasks.data.checks import Check, Data, Found, offenders


def _find(data: Data) -> Found:
    is_constant = np.concatenate([_constant(data, split) for split in data.rows])
    places = data.where(np.flatnonzero(is_constant))
    return Found(
        value=len(places) / max(1, data.num_rows),
        text=f"{len(places):,} of {data.num_rows:,} examples are empty (one colour, no known word, equal numbers)",
        offenders=offenders(data, places),
        num_offenders=len(places),
    )


def _constant(data: Data, split: str) -> npt.NDArray[np.bool_]:
    """Return which examples of a split have no information in any feature, bool (rows,)."""
    found = np.ones(len(data.rows[split]), bool)
    for name in data.features("image"):
        found &= data.looks[name][split].contrast == 0
    for name in data.features("number", "category", "text"):
        first, constant = 0, np.zeros(len(found), bool)
        for block in data.blocks(split, name):
            if data.prepared.features[name].kind == "number":  # A single number always has information.
                own = (block[:, 0] == block[:, -1]) & (block.shape[1] > 1)
                own[own] = (block[own] == block[own, :1]).all(axis=1)  # Few rows are left.
            else:  # 0 means missing, 1 means that the training split does not have the value.
                own = (block <= 1).all(axis=1)
            constant[first : first + len(own)] = own
            first += len(own)
        found &= constant
    return found


CHECK = Check(_find, threshold=0.0)

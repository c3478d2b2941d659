"""The share of validation and test examples that exactly repeat an example of an earlier split.

The model is then evaluated on its training examples (S. Kapoor, A. Narayanan, Leakage and the Reproducibility Crisis in
Machine-Learning-Based Science, 2023).
"""

import numpy as np

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import equal_to_earlier


def _find(data: Data) -> Found:
    later, first = equal_to_earlier(np.concatenate([*data.digests.values()]))
    pairs = [pair for pair in zip(data.where(later), data.where(first), strict=True) if pair[0][0] != pair[1][0]]
    measured = data.num_rows - len(data.rows.get("train", ()))
    return Found(
        value=len(pairs) / max(1, measured),
        text=f"{len(pairs):,} of the {measured:,} validation and test examples repeat one of an earlier split",
        offenders=offenders(data, [again for again, _ in pairs], [twin for _, twin in pairs]),
        num_offenders=len(pairs),
    )


CHECK = Check(_find, threshold=0.0)

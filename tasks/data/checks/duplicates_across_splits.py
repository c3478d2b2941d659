"""The share of the examples of validation and test that are, to the byte, one of a split before.

A model is then measured on what it was trained on (S. Kapoor, A. Narayanan, Leakage and the Reproducibility Crisis in
Machine-Learning-Based Science, 2023).
"""

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import equal_to_earlier


def _find(data: Data) -> Found:
    later, first = equal_to_earlier(data.all_of(data.digests))
    pairs = [pair for pair in zip(data.where(later), data.where(first), strict=True) if pair[0][0] != pair[1][0]]
    measured = data.num_rows - len(data.rows.get("train", ()))
    return Found(
        value=len(pairs) / max(1, measured),
        text=f"{len(pairs):,} of the {measured:,} examples to measure with are those of an earlier split",
        offenders=offenders(data, [again for again, _ in pairs], [twin for _, twin in pairs]),
        num_offenders=len(pairs),
    )


CHECK = Check(_find, threshold=0.0)

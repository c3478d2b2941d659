"""The share of examples that exactly repeat another one in the same split, possibly with another label."""

import numpy as np

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import equal_to_earlier


def _find(data: Data) -> Found:
    again, twins, others = [], [], []
    for split, rows in data.rows.items():
        later, first = equal_to_earlier(data.digests[split])
        labels = data.labels(split)
        differ = labels[rows[later]] != labels[rows[first]]
        others.append(differ.any(axis=tuple(range(1, labels.ndim))))
        again += [(split, row) for row in rows[later].tolist()]
        twins += [(split, row) for row in rows[first].tolist()]
    other = np.concatenate(others)
    order = np.argsort(~other, kind="stable").tolist()  # Examples with two labels are the worst.
    return Found(
        value=len(again) / max(1, data.num_rows),
        text=f"{len(again):,} of {data.num_rows:,} examples repeat one of the same split, {other.sum():,} of them "
        "with another label",
        offenders=offenders(data, [again[place] for place in order], [twins[place] for place in order]),
        num_offenders=len(again),
    )


CHECK = Check(_find, threshold=0.0)

"""The share of examples that are, to the byte, one of the same split again. What it teaches may be another thing."""

import numpy as np

from tasks.data.checks import Check, Data, Found, offenders
from tasks.data.checks._hashes import equal_to_earlier


def _find(data: Data) -> Found:
    again, twins, others = [], [], []
    for split, rows in data.rows.items():
        later, first = equal_to_earlier(data.digests(split))
        labels = data.labels(split)[rows].reshape(len(rows), -1) if len(rows) else np.zeros((0, 1))
        others.append((labels[later] != labels[first]).any(axis=1))
        again += [(split, row) for row in rows[later].tolist()]
        twins += [(split, row) for row in rows[first].tolist()]
    other = np.concatenate(others)
    order = np.argsort(~other, kind="stable").tolist()  # Those that teach two things are the worst.
    return Found(
        value=len(again) / max(1, data.num_rows),
        text=f"{len(again):,} of {data.num_rows:,} examples are one of the same split again, {other.sum():,} of them "
        "with another label",
        offenders=offenders(data, [again[place] for place in order], [twins[place] for place in order]),
        num_offenders=len(again),
    )


CHECK = Check(_find, threshold=0.0)

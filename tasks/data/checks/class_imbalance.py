"""The imbalance ratio of the training split: the size of the largest class divided by that of the smallest.

Source: H. He, E. Garcia, Learning from Imbalanced Data, 2009. An empty class counts as one example.
"""

from tasks.data.checks import Check, Data, Found, Offender


def _find(data: Data) -> Found:
    train = data.prepared.splits.get("train")
    if train is None or not data.class_names:
        return Found(0.0, "there are no classes")
    counts = dict(zip(data.class_names, train.class_counts, strict=True))
    most, fewest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    rising = sorted(counts, key=lambda name: counts[name])
    ratio = counts[most] / max(1, counts[fewest])
    text = f"'{most}' has {counts[most]:,} examples to train on, {ratio:,.1f} times as many as '{fewest}'"
    if counts[most] == counts[fewest]:
        text = f"each class has {counts[most]:,} examples to train on"
    return Found(
        value=ratio,
        text=text,
        offenders=[
            Offender(name=name, split="train", note=f"{counts[name]:,} examples")
            for name in rising
            if counts[name] * 2 <= counts[most]
        ],
    )


CHECK = Check(_find, threshold=10.0)

"""How far any column is from what it was in the data version before, from 0 to 1: the largest Jensen-Shannon distance.

Columns are classes, brightness and contrast of images, numbers, categories and words; see ``_statistics.apart``.
"""

from tasks.data.checks import Check, Data, Found, Offender, statistics
from tasks.data.checks._statistics import apart


def _find(data: Data) -> Found:
    if data.before is None:
        return Found(0.0, "there is no data version before")
    found = []
    now = statistics(data).splits
    for split in [split for split in now if split in data.before.splits]:
        for name in [name for name in now[split] if name in data.before.splits[split]]:
            distance, words = apart(data.before.splits[split][name], now[split][name])
            found.append((distance, split, name, words))
    found.sort(key=lambda one: -one[0])
    if not found or not found[0][0]:
        return Found(0.0, "nothing differs from the data version before by more than chance")
    distance, split, name, words = found[0]
    return Found(
        value=distance,
        text=f"{name} of {split} is {distance:.2f} away from the data version before ({words})",
        offenders=[
            Offender(name=name, split=split, note=f"{split}, {distance:.2f}: {words}")
            for distance, split, name, words in found
            if distance
        ],
    )


CHECK = Check(_find, threshold=0.1)

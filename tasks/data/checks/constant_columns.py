"""The share of the columns of numbers and categories that have one value in all of the training split."""

import itertools

from tasks.data.checks import Check, Data, Found, Offender, statistics


def _find(data: Data) -> Found:
    names: dict[str, str] = {}
    for feature in data.features("number", "category"):
        names |= _first_places(data, feature)
    own = statistics(data).splits.get("train", {})
    columns = {place: column for place, column in own.items() if place in names}
    constant = [
        names[place]
        for place, column in columns.items()
        if (column.quantiles and column.quantiles[0] == column.quantiles[-1]) or len(_seen(column.counts)) == 1
    ]
    return Found(
        value=len(constant) / max(1, len(columns)),
        text=f"{len(constant)} of {len(columns)} columns have one value in all of the training split",
        offenders=[Offender(name=name) for name in constant],
    )


def _first_places(data: Data, feature: str) -> dict[str, str]:
    """Return what each column of a feature is called, by the name of its first place: of a datetime the days alone
    count, because without a time that of the day is midnight for all."""
    columns, places = data.prepared.features[feature].columns, data.columns(feature)
    if not columns:
        return {place: place for place in places}
    is_first = [number == 0 for column in columns for number in range(column.width)]
    return dict(zip(itertools.compress(places, is_first), (column.name for column in columns), strict=True))


def _seen(counts: dict[str, int]) -> list[str]:
    return [value for value, count in counts.items() if count]


CHECK = Check(_find, threshold=0.0)

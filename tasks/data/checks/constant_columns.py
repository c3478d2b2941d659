"""The share of numeric and categorical columns that have only one value in the training split."""

import itertools

from tasks.data.checks import Check, Data, Found, Offender


def _find(data: Data) -> Found:
    names: dict[str, str] = {}
    for feature in data.features("number", "category"):
        names |= _first_places(data, feature)
    own = data.statistics.splits.get("train", {})
    columns = {place: column for place, column in own.items() if place in names}
    constant = [
        names[place]
        for place, column in columns.items()
        if (column.quantiles and column.quantiles[0] == column.quantiles[-1])
        or sum(map(bool, column.counts.values())) == 1
    ]
    return Found(
        value=len(constant) / max(1, len(columns)),
        text=f"{len(constant)} of {len(columns)} columns have a single value in the training split",
        offenders=[Offender(name=name) for name in constant],
    )


def _first_places(data: Data, feature: str) -> dict[str, str]:
    """Return the name of each column of a feature by the name of its first place: of a datetime, only the days count,
    because dates without a time are all at midnight."""
    columns, places = data.prepared.features[feature].columns, data.columns(feature)
    if not columns:
        return {place: place for place in places}
    is_first = [number == 0 for column in columns for number in range(column.width)]
    return dict(zip(itertools.compress(places, is_first), (column.name for column in columns), strict=True))


CHECK = Check(_find, threshold=0.0)

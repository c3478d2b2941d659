"""The share of the columns of numbers and categories that have one value in all of the training split."""

from tasks.data_checks import Check, Data, Found, Offender, statistics


def _find(data: Data) -> Found:
    names = {column for feature in data.features("number", "category") for column in data.columns(feature)}
    own = statistics(data).splits.get("train", {})
    columns = {name: column for name, column in own.items() if name in names}
    constant = [
        name
        for name, column in columns.items()
        if (column.quantiles and column.quantiles[0] == column.quantiles[-1]) or len(_seen(column.counts)) == 1
    ]
    return Found(
        value=len(constant) / max(1, len(columns)),
        text=f"{len(constant)} of {len(columns)} columns have one value in all of the training split",
        offenders=[Offender(name=name) for name in constant],
    )


def _seen(counts: dict[str, int]) -> list[str]:
    return [value for value, count in counts.items() if count]


CHECK = Check(_find, threshold=0.0)

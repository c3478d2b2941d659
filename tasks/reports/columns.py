"""What each column of a dataset holds, in words: of the terminal's table and of a run's report."""

from collections.abc import Sequence

from tasks.records import Feature

MAX_MOMENTS = 4
"""More means and deviations are not told: an image has no more channels, and thousands of numbers are no line."""


def describe_columns(name: str, feature: Feature) -> list[tuple[str, str, str]]:
    """Return name, kind and statistics of each column of a feature; of the feature, where it is of no table.

    Args:
        name: of the feature.
        feature: with what was fitted on the training split.
    """
    if not feature.columns:
        return [(name, feature.kind, moments(feature.mean, feature.deviation))]
    rows: list[tuple[str, str, str]] = []
    place = 0
    for number, column in enumerate(feature.columns):
        told = ""
        if feature.vocabulary_sizes:
            count = feature.vocabulary_sizes[number] - 2  # Without the missing and the unknown.
            what = "word" if column.kind == "text" else "value"
            told = f"one {what} alone" if count == 1 else f"{count:,} different {what}s"
        elif column.quantiles:  # The mean is of its places among them.
            told = f"from {column.quantiles[0]:.4g} to {column.quantiles[-1]:.4g}, scaled by quantiles"
        elif column.kind != "datetime":
            last = place + (column.width if feature.kind == "number" else len(feature.mean))
            told = moments(feature.mean[place:last], feature.deviation[place:last])
        place += column.width
        rows.append((column.name, column.kind, told))
    return rows


def moments(means: Sequence[float], deviations: Sequence[float]) -> str:
    """Return means and deviations in words; nothing of none, and of too many for a line."""
    if not 0 < len(means) <= MAX_MOMENTS:
        return ""
    return f"mean {' '.join(f'{one:.4g}' for one in means)}, deviation {' '.join(f'{one:.4g}' for one in deviations)}"

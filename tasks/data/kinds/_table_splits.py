"""Which split each row of a table belongs to: by a column, by groups, by time, or drawn by class."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding import cells
from tasks.data.encoding.cells import BadValue
from tasks.data.kinds import SPLITS, split_rows
from tasks.data.kinds._table_rows import Rows, ScannedTable
from tasks.system.errors import UserError, cut, one_of

NAMES = ("train", "validation", "test")


def split(table: ScannedTable) -> tuple[npt.NDArray[np.int8], set[str]]:
    """Return the place of each row's split in ``NAMES``, int8 (n,), or -1 for a row that is left out; and which splits
    were made, as no column says them.

    Raises:
        UserError: a split would be empty, or one group lies in two.
    """
    dataset = table.dataset
    rows = np.flatnonzero(table.usable)
    parts: dict[str, Rows] = {}
    if dataset.split_column is not None:
        parts = _by_column(table, rows, dataset.split_column)
    # Where a column names no row of one of them, its training rows alone are divided.
    rows = parts.get("train", rows)
    if wanted := _counts(dataset, len(rows), [name for name in ("test", "validation") if name not in parts]):
        parts |= _divided(table, rows, wanted)
    splits = np.full(len(table.usable), -1, np.int8)
    for name, own in parts.items():
        splits[own] = NAMES.index(name)
    return splits, set(wanted)


def _divided(table: ScannedTable, rows: Rows, wanted: dict[str, int]) -> dict[str, Rows]:
    """Return rows to train on, and so many for each of the other splits: whole groups, the newest, or drawn."""
    dataset = table.dataset
    if dataset.group is not None:
        return _by_group(table, rows, dataset.group, wanted)
    if dataset.time is not None:
        return _by_time(table, rows, dataset.time, wanted)
    classes = table.target.class_names if table.target.task == "classification" else ("",)
    strata = np.zeros(len(rows), np.int64) if classes == ("",) else table.labels[rows]
    return {name: rows[own] for name, own in _drawn(strata, classes, dataset, wanted).items()}


def _by_column(table: ScannedTable, rows: Rows, column: str) -> dict[str, Rows]:
    """Return the rows of each split that a column of the table names."""
    dataset = table.dataset
    texts, places = table.texts_of(table.parts[column])
    used = [texts[place] for place in np.unique(places[rows]).tolist()]
    if unknown := [text for text in used if text.strip().lower() not in SPLITS]:
        raise table.refuse("split_column", one_of("split", unknown[0], SPLITS))
    of_text = np.array([NAMES.index(SPLITS.get(text.strip().lower(), "train")) for text in texts])
    parts = {name: rows[of_text[places[rows]] == number] for number, name in enumerate(NAMES)}
    parts = {name: own for name, own in parts.items() if len(own)}
    if "train" not in parts:
        raise table.refuse("split_column", f"has {', '.join(parts)} alone: rows to train on are needed")
    if dataset.group is not None:
        groups, of_row = table.texts_of(table.parts[dataset.group])
        seen = np.stack([np.bincount(of_row[own], minlength=len(groups)) > 0 for own in parts.values()])
        if (leaking := np.flatnonzero(seen.sum(0) > 1)).size:
            raise table.refuse(
                "group",
                f"{leaking.size} of its values lie in several splits of '{column}', such as "
                f"'{groups[leaking[0]]}': put all rows of each into one",
            )
    return parts


def _by_group(table: ScannedTable, rows: Rows, column: str, wanted: dict[str, int]) -> dict[str, Rows]:
    dataset = table.dataset
    groups, of_row = table.texts_of(table.parts[column])
    used = sorted({groups[place] for place in np.unique(of_row[rows]).tolist()})
    number = {text: place for place, text in enumerate(used)}
    own = np.array([number.get(text, -1) for text in groups])[of_row[rows]]
    if len(used) < len(wanted) + 1:
        raise table.refuse("group", f"has {len(used)} values, and {len(wanted) + 1} splits need one each")
    words = np.random.Philox(key=[dataset.seed, 0], counter=[0, 0, 0, 3]).random_raw(len(used))
    drawn = np.argsort(words, kind="stable")
    sizes = np.bincount(own, minlength=len(used))[drawn]
    parts, first = {}, 0
    for place, (name, count) in enumerate(wanted.items()):
        sums = np.cumsum(sizes[first:])
        # As near to the number as whole groups come, and one left for each split after it.
        most = len(drawn) - first - (len(wanted) - place)
        taken = int(np.abs(sums[:most] - count).argmin()) + 1
        parts[name] = rows[np.isin(own, drawn[first : first + taken])]
        first += taken
    parts["train"] = rows[np.isin(own, drawn[first:])]
    return parts


def _by_time(table: ScannedTable, rows: Rows, column: str, wanted: dict[str, int]) -> dict[str, Rows]:
    times = _times(table, column)[rows]
    ordered = np.sort(times)
    parts, last = {}, len(rows)
    for name, count in wanted.items():
        # Rows of one time stay together.
        first = int(np.searchsorted(ordered, ordered[max(last - count, 0)]))
        if not 0 < first < last:
            raise table.refuse(
                "time", f"nothing is left to train on before the {count} newest rows: give a smaller dataset.{name}"
            )
        upper = ordered[last] if last < len(rows) else np.inf
        parts[name] = rows[(times >= ordered[first]) & (times < upper)]
        last = first
    parts["train"] = rows[times < ordered[last]]
    return parts


def _times(table: ScannedTable, name: str) -> cells.Numbers:
    """Return what rows are ordered by: numbers, or days since 1970."""
    parts, found, first = table.parts[name], [], 0
    try:
        decimal = table.dataset.decimal or "."
        return np.concatenate([cells.numbers(part, name, decimal) for part in parts])
    except BadValue:
        pass
    column = (table.dataset.columns or {}).get(name)
    form = column.format if column else None
    for part in parts:
        try:
            found.append(cells.days(part, name, form))
        except BadValue as bad:
            raise table.refuse(
                "time", f"row {first + bad.row + 1} has {cut(repr(bad.value), 80)}, which {bad.reason}"
            ) from None
        first += len(part)
    return np.concatenate(found)


def _counts(dataset: config.Table, total: int, splits: Sequence[str]) -> dict[str, int]:
    """Return how many of the rows these splits are to have."""
    wanted = {name: getattr(dataset, name) for name in splits}
    counts = {
        name: count if isinstance(count, int) else max(1, round(total * count))
        for name, count in wanted.items()
        if count is not None
    }
    if sum(counts.values()) >= total:
        named = " and ".join(f"dataset.{name} = {share}" for name, share in wanted.items())
        raise UserError(
            f"{named}: {'they take' if len(wanted) > 1 else 'takes'} "
            f"{sum(counts.values())} of the {total} rows, and one must be left to train on "
            f"(dataset.source = '{dataset.source}')"
        )
    return counts


def _drawn(strata: Rows, names: Sequence[str], dataset: config.Table, counts: dict[str, int]) -> dict[str, Rows]:
    """Return rows drawn by the seed, the same share of each class."""
    parts = split_rows(strata, names, dataset) if "test" in counts else {"train": np.arange(len(strata))}
    if "validation" in counts:
        train = parts["train"]
        # Another seed, as the first rows of both draws would have the same words.
        again = dataset.model_copy(update={"test": counts["validation"], "seed": dataset.seed + 1})
        own = split_rows(strata[train], names, again)
        parts |= {"validation": train[own["test"]], "train": train[own["train"]]}
    return parts

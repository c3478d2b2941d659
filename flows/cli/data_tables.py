"""What `stratagem data` prints for a person: what a dataset holds, and what is wrong with it."""

import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from flows.cli.tables import print_rows
from tasks import reports
from tasks.records import DataDifference, DataQuality, KeptColumn, PreparedDataset
from tasks.system.errors import cut

MAX_CLASSES = 30
"""That are printed of a dataset."""
MAX_DIFFERENCES = 60
MAX_COLUMNS = 60
OUTPUTS = {
    "classification": ("class", "classes"),
    "multilabel": ("label", "labels"),
    "regression": ("number", "numbers"),
}


def print_dataset(prepared: PreparedDataset) -> None:
    """Print what a prepared dataset holds: its features, its splits, and the examples of each class."""
    splits, count = prepared.splits, prepared.target.num_outputs
    one, many = OUTPUTS[prepared.target.task]
    print_rows(
        {
            "name": prepared.name,
            "kind": f"{prepared.kind}, version {prepared.version}",
            "data version": prepared.data_version or "not under DVC",
            "folder": prepared.folder,
            "features": ", ".join(_features(prepared)),
            "task": f"{prepared.target.task}, {count:,} {one if count == 1 else many}",
        }
    )
    print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("examples")
    for split in splits:
        table.add_column(split, justify="right")
    table.add_row("all", *(f"{split.num_examples:,}" for split in splits.values()))
    for number, name in enumerate(prepared.target.class_names[:MAX_CLASSES]):
        table.add_row(cut(name), *(f"{split.class_counts[number]:,}" for split in splits.values()))
    Console(highlight=False, markup=False).print(table)
    if (more := len(prepared.target.class_names) - MAX_CLASSES) > 0:
        print(f"and {more:,} classes more: --json has all")
    print()
    _print_columns(prepared)


def _print_columns(prepared: PreparedDataset) -> None:
    """Print what each column holds: its kind, how many values are missing, and what the training split says of it."""
    rows = [row for name, feature in prepared.features.items() for row in reports.describe_columns(name, feature)]
    missing = {name: sum(split.num_missing.get(name, 0) for split in prepared.splits.values()) for name, *_ in rows}
    target = prepared.target
    names = target.columns or ("",) * len(target.mean)
    rows += [
        (name, "target", reports.moments((mean,), (deviation,)))
        for name, mean, deviation in zip(names, target.mean, target.deviation, strict=False)
    ]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("column", "kind", "missing", "in the training split"):
        table.add_column(heading, justify="right" if heading == "missing" else "left", overflow="fold")
    for name, kind, told in rows[:MAX_COLUMNS]:
        table.add_row(cut(name), kind, f"{missing.get(name, 0):,}", told)
    Console(highlight=False, markup=False).print(table)
    if (more := len(rows) - MAX_COLUMNS) > 0:
        print(f"and {more:,} columns more: --json has all")


def print_metadata(kept: Mapping[str, KeptColumn]) -> None:
    """Print what lies beside the test examples, a line a column; nothing where that is nothing."""
    if not kept:
        return
    print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("metadata", "kind", "missing", "in the test split"):
        table.add_column(heading, justify="right" if heading == "missing" else "left", overflow="fold")
    for name, one in list(kept.items())[:MAX_COLUMNS]:
        told = f"{one.num_different:,} different values"
        if one.lowest is not None and one.highest is not None:
            told = f"from {_value(one.lowest, one.kind)} to {_value(one.highest, one.kind)}"
        table.add_row(cut(name), one.kind, f"{one.num_missing:,}", told)
    Console(highlight=False, markup=False).print(table)
    if (more := len(kept) - MAX_COLUMNS) > 0:
        print(f"and {more:,} columns more: --json has all")


def _value(value: float, kind: str) -> str:
    """Return a number, or the day of a datetime, which is in days since 1970."""
    import numpy as np  # Here and not above: no other table needs it. Python's own dates end with the year 9999.

    return str(np.datetime64(math.floor(value), "D")) if kind == "datetime" else f"{value:.4g}"


def print_quality(name: str, quality: DataQuality | None) -> None:
    """Print what each check says of a dataset, the findings first, and where the pictures lie."""
    print()
    if quality is None:
        print(f"not checked yet: stratagem prepare --set dataset.name={name} --force")
        return
    told = sorted(quality.checks.items(), key=lambda one: not one[1].is_finding)
    print_rows({check: ("warning: " if result.is_finding else "") + result.text for check, result in told})
    print(f"data/{name}/report")
    for picture in quality.pictures:
        print(f"data/{name}/report/{picture}")


def print_datasets(found: Mapping[str, PreparedDataset | None]) -> None:
    """Print a line for each dataset."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "kind", "features", "examples", "data version"):
        table.add_column(column, justify="right" if column == "examples" else "left")
    for name, one in found.items():
        if one is None:
            table.add_row(name, "", "not prepared", "", "")
            continue
        total = sum(split.num_examples for split in one.splits.values())
        table.add_row(name, one.kind, ", ".join(_features(one)), f"{total:,}", (one.data_version or "")[:12])
    Console(highlight=False, markup=False).print(table)


def print_difference(found: DataDifference) -> None:
    """Print what differs between two datasets, a line each."""
    if not found.differences:
        print(f"{found.first} and {found.second} are the same data")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", found.first, found.second):
        table.add_column(heading, overflow="fold")
    for what, values in list(found.differences.items())[:MAX_DIFFERENCES]:
        table.add_row(what, *("-" if value is None else value for value in values))
    Console(highlight=False, markup=False).print(table)
    if (more := len(found.differences) - MAX_DIFFERENCES) > 0:
        print(f"and {more:,} differences more: --json has all")


def _features(prepared: PreparedDataset) -> list[str]:
    return [
        f"{name} ({feature.kind} {' x '.join(map(str, feature.shape))})" for name, feature in prepared.features.items()
    ]

"""Checks of a dataset: the file name is the key, and its ``CHECK`` measures the arrays that `prepare` created.

``checks: {NAME: stop}`` in data/<name>/params.yaml refuses the data on a finding, ``warn`` warns, ``off`` skips the
check; ``checks: {NAME: {action: stop, threshold: 0.01}}`` replaces the check's own threshold.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from tasks import config, records
from tasks.data import prepared_data
from tasks.data.checks import _sheets
from tasks.data.checks._data import Data, Place
from tasks.records import CheckResult, DataQuality, DataStatistics, Offender, PreparedDataset, load_or_none
from tasks.system.errors import UserError, listed, printable

MOST_OFFENDERS = 100
"""The number of offenders that a report contains for each check, the worst first."""


@dataclass(frozen=True)
class Found:
    """The result of a check's measurement."""

    value: float
    """A value above the threshold is a finding."""
    text: str
    """The result with its numbers, as the end of a line."""
    offenders: Sequence[Offender] = ()
    """The worst first; at most ``MOST_OFFENDERS`` are used."""
    num_offenders: int | None = None
    """Their total number; None counts ``offenders``."""


@dataclass(frozen=True)
class Check:
    """A check of a dataset."""

    find: Callable[[Data], Found]
    threshold: float
    action: Literal["warn", "off"] = "warn"
    """The default. Only the user can choose ``stop``."""


def find_check(name: str) -> Check:
    """Return the check in the file ``name`` of this folder."""
    check: Check = importlib.import_module(f"tasks.data.checks.{name}").CHECK
    return check


def offenders(data: Data, places: Sequence[Place], twins: Sequence[Place] = ()) -> list[Offender]:
    """Return the records of ``MOST_OFFENDERS`` examples, with their ``twins`` if there are any."""
    found = []
    for number, (split, row) in enumerate(places[:MOST_OFFENDERS]):
        twin = twins[number] if twins else None
        note = f"like {data.named(*twin)}" if twin else ""
        found.append(Offender(name=data.named(split, row), split=split, row=row, note=note, twin=twin))
    return found


def judge(
    dataset: config.Description,
    prepared: PreparedDataset,
    arrays: Path,
    report: Path,
    name_of: Callable[[str, int], str] | None = None,
    sizes_of: Callable[[str], npt.NDArray[np.int32]] | None = None,
) -> None:
    """Check a prepared dataset, print findings, and write statistics, findings and pictures.

    Args:
        arrays: the temporary folder of the dataset's arrays.
        report: the folder to create; data without examples have none.
        name_of: takes split and row, returns the example's name in the source.
        sizes_of: height and width of the original images of a split, (n, 2).

    Raises:
        UserError: a check with the action ``stop`` has a finding; ``report`` is not created.
    """
    folder = config.project_root() / "data" / dataset.name
    before = load_or_none(DataStatistics, folder / "report" / prepared_data.STATISTICS)
    data = Data(prepared, arrays, before, name_of)
    if not data.num_rows:
        return
    names = config.names_of("data/checks")
    with ThreadPoolExecutor(2) as pool:  # The two slowest, statistics and duplicates, take as long as each other.
        found = dict(zip(names, pool.map(partial(_result, dataset, data), names), strict=True))
    results = {name: result for name, result in found.items() if result is not None}
    refused = [
        f"{name}: {_with_names(one)}" for name, one in results.items() if one.is_finding and one.action == "stop"
    ]
    if refused:
        raise UserError(
            f"the checks reject data/{dataset.name}. {'. '.join(refused)}. Fix the source, or let the check only warn: "
            f"set checks: {{{refused[0].partition(':')[0]}: warn}} under dataset in data/{dataset.name}/params.yaml"
        )
    report.mkdir()
    results = {name: _drawn(name, one, data, report) for name, one in results.items()}
    pictures = [one.picture for one in results.values() if one.picture]
    if data.class_names:
        _sheets.by_class(data, report / "classes.png")
        pictures.insert(0, "classes.png")
    if sizes_of is not None and "test" in prepared.splits:
        np.save(report / prepared_data.SIZES, sizes_of("test"))
    quality = DataQuality(
        arrays=prepared_data.arrays_of(prepared),
        looked_at={split: len(rows) for split, rows in data.rows.items()},
        checks=results,
        pictures=tuple(pictures),
    )
    records.save(data.statistics, report / prepared_data.STATISTICS)
    (report / ".gitignore").write_text("# Made by `prepare`, of the data.\n*\n", encoding="utf-8")
    records.save(quality, report / prepared_data.QUALITY)
    for check, result in quality.findings.items():
        where = f"data/{dataset.name}/report/{result.picture or prepared_data.QUALITY}"
        print(printable(f"warning: {check}: {_with_names(result, 3)} ({where})"), file=sys.stderr)
    cut = [
        f"{looked:,} of the {prepared.splits[split].num_examples:,} examples of {split}"
        for split, looked in quality.looked_at.items()
        if looked < prepared.splits[split].num_examples
    ]
    if cut:
        print(f"the checks examined {listed(cut)}, evenly spaced", file=sys.stderr)


def _result(dataset: config.Description, data: Data, name: str) -> CheckResult | None:
    check, asked = find_check(name), dataset.checks.get(name, config.DataCheck())
    action = asked.action if name in dataset.checks else check.action
    if action == "off":
        return None
    found = check.find(data)
    threshold = check.threshold if asked.threshold is None else asked.threshold
    return CheckResult(
        action=action,
        threshold=threshold,
        value=found.value,
        is_finding=found.value > threshold,
        text=found.text,
        num_offenders=len(found.offenders) if found.num_offenders is None else found.num_offenders,
        offenders=tuple(found.offenders[:MOST_OFFENDERS]),
    )


def _drawn(name: str, result: CheckResult, data: Data, report: Path) -> CheckResult:
    """Draw the offenders of a finding if they are examples."""
    if not result.is_finding or not any(one.row is not None for one in result.offenders):
        return result
    _sheets.of_offenders(data, f"{name}: {result.text}", result.offenders, report / f"{name}.png")
    return result.model_copy(update={"picture": f"{name}.png"})


def _with_names(result: CheckResult, most: int = 20) -> str:
    """Return a finding with its first offenders."""
    names = [f"{one.name} ({one.note})" if one.note else one.name for one in result.offenders[:most]]
    more = result.num_offenders - len(names)
    return result.text + (f": {', '.join(names)}" if names else "") + (f" and {more:,} more" if names and more else "")

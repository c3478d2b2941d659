"""What `prepare` finds of the data themselves, beside the arrays: statistics, and what the checks say."""

from typing import Literal

from tasks.records.record import Record


class ColumnStatistics(Record):
    """How the values of a column are distributed in a split: of numbers, or of classes, categories or words."""

    num_values: int
    """That were counted."""
    mean: float | None = None
    deviation: float | None = None
    quantiles: tuple[float, ...] = ()
    """Of numbers: the smallest, 99 that cut them into hundredths, the largest. Nothing for what is counted."""
    counts: dict[str, int] = {}
    """Of what is counted: the most frequent values; "(others)" are the rest."""


class DataStatistics(Record):
    """The statistics of a data version: data/<name>/report/statistics.json."""

    arrays: str
    """sha256 of the digests of the arrays: the same for the same data."""
    splits: dict[str, dict[str, ColumnStatistics]]
    """By split and column: ``class``, ``image brightness``, ``age``."""


class Offender(Record):
    """One example, column or class for which a check has its finding."""

    name: str
    """A file of the source, a row, a column or a class."""
    split: str | None = None
    row: int | None = None
    """In the arrays of its split, from 0 on."""
    note: str = ""
    twin: tuple[str, int] | None = None
    """The split and row of the example that it is like."""


class CheckResult(Record):
    """What one check says."""

    action: Literal["stop", "warn"]
    threshold: float
    value: float
    """A finding is above the threshold."""
    is_finding: bool
    text: str
    num_offenders: int
    offenders: tuple[Offender, ...]
    """The worst ones, first."""
    picture: str | None = None
    """The file that shows them, beside this record."""


class DataQuality(Record):
    """What all checks say of a data version: data/<name>/report/quality.json."""

    arrays: str
    """As in ``DataStatistics``."""
    looked_at: dict[str, int]
    """How many examples of each split."""
    checks: dict[str, CheckResult]
    pictures: tuple[str, ...]
    """Files beside this record."""

    @property
    def findings(self) -> dict[str, CheckResult]:
        """The results above their thresholds, by check."""
        return {name: result for name, result in self.checks.items() if result.is_finding}

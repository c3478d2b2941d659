"""Two runs measured side by side, and a run that was trained once more."""

from typing import Literal

from tasks.records.record import Name, Record


class MetricPair(Record):
    """A test metric of two runs. Intervals are of 95 %, None where none is known."""

    first: float | None
    second: float | None
    first_interval: tuple[float, float] | None = None
    second_interval: tuple[float, float] | None = None
    difference: float | None = None
    """By how much it is more for the second."""
    difference_interval: tuple[float, float] | None = None
    """Of the difference on the same test rows; None where the runs were evaluated on others, or it is not known."""


class Change(Record):
    """What of a run is otherwise today."""

    kind: Literal["code", "settings", "data", "environment", "machine"]
    what: str
    """Such as ``train.epochs`` or ``tensorflow``."""
    then: str | None
    now: str | None
    effect: Literal["brought back", "matters", "cannot be brought back"]
    """``matters`` is what is there otherwise and may give other numbers; what is brought back is as it was."""


class Reproduction(Record):
    """What `stratagem reproduce --json` prints, and what the new run keeps in records/reproduction.json."""

    run_id: Name
    """Of the run that is to come out again."""
    changes: tuple[Change, ...]
    reproduced_by: Name | None = None
    """The run that was trained for it; None where none was."""
    same: bool | None = None
    """Whether it gave the same; None where nothing was trained."""
    reason: str
    weights_digests: tuple[str, str] | None = None
    """Of the run, and of the new one."""
    metrics: dict[str, MetricPair] = {}
    """Of the run, and of the new one."""

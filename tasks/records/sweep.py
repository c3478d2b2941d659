"""Many trainings with settings out of a space, and which of them was the best."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from tasks.records.record import Name, Record
from tasks.records.runs import RunSummary


class Limits(Record):
    """What a trial of a sweep must reach to be trained on."""

    metric: str
    lower_is_better: bool
    by_epoch: dict[int, float] = {}
    """After so many epochs the metric must be as good as this."""

    def missed(self, values: Sequence[float]) -> int | None:
        """Return after how many epochs a trial ends, because its metric is worse; None where it is trained on.

        Args:
            values: of the metric, one a whole epoch.
        """
        sign = 1 if self.lower_is_better else -1
        for epoch, limit in sorted(self.by_epoch.items()):
            if epoch <= len(values) and sign * values[epoch - 1] > sign * limit:
                return epoch
        return None


class Trial(Record):
    """One training of a sweep."""

    number: int
    """From 0 on, in the order in which they were suggested."""
    state: Literal["running", "complete", "pruned", "failed"]
    """`running`, too, of one whose process was killed: the same command trains it on."""
    params: dict[str, Any]
    """The settings that it has of the space."""
    value: float | None = None
    """Of the sweep's metric; of a pruned one, where it ended."""
    values: tuple[float, ...] = ()
    """Of the metric after each epoch."""
    run_id: Name | None = None
    """Its MLflow run, a child of the sweep's; None of one that was refused, and of a copy."""
    same_as: int | None = None
    """The earlier trial with the same parameters whose result it has: nothing was trained again."""
    reason: str | None = None
    """Why it failed, or was pruned."""
    seconds: float | None = None


class SweepPlan(Record):
    """What makes two sweeps the same: each trial of them has the same parameters."""

    name: str
    """The file of the space, without its ending."""
    space: dict[str, Any]
    """As the file says it, with what is left out there."""
    metric: str
    lower_is_better: bool
    parallel: int
    sampler: str
    """Whose suggestions they are, with its version."""


class Sweep(Record):
    """A whole sweep, as `stratagem sweep --json` prints it."""

    remedy: ClassVar[str] = "give the command again with --fresh"
    run_id: str
    """The parent of the trials' MLflow runs."""
    folder: str
    """Where this record lies as sweep.json, beside the trials as CSV, a page, and Optuna's own database."""
    flow_run_id: str | None
    git_commit: str | None
    data_version: str | None
    dataset: str
    model: str
    plan: SweepPlan
    trials: tuple[Trial, ...]
    best: int | None
    """The number of the best trial; None where none was trained to its end."""
    importance: dict[str, float] = {}
    """By parameter, what part of the differences between the values it explains; nothing of too few trials."""
    best_settings: dict[str, Any] = {}
    """Of the final training: what it has of the best trial's parameters, and what was changed to train on all."""
    final: RunSummary | None = None
    """The best trial's settings, trained again on training and validation examples together, evaluated on the test
    split and put through the gate; None before that is done."""
    seconds: float
    """Of this command; a sweep that was killed has lost those of before."""
    finished_at: str

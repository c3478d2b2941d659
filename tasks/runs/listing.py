"""All runs at a glance: which there are, how each stands, how good and how fast it is, what it takes on the disk."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tasks import config
from tasks.records import HEADLINES, RunLine, RunList
from tasks.runs.entries import Entry, find_entries, find_unreadable
from tasks.runs.locks import is_abandoned
from tasks.runs.outcome import is_pruned
from tasks.system import errors, files, utc
from tasks.system.errors import UserError

STATUSES = ("running", "finished", "failed", "killed", "crashed")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
AGO = re.compile(r"(\d{1,6})([mhdw])")
FIGURES = ("examples_per_second", "bytes")


@dataclass(frozen=True)
class RunFilter:
    """Which runs a command is about: those that meet every condition that is not None."""

    dataset: str | None = None
    strategy: str | None = None
    since: datetime | None = None
    """They began then, or later."""
    status: str | None = None
    """One of ``STATUSES``."""

    def check(self, lines: Sequence[RunLine]) -> None:
        """Refuse what no run can be.

        Raises:
            UserError: names the option, and what is allowed.
        """
        strategies = {*config.strategy_kinds(), *(line.strategy for line in lines)}
        for option, value, known in (
            ("--status", self.status, set(STATUSES)),
            ("--strategy", self.strategy, strategies),
            ("--dataset", self.dataset, {line.dataset for line in lines}),
        ):
            if value is not None and value not in known:
                none = "there is no run yet" if not lines else None
                raise UserError(errors.one_of(option, value, known - {""}, none))

    def includes(self, line: RunLine) -> bool:
        """Return whether a run is among them."""
        return (
            self.dataset in (None, line.dataset)
            and self.strategy in (None, line.strategy)
            and self.status in (None, line.status)
            and (self.since is None or datetime.fromisoformat(line.began) >= self.since)
        )


def list_runs(
    choice: RunFilter, sort: str | None = None, lowest_first: bool = False, limit: int | None = None
) -> RunList:
    """Return the runs in mlruns/, the newest first.

    Args:
        choice: which of them.
        sort: by one of ``FIGURES``, or by a metric such as ``test/accuracy``; runs without it come last.
        lowest_first: or the highest.
        limit: so many at most.

    Raises:
        UserError: there is no such dataset, strategy, status or metric.
    """
    entries, unreadable = find_entries("runs"), find_unreadable()
    lines = [line_of(entry) for entry in entries]
    choice.check(lines)
    found = [line for line in lines if choice.includes(line)]
    if sort is not None:
        measured = {name for line in lines for name in line.metrics}
        if sort not in measured and sort not in FIGURES:
            raise UserError(errors.one_of("--sort", sort, {*FIGURES, *measured}))

        def place(line: RunLine) -> tuple[bool, float]:
            value = getattr(line, sort) if sort in FIGURES else line.metrics.get(sort)
            if value is None or math.isnan(value):
                return True, 0.0
            return False, value if lowest_first else -value

        found.sort(key=place)
    root = config.project_root()
    problems = {entry.run.folder: why for entry in entries if (why := entry.problem()) is not None}
    return RunList(
        runs=tuple(found[:limit]),
        num_matching=len(found),
        num_runs=len(lines),
        bytes=sum(line.bytes for line in lines) + sum(files.num_bytes(root / folder) for folder in unreadable),
        checkpoint_bytes=sum(files.num_bytes(root / entry.run.folder / "checkpoints") for entry in entries),
        model_bytes=sum(files.num_bytes(root / entry.run.folder / "models") for entry in entries),
        unreadable=problems | unreadable,
    )


def lower_is_better(metric: str) -> bool:
    """Return whether less of a metric such as ``test/my_code:far`` is better, as the newest evaluation says that has it
    and says so; False where none does."""
    for entry in find_entries("runs"):
        found = entry.evaluation
        if found is not None and metric in found.metrics and found.lower_is_better is not None:
            return metric in found.lower_is_better
    return False


def line_of(entry: Entry) -> RunLine:
    """Return what a list says of a run."""
    run, ended = entry.run, entry.status
    metrics = entry.evaluation.metrics if entry.evaluation is not None else {}
    status = ended.status.lower() if ended is not None else None
    if status == "running" and is_abandoned(run):
        status = "crashed"
    return RunLine(
        run_id=run.run_id,
        name=run.name,
        began=utc.at(run.start_time / 1000 or entry.changed / 10**9),
        ended=ended.at if ended is not None and status in ("finished", "failed", "killed") else None,
        status=status,
        dataset=entry.dataset,
        model=entry.model,
        strategy=entry.strategy,
        loop=entry.loop,
        headline=next((name for one in HEADLINES.values() if (name := f"test/{one}") in metrics), None),
        metrics=metrics,
        examples_per_second=entry.training.examples_per_second if entry.training is not None else None,
        model_version=entry.model_version,
        bytes=files.num_bytes(config.project_root() / run.folder),
        pruned=is_pruned(run),
        parent_run_id=run.parent_run_id,
    )


def moment(text: str, option: str) -> datetime:
    """Return when a text means: a day or a time of it, in local time, or how long ago, such as ``7d`` or ``12h``.

    Raises:
        UserError: it is written otherwise.
    """
    try:
        if ago := AGO.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise UserError(
            f"{option} = '{errors.cut(text)}' is no time: give a day such as 2026-11-20, a time such as "
            "2026-11-20T18:00, or how long ago: 30m, 12h, 7d or 4w"
        ) from None

"""Lists all runs with status, results, speed and size on disk; shows one run in detail; compares two runs."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tasks import config, records
from tasks.records import (
    HEADLINES,
    EvaluationResult,
    RecentRuns,
    RegisteredModel,
    Reproduction,
    Run,
    RunDetails,
    RunLine,
    RunList,
    RunProgress,
    RunStatus,
    RunSummary,
    TrainingResult,
    Trial,
)
from tasks.runs import outcome
from tasks.runs.entries import find_runs, read_runs
from tasks.runs.locks import is_abandoned
from tasks.system import errors, files, units
from tasks.system.errors import UserError

STATUSES = ("running", "finished", "failed", "killed")
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
AGO = re.compile(r"(\d{1,6})([mhdw])")
FIGURES = ("examples_per_second", "bytes")


@dataclass(frozen=True)
class RunFilter:
    """Selects the runs that meet every condition that is not None."""

    dataset: str | None = None
    strategy: str | None = None
    since: datetime | None = None
    """Only runs that began at this time or later."""
    status: str | None = None
    """One of ``STATUSES``."""

    def check(self, lines: Sequence[RunLine]) -> None:
        """Refuse conditions that no run can meet.

        Raises:
            UserError: names the option and its allowed values.
        """
        strategies = {*config.strategy_kinds(), *(line.strategy for line in lines)}
        for option, value, known in (
            ("--status", self.status, set(STATUSES)),
            ("--strategy", self.strategy, strategies),
            ("--dataset", self.dataset, {line.dataset for line in lines}),
        ):
            if value is not None and value not in known:
                none = "no run exists yet" if not known else None
                raise UserError(errors.one_of(option, value, known - {""}, none))

    def includes(self, line: RunLine) -> bool:
        """Return whether a run meets all conditions."""
        return (
            self.dataset in (None, line.dataset)
            and self.strategy in (None, line.strategy)
            and self.status in (None, line.status)
            and (self.since is None or datetime.fromisoformat(line.began) >= self.since)
        )


def list_runs(
    choice: RunFilter, sort: str | None = None, lowest_first: bool = False, limit: int | None = None
) -> RunList:
    """Return the runs in mlruns/, newest first.

    Args:
        choice: selects the runs.
        sort: one of ``FIGURES``, or a metric such as ``test/accuracy`` or ``accuracy``; runs without it come last.
        lowest_first: sort in ascending order; otherwise descending.
        limit: the maximum number of runs.

    Raises:
        UserError: no run has this dataset, strategy, status or metric.
    """
    runs, unreadable = read_runs("runs")
    root = config.project_root()
    sizes = [files.sizes(root / run.folder) for run in runs]
    lines = [line_of(run, sum(each.values())) for run, each in zip(runs, sizes, strict=True)]
    choice.check(lines)
    found = [line for line in lines if choice.includes(line)]
    if sort is not None:
        known = {*FIGURES, *(name for line in lines for name in line.metrics)}
        metric = sort if sort in known else f"test/{sort}"
        if metric not in known:
            raise UserError(errors.one_of("--sort", sort, known))

        def place(line: RunLine) -> tuple[bool, float]:
            value = getattr(line, metric) if metric in FIGURES else line.metrics.get(metric)
            if value is None or math.isnan(value):
                return True, 0.0
            return False, value if lowest_first else -value

        found.sort(key=place)
    return RunList(
        runs=tuple(found[:limit]),
        num_matching=len(found),
        num_runs=len(lines),
        bytes=sum(line.bytes for line in lines) + sum(files.num_bytes(root / folder) for folder in unreadable),
        checkpoint_bytes=sum(each.get("checkpoints", 0) for each in sizes),
        model_bytes=sum(each.get("models", 0) for each in sizes),
        unreadable=unreadable,
    )


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric such as ``test/loss`` are better; False if it is not a metric.

    The newest evaluation with a user-defined metric determines this, because only stage processes import the user's
    code.
    """
    name = metric.rpartition("/")[2]
    if ":" in metric:
        for run in find_runs("runs"):
            found = outcome.load_readable(run, EvaluationResult)
            if found is not None and metric in found.metrics:
                return metric in found.lower_is_better
    elif name in ("loss", *config.names_of("modeling/metrics")) or config.top_k_of(name) is not None:
        from tasks.modeling import metrics  # NumPy takes 0.2 s to import.

        return metrics.better(metric) == "lower"
    return False


def line_of(run: Run, num_bytes: int | None = None) -> RunLine:
    """Return a run's line in a list from its readable records; ``num_bytes`` is the size of its folder if known."""
    training, evaluation = outcome.load_readable(run, TrainingResult), outcome.load_readable(run, EvaluationResult)
    metrics = evaluation.metrics if evaluation is not None else {}
    ended = outcome.status(run)
    return RunLine(
        run_id=run.run_id,
        name=run.name,
        began=records.at(run.start_time / 1000),
        ended=ended.at if ended.status != "RUNNING" else None,
        status=in_words(run, ended),
        dataset=run.dataset,
        model=run.model,
        strategy=run.strategy,
        loop=run.loop,
        headline=next((name for one in HEADLINES.values() if (name := f"test/{one}") in metrics), None),
        metrics=metrics,
        examples_per_second=training.examples_per_second if training is not None else None,
        model_version=version_of(run),
        bytes=files.num_bytes(config.project_root() / run.folder) if num_bytes is None else num_bytes,
        pruned=outcome.is_pruned(run),
        parent_run_id=run.parent_run_id,
    )


def version_of(run: Run) -> str | None:
    """Return NAME/VERSION of a run's registered model, None if it has none."""
    made = outcome.load_readable(run, RegisteredModel)
    return f"{made.model_name}/{made.model_version}" if made is not None and made.model_version else None


def moment(text: str, option: str) -> datetime:
    """Parse a day or a time, in local time, or an age such as ``7d`` or ``12h``.

    Raises:
        UserError: the text has none of these formats.
    """
    try:
        if ago := AGO.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise UserError(
            f"{option} = '{errors.cut(text)}' is not a time: use a day such as 2026-11-20, a time such as "
            "2026-11-20T18:00, or how long ago: 30m, 12h, 7d or 4w"
        ) from None


def show(run: Run) -> RunDetails:
    """Return the details of a run from its readable records.

    Raises:
        UserError: params.yaml cannot be read.
    """
    summary, ended = outcome.load_readable(run, RunSummary), outcome.status(run)
    evaluation = outcome.load_readable(run, EvaluationResult)
    folder = config.project_root() / run.folder
    kept = sorted(folder.glob("checkpoints/[!.]*"), key=lambda path: int(path.name) if path.name.isdigit() else 0)
    kept += sorted(folder.glob("models/[!.]*"))
    return RunDetails(
        run=line_of(run),
        record=run,
        reason=ended.reason,
        settings=different(run.settings, config.load().to_json()),
        training=outcome.load_readable(run, TrainingResult),
        evaluated=evaluation.checkpoint if evaluation else None,
        registered=outcome.load_readable(run, RegisteredModel),
        seconds=summary.seconds if summary else {},
        files={
            path.relative_to(folder).as_posix(): files.num_bytes(path) if path.is_dir() else path.lstat().st_size
            for path in kept
        },
        reproduction=outcome.load_readable(run, Reproduction),
    )


def compare(first: Run, second: Run) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two runs: settings, data, code, results and speed.

    Raises:
        UserError: see ``show``.
    """
    before, now = (_facts(show(run)) | run.environment for run in (first, second))
    return different(first.settings, second.settings) | _unequal(before, now)


def different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values; None stands for a missing key."""
    marks = config.marks_of(config.Settings)
    before, now = (dict(config.leaves(values, whole=marks)) for values in (first, second))
    return _unequal(before, now)


def _unequal(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}


def _facts(shown: RunDetails) -> dict[str, Any]:
    line, lineage, training = shown.run, shown.record.lineage, shown.training
    return {
        "data version": lineage.data_version,
        "code": lineage.code_digest,
        "stratagem": lineage.package_version,
        "git commit": lineage.git_commit,
        "uncommitted changes": lineage.git_dirty,
        "host": shown.record.host,
        "devices": ", ".join(training.devices) if training else None,
        "status": line.status,
        "epochs": training.epochs if training else None,
        "steps": training.steps if training else None,
        **line.metrics,
        "examples/s": line.examples_per_second,
        **{f"seconds: {stage}": seconds for stage, seconds in shown.seconds.items()},
        "resumed with others": "; ".join(f"{one.what} {one.values}" for one in shown.record.changed) or None,
        "weights": training.weights_digest if training else None,
        "model version": line.model_version,
    }


def recent_runs() -> RecentRuns:
    """Return the progress of the running trainings, the newest finished run, and what failed or was stopped in the last
    24 hours."""
    now, running, latest = datetime.now(UTC), [], None
    ends: dict[str, dict[str, str]] = {"failed": {}, "killed": {}}
    for run in find_runs("runs"):
        ended = outcome.status(run)
        status = in_words(run, ended)
        if status == "running":
            running.append(_progress(run, now))
        elif status == "finished":
            latest = latest or line_of(run)
        elif (ended.reason or "").startswith(Trial.pruned_because):
            continue  # A sweep ends such trials on purpose.
        # An unreadable status has no time.
        elif datetime.fromisoformat(ended.at or records.now()) >= now - timedelta(days=1):
            ends[status][run.name] = ended.reason or status
    return RecentRuns(running=tuple(running), latest=latest, failed=ends["failed"], stopped=ends["killed"])


def in_words(run: Run, ended: RunStatus) -> str:
    """Return one of ``STATUSES`` from the recorded status: a run with a free lock and no recorded end was killed."""
    return "killed" if ended.status == "RUNNING" and is_abandoned(run) else ended.status.lower()


def _progress(run: Run, now: datetime) -> RunProgress:
    path = config.project_root() / run.folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    ends = {points[0][3]: points[0][2] / 1000 for line in lines if (points := _epoch_points(line))}
    epochs, seconds_left = run.settings["train"]["epochs"], None
    if len(ends) > 1:
        each = statistics.median(after - before for before, after in itertools.pairwise(ends.values()))
        seconds_left = max(0.0, (epochs - len(ends)) * each - (now.timestamp() - max(ends.values())))
    return RunProgress(run_id=run.run_id, name=run.name, epoch=len(ends), epochs=epochs, seconds_left=seconds_left)


def describe(line: bytes) -> str | None:
    """Return a sentence about an epoch from a line of metrics.jsonl; None for other metrics or an incomplete line."""
    if not (points := _epoch_points(line)):
        return None
    return f"step {points[0][3]:,}: " + ", ".join(f"{name} {units.number(value, 4)}" for name, value, *_ in points)


def _epoch_points(line: bytes) -> list[Any]:
    """Return the points of an epoch from a line of metrics.jsonl, each with name, value, milliseconds and step."""
    try:
        points: list[Any] = json.loads(line)
        return points if any(name == "train/loss" for name, _, _, _ in points) else []
    except (ValueError, TypeError):
        return []

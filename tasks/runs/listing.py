"""All runs at a glance: their status, results, speed and size on the disk; one run in detail; how two differ."""

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import HEADLINES, Kept, R, Reproduction, Run, RunDetails, RunDifference, RunLine, RunList, RunSummary
from tasks.runs.entries import Entry, find_entries, find_entry, find_unreadable
from tasks.runs.locks import is_abandoned
from tasks.runs.outcome import is_pruned, load_record
from tasks.system import clock, errors, files
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
    """Return whether less of a metric such as ``test/my_code:far`` is better, as the newest evaluation that has it
    says; False where none has it."""
    for entry in find_entries("runs"):
        found = entry.evaluation
        if found is not None and metric in found.metrics:
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
        began=clock.at(run.start_time / 1000),
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


def show(run: Run) -> RunDetails:
    """Return what the records of a run say; what cannot be read of them is left out.

    Raises:
        UserError: params.yaml cannot be read; or the run was removed meanwhile.
    """
    summary = _load(run, "summary.json", RunSummary)
    reproduction = _load(run, "records/reproduction.json", Reproduction)
    entry = find_entry(run)
    if entry is None:
        raise UserError(f"run {run.run_id} is not in {run.folder} any more, or cannot be read there")
    training, evaluation, registered, ended = entry.training, entry.evaluation, entry.registration, entry.status
    return RunDetails(
        run=line_of(entry),
        folder=run.folder,
        reason=ended.reason if ended else None,
        lineage=run.lineage,
        flow_run_id=run.flow_run_id,
        experiment=run.experiment,
        host=run.host,
        settings=_different(run.settings, config.load().to_json()),
        epochs=training.epochs if training else None,
        steps=training.steps if training else None,
        num_replicas=training.num_replicas if training else None,
        devices=training.devices if training else (),
        weights_digest=training.weights_digest if training else None,
        checkpoint=evaluation.checkpoint if evaluation else None,
        seconds=summary.seconds if summary else {},
        checkpoints=_kept(run, "checkpoints"),
        models=_kept(run, "models"),
        model_uri=registered.model_uri if registered else None,
        aliases=registered.aliases if registered else (),
        why_no_version=registered.reason if registered else None,
        judgement=registered.judgement.told if registered and registered.judgement else None,
        notes=registered.notes if registered else (),
        changed=run.changed,
        # Which run this one was trained to reproduce, and what came of it.
        reproduces=f"{reproduction.run_id}: {reproduction.reason}" if reproduction else None,
    )


def compare(first: Run, second: Run) -> RunDifference:
    """Return what differs between two runs: settings, data, code, what came of them, and how fast.

    Raises:
        UserError: see ``show``.
    """
    found = _different(first.settings, second.settings)
    sides = [_facts(show(run)) | run.environment for run in (first, second)]
    found |= {
        what: (sides[0].get(what), sides[1].get(what))
        for what in dict.fromkeys([*sides[0], *sides[1]])
        if sides[0].get(what) != sides[1].get(what)
    }
    return RunDifference(first=first.run_id, second=second.run_id, differences=found)


def _facts(shown: RunDetails) -> dict[str, Any]:
    """Return what of a run is compared beside its settings."""
    line, lineage = shown.run, shown.lineage
    return {
        "data version": lineage.data_version,
        "code": lineage.code_digest,
        "stratagem": lineage.package_version,
        "git commit": lineage.git_commit,
        "uncommitted changes": lineage.git_dirty,
        "host": shown.host,
        "devices": ", ".join(shown.devices) or None,
        "status": line.status,
        "epochs": shown.epochs,
        "steps": shown.steps,
        **line.metrics,
        "examples/s": line.examples_per_second,
        **{f"seconds: {stage}": seconds for stage, seconds in shown.seconds.items()},
        "resumed with others": "; ".join(f"{one.what} {one.values}" for one in shown.changed) or None,
        "weights": shown.weights_digest,
        "model version": line.model_version,
    }


def _different(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values; None where one has no such key."""
    marks = config.marks_of(config.Settings)
    before, now = (dict(config.leaves(values, whole=marks)) for values in (first, second))
    keys = [*before, *(key for key in now if key not in before)]
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _load(run: Run, file: str, record_type: type[R]) -> R | None:
    """Return a record in a run's folder, None where it is missing or cannot be read."""
    with contextlib.suppress(UserError):
        return load_record(run, file, record_type)
    return None


def _kept(run: Run, part: str) -> tuple[Kept, ...]:
    """Return the checkpoints or the models of a run, the oldest first."""
    folder = config.project_root() / run.folder / part
    found = sorted((path for path in folder.glob("[!.]*")), key=_by_step) if not folder.is_symlink() else []
    return tuple(
        Kept(
            path=f"{run.folder}/{part}/{path.name}",
            bytes=files.num_bytes(path) if path.is_dir() else path.lstat().st_size,
        )
        for path in found
    )


def _by_step(path: Path) -> tuple[int, str]:
    return int(path.name) if path.name.isdigit() else 0, path.name

"""One run with all that its records say, and what differs between two."""

import contextlib
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.records import (
    Kept,
    R,
    Reproduction,
    Run,
    RunDetails,
    RunDifference,
    RunSummary,
)
from tasks.runs.entries import find_entry
from tasks.runs.listing import line_of
from tasks.system import files
from tasks.system.errors import UserError


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
        return records.load(record_type, config.project_root() / run.folder / file)
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

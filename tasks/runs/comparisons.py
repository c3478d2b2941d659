"""A comparison that did not come to its end: which one a command goes on with, and what it has measured so far."""

import socket
from pathlib import Path

from tasks import config, records
from tasks.records import ComparisonProgress, ComparisonRow, EvaluationResult, Run, TrainingResult
from tasks.runs.entries import find_entries
from tasks.runs.index import look_up
from tasks.runs.locks import is_abandoned
from tasks.runs.outcome import load_result
from tasks.system.errors import UserError


def save_progress(run: Run, progress: ComparisonProgress) -> None:
    """Keep what a comparison has measured so far."""
    records.save(progress, _file(run))


def load_progress(run: Run) -> ComparisonProgress:
    """Return what a comparison has measured: the trainings whose records are still there."""
    try:
        found = records.load(ComparisonProgress, _file(run))
    except UserError:  # It was killed before its first training had ended.
        return ComparisonProgress(sitting=1, rows=())
    return found.model_copy(update={"rows": tuple(row for row in found.rows if _is_there(row))})


def find_unfinished_comparison(key: str, dataset: str, wanted: records.Lineage) -> tuple[Run | None, str | None]:
    """Return the comparison to go on with, or why the newest that is unfinished is not that one.

    Args:
        key: of the rows and their settings, which the caller holds.
        dataset: the name of the data.
        wanted: the data and the code of now.

    Returns:
        (run, None), (None, why), or (None, None) where none on this dataset is unfinished and has measured something.
    """
    why = None
    for entry in find_entries("comparisons"):
        run = entry.run
        if entry.dataset != dataset or (entry.status is not None and entry.status.status == "FINISHED"):
            continue
        # While this process holds the key, no other one is at work under it.
        if not (run.key == key or is_abandoned(run)) or not load_progress(run).rows:
            continue
        others = _differences(run, key, wanted)
        if not others:
            return run, None
        why = why or (
            f"comparison {run.run_id} is unfinished, and does not go on: {' and '.join(others)}. A new one starts"
        )
    return None, why


def _differences(run: Run, key: str, wanted: records.Lineage) -> list[str]:
    found = []
    if run.key != key:
        found.append("it is of other rows, settings or processor cores")
    if run.lineage.data_version != wanted.data_version:
        found.append("the data are not what they were")
    if run.lineage.code_digest != wanted.code_digest:
        found.append("the code is not what it was")
    if run.host != socket.gethostname():
        found.append(f"it was begun on {run.host}")
    return found


def _is_there(row: ComparisonRow) -> bool:
    run = look_up(row.run_id) if row.run_id is not None else None
    return run is not None and None not in (load_result(run, TrainingResult), load_result(run, EvaluationResult))


def _file(run: Run) -> Path:
    return config.project_root() / run.folder / "records" / "progress.json"

"""What is known of each run without reading its files again: mlruns/catalogue.db, which is made from them.

Each start asks which run is the newest, which is unfinished, which has something to tell; to parse the files of all
runs for that takes 0.4 s at a thousand. Here a run that has ended, and has nothing to tell and nothing half-written, is
read once; all others are read at each question. Code that changes a run that had ended lets it be read again
(``forget``).

The files are the truth: what is found here is looked at in them before anything is done with it, and a catalogue that
is missing, damaged, or of another version is made anew.
"""

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tasks import config, records
from tasks.records import EvaluationResult, RegisteredModel, Run, RunStatus, RunSummary, TrainingResult
from tasks.system import files
from tasks.system.errors import UserError

logger = logging.getLogger(__name__)

VERSION = 4
PLACES = ("runs", "comparisons", "sweeps")
# The records that stages leave, in the order in which they are made.
RESULTS: dict[type[records.Record], str] = {
    TrainingResult: "training.json",
    EvaluationResult: "evaluation.json",
    RegisteredModel: "registration.json",
}
PRUNED = "records/pruned.json"
MOMENT_NANOSECONDS = 2 * 10**9


class Entry(NamedTuple):
    """A folder of mlruns/runs, mlruns/comparisons or mlruns/sweeps."""

    folder: str
    run_id: str | None = None
    """None where run.json is missing or cannot be read."""
    number: int = 0
    changed: int = 0
    """When run.json was written."""
    dataset: str | None = None
    parent_run_id: str | None = None
    data_version: str | None = None
    settings_digest: str | None = None
    code_digest: str | None = None
    status: str | None = None
    finished_at: str | None = None
    """From summary.json; None where there is none."""
    unsent: bool = False
    partial: bool = False
    problem: str | None = None
    """Why a file of it cannot be read."""
    began: int = 0
    """In milliseconds since 1970."""
    ended: str | None = None
    """When its status was written."""
    name: str | None = None
    model: str | None = None
    strategy: str | None = None
    loop: str | None = None
    git_commit: str | None = None
    flow_run_id: str | None = None
    metrics: str = "{}"
    """Of its evaluation, by name: JSON. None of a run that was not evaluated."""
    examples_per_second: float | None = None
    model_uri: str | None = None
    model_version: str | None = None
    """NAME/VERSION, as it was registered."""
    checkpoint_bytes: int = 0
    model_bytes: int = 0
    other_bytes: int = 0
    pruned: bool = False
    """Its checkpoints and models are gone, or are to go."""

    @property
    def is_final(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.run_id is not None and self.status != "RUNNING" and not self.unsent and not self.partial


COLUMNS = (*Entry._fields, "final")


def query(condition: str, *values: object) -> list[Entry]:
    """Return the entries for which a condition in SQL holds, as the files are now; it may go on with ORDER BY."""
    path = config.project_root() / "mlruns" / "catalogue.db"
    for place in (str(path), str(path), ":memory:"):
        try:
            with contextlib.closing(sqlite3.connect(place, timeout=10)) as connection:
                _refresh(connection)
                found = connection.execute(f"SELECT * FROM runs WHERE {condition}", values).fetchall()
                return [Entry(*row[:-1]) for row in found]
        except sqlite3.DatabaseError:
            with contextlib.suppress(OSError):  # A place that cannot be written: then without it.
                path.unlink(missing_ok=True)
    raise AssertionError("SQLite has no memory")


def forget(folder: str) -> None:
    """Let a run's files be read again."""
    path = config.project_root() / "mlruns" / "catalogue.db"
    if not path.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection, connection:
            connection.execute("UPDATE runs SET final = 0 WHERE folder = ?", (folder,))
    except sqlite3.Error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _refresh(connection: sqlite3.Connection) -> None:
    """Bring the table up to date: read the runs that are new or not final, and drop those that are gone."""
    root = config.project_root()
    if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DROP TABLE IF EXISTS runs")
            connection.execute("DROP TABLE IF EXISTS places")
            connection.execute(f"CREATE TABLE runs ({', '.join(COLUMNS)}, PRIMARY KEY (folder))")
            connection.execute("CREATE INDEX by_final ON runs (final)")
            connection.execute("CREATE INDEX by_number ON runs (number)")
            connection.execute("CREATE TABLE places (place PRIMARY KEY, changed)")
            connection.execute(f"PRAGMA user_version = {VERSION}")
    others = connection.execute("SELECT * FROM runs WHERE final = 0").fetchall()
    known = {entry.folder: entry for entry in (Entry(*row[:-1]) for row in others)}
    places = {place: _changed(root / "mlruns" / place) for place in PLACES}
    gone: set[str] = set()
    unread = set(known)
    noted = dict(connection.execute("SELECT place, changed FROM places"))
    if noted != places:
        final = {folder for (folder,) in connection.execute("SELECT folder FROM runs WHERE final = 1")}
        present: set[str] = set()
        for place in PLACES:
            try:
                present.update(f"mlruns/{place}/{name}" for name in os.listdir(root / "mlruns" / place))
            except PermissionError:  # To another user "no runs" would be untrue.
                raise files.no_access(root / "mlruns" / place) from None
            except OSError:
                pass
        gone, unread = (final | unread) - present, present - final
    read = [_read(folder, root) for folder in sorted(unread)]
    changed = [entry for entry in read if known.get(entry.folder) != entry or entry.is_final]
    # A folder that changed a moment ago may do so again, and have the same time.
    sure = {place: when for place, when in places.items() if when < time.time_ns() - MOMENT_NANOSECONDS}
    if not changed and not gone and sure.items() <= noted.items():
        return
    with connection:
        connection.executemany("DELETE FROM runs WHERE folder = ?", [(folder,) for folder in gone])
        marks = ", ".join("?" for _ in COLUMNS)
        rows = [(*entry, entry.is_final) for entry in changed]
        connection.executemany(f"INSERT OR REPLACE INTO runs VALUES ({marks})", rows)
        connection.executemany("INSERT OR REPLACE INTO places VALUES (?, ?)", sure.items())
    for entry in changed:
        if entry.problem is not None and entry.problem != known.get(entry.folder, entry._replace(problem=None)).problem:
            logger.warning("%s", entry.problem)  # Once, and not at each start.


def _changed(folder: Path) -> int:
    """Return when an entry of a folder was made or removed last; 0 where it is not there."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _read(folder: str, root: Path) -> Entry:
    """Return what the files of a run say."""
    place = root / folder
    entry = Entry(folder)
    with contextlib.suppress(OSError):
        partial = any(place.glob("checkpoints/.*.partial")) or any(place.glob("models/.*.partial*"))
        entry = entry._replace(
            unsent=(place / "unsent.jsonl").exists(),
            partial=partial,
            pruned=(place / PRUNED).exists(),
            checkpoint_bytes=files.num_bytes(place / "checkpoints"),
            model_bytes=files.num_bytes(place / "models"),
        )
        known = entry.checkpoint_bytes + entry.model_bytes
        entry = entry._replace(other_bytes=files.num_bytes(place) - known)
    problems = []
    for read in (_of_run, _of_status, _of_results):
        try:
            entry = entry._replace(**read(place, folder))
        except (UserError, OSError, LookupError, TypeError, AttributeError) as error:
            left = ". The run is left alone" if read is _of_run else ""
            problems.append(f"{error}{left}")
            if read is _of_status:
                entry = entry._replace(status="RUNNING")  # See ``outcome.status``.
    return entry._replace(problem="; ".join(problems) or None)


def _of_run(place: Path, folder: str) -> dict[str, Any]:
    """Return what a run's own record says of it: nothing where there is none.

    Raises:
        UserError: it cannot be read, or is of another folder, which a copy would lead to.
    """
    file = place / "records" / "run.json"
    if not file.exists():
        return {}
    run = records.load(Run, file)
    if run.folder != folder:
        raise UserError(f"{file} is of {run.folder}: a copy in another folder")
    settings = run.settings
    changed = file.stat().st_mtime_ns
    return {
        "run_id": run.run_id,
        "number": run.number,
        "changed": changed,
        "began": run.start_time or changed // 10**6,
        "name": run.name,
        "dataset": settings["dataset"]["name"],
        "model": settings.get("model", {}).get("name"),
        "strategy": settings.get("strategy", {}).get("kind"),
        "loop": settings.get("train", {}).get("loop"),
        "parent_run_id": run.parent_run_id,
        "flow_run_id": run.flow_run_id,
        **run.lineage.model_dump(include={"data_version", "settings_digest", "code_digest", "git_commit"}),
    }


def _of_status(place: Path, folder: str) -> dict[str, Any]:
    file = place / "status.json"
    if not file.exists():
        return {}
    found = records.load(RunStatus, file)
    return {"status": found.status, "ended": found.at or None}


def _of_results(place: Path, folder: str) -> dict[str, Any]:
    """Return what its stages left: from its summary, or from the records of those that came to their end."""
    found: dict[str, Any] = {}
    if (file := place / "summary.json").exists():
        summary = records.load(RunSummary, file)
        found |= {"finished_at": summary.finished_at, "dataset": summary.dataset, "metrics": summary.metrics}
        found |= summary.model_dump(include={"examples_per_second", "model_uri", "model_version"})
    # A stage that was done again after the summary has a newer record.
    written = file.stat().st_mtime_ns if found else 0
    for record_type, read in _RESULTS.items():
        result = place / "records" / RESULTS[record_type]
        if result.exists() and result.stat().st_mtime_ns > written:
            found |= read(records.load(record_type, result))
    return found | ({"metrics": json.dumps(found["metrics"])} if "metrics" in found else {})


def _of_registration(result: Any) -> dict[str, Any]:
    version = result.model_version and f"{result.model_name}/{result.model_version}"
    return {"model_uri": result.model_uri, "model_version": version}


_RESULTS: dict[type[records.Record], Callable[[Any], dict[str, Any]]] = {
    TrainingResult: lambda result: {"examples_per_second": result.examples_per_second},
    EvaluationResult: lambda result: {"metrics": result.metrics},
    RegisteredModel: _of_registration,
}

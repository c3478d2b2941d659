"""The runs in mlruns/ as their own files describe them, the newest first. To read those of 1,000 runs takes 0.3 s."""

import functools
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from tasks import config, records
from tasks.records import EvaluationResult, RegisteredModel, Run, RunStatus, RunSummary, TrainingResult
from tasks.runs import outcome
from tasks.system import files
from tasks.system.errors import UserError

PLACES = ("runs", "comparisons", "sweeps")
"""The folders of mlruns/ that hold runs. Those in the last two are the parents of others."""

R = TypeVar("R", bound=records.Record)


@dataclass(frozen=True)
class Results:
    """What the stages of a run have left so far."""

    metrics: dict[str, float]
    """Of its evaluation, by name; none of a run that was not evaluated."""
    examples_per_second: float | None = None
    model_uri: str | None = None
    model_version: str | None = None
    """NAME/VERSION, as it was registered."""
    problem: str | None = None
    """Why one of the records cannot be read."""


@dataclass(frozen=True)
class Entry:
    """A run, a comparison or a sweep whose record can be read; its other files are read at the first question."""

    run: Run
    changed: int
    """When its record was written, in nanoseconds since 1970."""
    dataset: str
    model: str
    strategy: str
    loop: str

    @cached_property
    def status(self) -> RunStatus | None:
        """How it ended, or that it is at work; see ``outcome.status``."""
        return outcome.status(self.run)

    @property
    def is_running(self) -> bool:
        """Whether its status says that a process is at work on it."""
        return self.status is not None and self.status.status == "RUNNING"

    @property
    def is_unsent(self) -> bool:
        """Whether it has something to tell MLflow."""
        return (config.project_root() / self.run.folder / "unsent.jsonl").exists()

    @cached_property
    def results(self) -> Results:
        """What its stages have left."""
        return _results_of(self.run)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file and folder in its folder, by name."""
        return sizes_in(self.run.folder)

    @property
    def problem(self) -> str | None:
        """Why a file of it cannot be read; None where all can."""
        # A status that cannot be read has no time.
        of_status = self.status.reason if self.status is not None and not self.status.at else None
        return "; ".join(one for one in (of_status, self.results.problem) if one) or None


def find_entries(*places: str) -> list[Entry]:
    """Return the runs, comparisons or sweeps that can be read, the newest first.

    Args:
        places: some of ``PLACES``.

    Raises:
        UserError: a folder is another user's.
    """
    root = config.project_root()
    found = [_load(root, folder) for place in places for folder in _folders_in(root, place)]
    entries = [one for one in found if isinstance(one, Entry)]
    return sorted(entries, key=lambda entry: (entry.run.number, entry.changed), reverse=True)


def find_entry(run: Run) -> Entry | None:
    """Return a run as its files are now; None where its record is gone or cannot be read."""
    found = _load(config.project_root(), run.folder)
    return found if isinstance(found, Entry) else None


def find_unreadable() -> dict[str, str]:
    """Return the folders in mlruns/runs whose record cannot be read, and why."""
    root = config.project_root()
    found = {folder: _load(root, folder) for folder in _folders_in(root, "runs")}
    return {folder: f"{why}. The run is left alone" for folder, why in found.items() if isinstance(why, str)}


def sizes_in(folder: str) -> dict[str, int]:
    """Return the bytes of each file and folder in a run's folder, by name."""
    sizes = {}
    try:
        with os.scandir(config.project_root() / folder) as found:
            for one in found:
                is_folder = one.is_dir(follow_symlinks=False)
                sizes[one.name] = (
                    files.num_bytes(Path(one.path)) if is_folder else one.stat(follow_symlinks=False).st_size
                )
    except OSError:  # Removed meanwhile, or another user's.
        pass
    return sizes


def _folders_in(root: Path, place: str) -> list[str]:
    try:
        names = os.listdir(root / "mlruns" / place)
    except PermissionError:  # To another user "no runs" would be untrue.
        raise files.no_access(root / "mlruns" / place) from None
    except OSError:
        return []
    return [f"mlruns/{place}/{name}" for name in names if not name.startswith(".")]


def _load(root: Path, folder: str) -> Entry | str | None:
    """Return the entry of a folder, or why its record cannot be read; None where it has no record."""
    path = root / folder / "records" / "run.json"
    try:
        stat = path.stat()
        run = _read(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
        if run.folder != folder:
            return f"{path} is of {run.folder}: a copy in another folder"
        settings = run.settings
        return Entry(
            run=run,
            changed=stat.st_mtime_ns,
            dataset=settings["dataset"]["name"],
            model=settings.get("model", {}).get("name") or "",
            strategy=settings.get("strategy", {}).get("kind") or "",
            loop=settings.get("train", {}).get("loop") or "",
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UserError, OSError, LookupError, TypeError, AttributeError) as error:
        return str(error)


@functools.cache
def _read(path: Path, file: tuple[int, int, int]) -> Run:
    """Return a run's record. A process asks for all of them several times, and reads each once: a record that is saved
    again is another file."""
    return records.load(Run, path)


def _results_of(run: Run) -> Results:
    """Return what the summary of a run says, and the records of the stages that were done after it."""
    summary = config.project_root() / run.folder / "summary.json"
    found: dict[str, object] = {"metrics": {}}
    try:
        written = 0
        if summary.exists():
            written = summary.stat().st_mtime_ns
            of_summary = {"metrics", "examples_per_second", "model_uri", "model_version"}
            found = records.load(RunSummary, summary).model_dump(include=of_summary)
        if (training := _newer(run, TrainingResult, written)) is not None:
            found["examples_per_second"] = training.examples_per_second
        if (evaluation := _newer(run, EvaluationResult, written)) is not None:
            found["metrics"] = evaluation.metrics
        if (made := _newer(run, RegisteredModel, written)) is not None:
            version = made.model_version and f"{made.model_name}/{made.model_version}"
            found |= {"model_uri": made.model_uri, "model_version": version}
    except (UserError, OSError) as error:
        found["problem"] = str(error)
    return Results(**found)  # type: ignore[arg-type]


def _newer(run: Run, record_type: type[R], written: int) -> R | None:
    """Return the record of a stage that was written after a time, None where there is none."""
    path = outcome.result_file(run, record_type)
    return records.load(record_type, path) if path.exists() and path.stat().st_mtime_ns > written else None

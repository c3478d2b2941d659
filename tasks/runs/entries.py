"""The runs in mlruns/ as their own files describe them, the newest first. To read those of 1,000 runs takes 0.3 s."""

import contextlib
import functools
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tasks import config, records
from tasks.records import EvaluationResult, R, RegisteredModel, Run, RunStatus, TrainingResult
from tasks.runs import outcome
from tasks.system import files
from tasks.system.errors import UserError

PLACES = ("runs", "comparisons", "sweeps")
"""The folders of mlruns/ that hold runs. Those in the last two are the parents of others."""


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
    def training(self) -> TrainingResult | None:
        """What its training left, if that can be read."""
        return self._result(TrainingResult)

    @cached_property
    def evaluation(self) -> EvaluationResult | None:
        """What its evaluation left, if that can be read."""
        return self._result(EvaluationResult)

    @cached_property
    def registration(self) -> RegisteredModel | None:
        """What its registration left, if that can be read."""
        return self._result(RegisteredModel)

    @property
    def model_version(self) -> str | None:
        """NAME/VERSION of its model, as it was registered."""
        made = self.registration
        return f"{made.model_name}/{made.model_version}" if made is not None and made.model_version else None

    def problem(self) -> str | None:
        """Return why a file of it cannot be read; None where all can."""
        # A status that cannot be read has no time.
        found = [str(self.status.reason)] if self.status is not None and not self.status.at else []
        read = zip(outcome.RESULTS, (self.training, self.evaluation, self.registration), strict=True)
        for record_type in (record_type for record_type, result in read if result is None):
            try:
                outcome.load_result(self.run, record_type)
            except UserError as error:
                found.append(str(error))
        return "; ".join(found) or None

    def _result(self, record_type: type[R]) -> R | None:
        with contextlib.suppress(UserError):
            return outcome.load_result(self.run, record_type)
        return None


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

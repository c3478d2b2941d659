"""The runs in mlruns/ as their own files describe them, the newest first, and the one that a command means or resumes.

To read the files of 1,000 runs takes 0.3 s.
"""

import contextlib
import functools
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tasks import config, records
from tasks.records import EvaluationResult, R, RegisteredModel, Run, RunStatus, TrainingResult
from tasks.runs import outcome
from tasks.system import errors, files
from tasks.system.errors import UserError

PLACES = ("runs", "comparisons", "sweeps")
"""The folders of mlruns/ that hold runs. Those in the last two are the parents of others."""
# As MLflow and ``uuid4().hex`` write it.
ID = re.compile("[0-9a-f]{32}")
PREFIX = re.compile("[0-9a-f]{1,32}")


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
            model=settings["model"]["name"],
            strategy=settings["strategy"]["kind"],
            loop=settings["train"]["loop"],
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


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a run, and not a path or anything else."""
    return ID.fullmatch(text) is not None


def find_run(run_id: str) -> Run:
    """Return a run by its id.

    Raises:
        UserError: there is none. What is not an id, such as a path, names none either.
    """
    path = config.project_root() / "mlruns" / "runs" / run_id / "records" / "run.json"
    if not is_id(run_id) or not path.exists():
        known = [entry.run.run_id for entry in find_entries("runs")]
        see = f"the newest runs: {', '.join(known[:5])}" if known else "there is none yet"
        raise UserError(errors.one_of("run", run_id, known, see))
    return records.load(Run, path)


def resolve(name: str) -> Run:
    """Return the run that a person names: by its id, the first letters of it that no other run has, or ``latest``.

    Raises:
        UserError: there is none, or there are several.
    """
    if name == "latest":
        return newest(None)
    if PREFIX.fullmatch(name):
        found = [entry.run.run_id for entry in find_entries("runs") if entry.run.run_id.startswith(name)]
        if len(found) > 1:
            raise UserError(
                f"run '{name}': {len(found):,} runs begin so: {errors.listed(sorted(found), 5)}. Give more of it"
            )
        name = found[0] if found else name
    return find_run(name)


def find_named(settings: config.Settings, resume: str | None) -> Run | None:
    """Return the run that is to be resumed: by its id, or the ``latest`` on the settings' dataset; None for None.

    Raises:
        UserError: there is none.
    """
    if resume is None:
        return None
    return newest(settings.dataset.name) if resume == "latest" else resolve(resume)


def newest(dataset: str | None) -> Run:
    """Return the run on a dataset, or on any, that was started or resumed last.

    Raises:
        UserError: there is none.
    """
    for entry in find_entries("runs"):
        if dataset in (None, entry.dataset):
            return entry.run
    on = "" if dataset is None else f" on {dataset}"
    raise UserError(f"there is no run{on} in mlruns/: train one first, or name a run with --run")


def find_unfinished(settings: config.Settings, wanted: records.Lineage) -> Run | None:
    """Return the newest run with these settings, data and code if it is unfinished, else None.

    The caller holds the key of the settings, so none of them is at work. A run of a comparison is left to it; one whose
    loss was not a number would come to the same end again.
    """
    found = [entry.run for entry in find_entries("runs") if entry.run.parent_run_id is None]
    same = ("data_version", "settings_digest", "code_digest")
    alike = (run for run in found if all(getattr(run.lineage, name) == getattr(wanted, name) for name in same))
    run = next(alike, None)
    ended = outcome.status(run) if run is not None else None
    if run is None or ended is None or ended.status == "FINISHED" or outcome.is_pruned(run):
        return None
    allowed = settings.train.max_rollbacks if settings.train.on_nonfinite == "rollback" else 0
    return None if len(outcome.nonfinite_steps(run)) > allowed else run


def load(folder: str) -> Run | None:
    """Return the run of a folder, None where that cannot be read."""
    with contextlib.suppress(UserError):
        return records.load(Run, config.project_root() / folder / "records" / "run.json")
    return None


def look_up(run_id: str) -> Run | None:
    """Return a run, a comparison or a sweep by its id, None where there is none; what is not an id names none."""
    if not is_id(run_id):
        return None
    return load(f"mlruns/runs/{run_id}") or look_up_parent(run_id)


def look_up_parent(run_id: str) -> Run | None:
    """Return the comparison or the sweep of an id, None where there is none."""
    return next((found for place in PLACES[1:] if (found := load(f"mlruns/{place}/{run_id}")) is not None), None)


def kind_of_parent(run_id: str) -> str:
    """Return what a run's parent is called: ``comparison`` or ``sweep``."""
    return "sweep" if (config.project_root() / "mlruns" / "sweeps" / run_id).is_dir() else "comparison"


def children(run_id: str) -> list[Run]:
    """Return the runs of a comparison or a sweep, the newest first."""
    return [entry.run for entry in find_entries("runs") if entry.run.parent_run_id == run_id]


def sweeps() -> list[Run]:
    """Return the sweeps that can be read, the newest first."""
    return [entry.run for entry in find_entries("sweeps")]


def find_not_final() -> list[Run]:
    """Return the runs, comparisons and sweeps that say that they are at work, or have something to tell MLflow."""
    return [entry.run for entry in find_entries(*PLACES) if entry.is_running or entry.is_unsent]


def next_number() -> int:
    """Return the number of the run that is started or resumed now."""
    return 1 + max((entry.run.number for entry in find_entries(*PLACES)), default=0)


def finished() -> list[str]:
    """Return the ids of the runs that have finished."""
    return [path.parent.name for path in (config.project_root() / "mlruns" / "runs").glob("*/summary.json")]


def undelivered() -> list[str]:
    """Return the ids of runs that have something to tell MLflow."""
    return [entry.run.run_id for entry in find_entries(*PLACES) if entry.is_unsent]

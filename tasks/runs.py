"""The runs in mlruns/: which are at work, how the others ended, and which one a command takes up.

Whoever leads a run holds a lock, which the kernel frees when that process dies, however it does, and keeps a note of
what it does. A note without its lock is of a process that was killed.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from tasks import config, errors, records
from tasks.errors import UserError
from tasks.records import EvaluationResult, Holder, NonFinite, R, RegisteredModel, Run, RunStatus, TrainingResult

# Who only looks whether a lock is free holds it for a moment.
MOMENT_SECONDS = 2.0


class Hold:
    """A run that this process leads."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self._path = path
        self.holder = holder
        records.save(holder, path)

    def note(self, **known: str) -> None:
        """Note what is known by now: ``run_id``."""
        self.holder = self.holder.model_copy(update=known)
        records.save(self.holder, self._path)


def key_of(settings: config.Settings) -> str:
    """Return what two commands that would do the same have in common."""
    return settings.digest()[:16]


@contextlib.contextmanager
def hold(key: str, what: str, flow_run_id: str | None = None) -> Iterator[Hold]:
    """Be the one process that does this, until the block ends or the process dies.

    Args:
        key: of the settings, see ``key_of``; or any name for what is one of a kind.
        what: as others are told it, such as ``one_device fit on digits``.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: another process does it now; names it.
    """
    folder = _folder()
    lock = FileLock(folder / f"{key}.lock", timeout=MOMENT_SECONDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise _refusal(key, what) from None
    except OSError as error:
        raise UserError(
            f"{lock.lock_file} cannot be written ({error.strerror}): it may be another user's. Ask them, or make "
            "mlruns/active writable and remove it"
        ) from None
    path = folder / f"{key}.{uuid.uuid4().hex[:8]}.json"
    try:
        yield Hold(
            path,
            Holder(
                key=key,
                pid=os.getpid(),
                host=socket.gethostname(),
                since=datetime.now(UTC).isoformat(timespec="seconds"),
                what=what,
                flow_run_id=flow_run_id,
            ),
        )
    finally:
        path.unlink(missing_ok=True)
        # Still locked: who has opened it sees that it is gone, and makes another one.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def hold_run(settings: config.Settings, resume: str | None = None, flow_run_id: str | None = None) -> Iterator[Hold]:
    """Be the one process that runs these settings, and that is at work on the run that is to be resumed.

    Args:
        resume: the id of a run, or ``latest`` on the settings' dataset.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: another process is; or there is no such run.
    """
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(hold(key_of(settings), describe(settings), flow_run_id))
        named = find_named(settings, resume)
        if named is not None and named.key != held.holder.key:
            stack.enter_context(hold(named.key, f"run {named.run_id}", flow_run_id))
        yield held


def refuse_held(settings: config.Settings, resume: str | None = None) -> None:
    """Refuse what another process is doing now, before anything is started.

    Raises:
        UserError: names that process; or there is no run to resume.
    """
    named = find_named(settings, resume)
    for key, what in [(key_of(settings), describe(settings))] + (
        [(named.key, f"run {named.run_id}")] if named is not None else []
    ):
        if is_held(key):
            raise _refusal(key, what)


def find_named(settings: config.Settings, resume: str | None) -> Run | None:
    """Return the run that is to be resumed: by its id, or the ``latest`` on the settings' dataset; None for None.

    Raises:
        UserError: there is none.
    """
    if resume is None:
        return None
    return newest(settings.dataset.name) if resume == "latest" else find(resume)


def describe(settings: config.Settings) -> str:
    """Return what a run is called before it has a name."""
    return f"{settings.strategy.kind} {settings.train.loop} on {settings.dataset.name}"


def is_held(key: str) -> bool:
    """Return whether a process, also this one, is at work on what has this key."""
    try:
        descriptor = os.open(_folder() / f"{key}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:  # Another user's, who need not be at work; nothing of theirs is ours to end.
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_over(run: Run) -> bool:
    """Return whether no process of this host is at work on a run; False for another host's."""
    return run.host == socket.gethostname() and not is_held(run.key)


def abandoned() -> list[tuple[Path, Holder]]:
    """Return the notes of this host's processes that died at work, and where each lies."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(UserError):  # Just ended.
            holder = records.load(Holder, path)
            # Not by the time of the note: a clock may be set back.
            at_work = is_held(holder.key) and psutil.pid_exists(holder.pid)
            if holder.host == socket.gethostname() and not at_work:
                found.append((path, holder))
    return found


def remove_leftovers() -> list[Path]:
    """Remove what killed processes left half-written in data/ and in the folders of runs; return what it was."""
    root = config.project_root()
    removed = []
    for lock, pattern in ((".download.lock", ".scratch.*"), (".prepare.lock", ".prepared.*")):
        for path in root.glob(f"data/*/{pattern}"):
            with contextlib.suppress(Timeout), FileLock(path.with_name(lock), blocking=False):
                shutil.rmtree(path, ignore_errors=True)  # Another process may be doing the same.
                removed.append(path)
    for path in [*root.glob("mlruns/runs/*/checkpoints/.*.partial"), *root.glob("mlruns/runs/*/models/.*.partial*")]:
        with contextlib.suppress(UserError):
            run = records.load(Run, path.parent.parent / "records" / "run.json")
            if is_over(run):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def undelivered() -> list[str]:
    """Return the ids of runs that have something to tell MLflow."""
    return [path.parent.name for path in config.project_root().glob("mlruns/*/*/unsent.jsonl")]


def settle(run: Run, status: str, reason: str | None = None) -> None:
    """Write down that a run is at work, or how it ended."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = RunStatus.model_validate({"status": status, "reason": reason, "at": now})
    records.save(record, config.project_root() / run.folder / "status.json")


def status(run: Run) -> RunStatus | None:
    """Return how a run ended, or that it is at work; None for one that has nothing of it."""
    path = config.project_root() / run.folder / "status.json"
    return records.load(RunStatus, path) if path.exists() else None


def find_unfinished(settings: config.Settings, wanted: records.Lineage) -> Run | None:
    """Return the newest run with these settings, data and code that did not come to its end, or None.

    The caller holds the key of the settings, so none of them is at work. A run of a comparison is left to it; one whose
    loss was not a number would come to the same end again.
    """
    for run in begun():
        same = (run.lineage.data_version, run.lineage.settings_digest, run.lineage.code_digest) == (
            wanted.data_version,
            wanted.settings_digest,
            wanted.code_digest,
        )
        if same and run.parent_run_id is None:
            ended = status(run)
            if ended is None or ended.status == "FINISHED":
                return None
            allowed = settings.train.max_rollbacks if settings.train.on_nonfinite == "rollback" else 0
            return None if len(nonfinite_steps(run)) > allowed else run
    return None


def nonfinite_steps(run: Run) -> tuple[int, ...]:
    """Return the steps at which the loss of a run was no finite number."""
    path = _mark(run)
    return records.load(NonFinite, path).steps if path.exists() else ()


def mark_nonfinite(run: Run, step: int) -> None:
    """Mark a run whose loss was no finite number."""
    records.save(NonFinite(steps=(*nonfinite_steps(run), step)), _mark(run))


def _mark(run: Run) -> Path:
    return config.project_root() / run.folder / "records" / "nonfinite.json"


def find(run_id: str) -> Run:
    """Return a run by its id.

    Raises:
        UserError: there is none.
    """
    path = config.project_root() / "mlruns" / "runs" / run_id / "records" / "run.json"
    if not path.exists():
        known = [run.run_id for run in begun()]
        see = f"the newest runs: {', '.join(known[:5])}" if known else "there is none yet"
        raise UserError(errors.one_of("run", run_id, known, see))
    return records.load(Run, path)


def begun() -> list[Run]:
    """Return all runs that were begun, the newest first."""
    found = []
    for path in config.project_root().glob("mlruns/runs/*/records/run.json"):
        with contextlib.suppress(UserError):  # Killed while it was written.
            run = records.load(Run, path)
            found.append((run.number, path.stat().st_mtime_ns, run))
    return [run for *_, run in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def next_number() -> int:
    """Return the number of the run that begins or is taken up now."""
    return 1 + max((run.number for run in begun()), default=0)


def newest(dataset: str) -> Run:
    """Return the run on a dataset that began last.

    Raises:
        UserError: there is none.
    """
    for run in begun():
        if run.settings["dataset"]["name"] == dataset:
            return run
    raise UserError(f"no run on {dataset} has begun in mlruns/: train one first, or name a run with --run")


RESULTS: dict[type[records.Record], str] = {
    TrainingResult: "training.json",
    EvaluationResult: "evaluation.json",
    RegisteredModel: "registration.json",
}


def left_by(run: Run, kind: type[R]) -> R | None:
    """Return the record that a stage of a run left, None where it did not come to its end."""
    path = config.project_root() / run.folder / "records" / RESULTS[kind]
    return records.load(kind, path) if path.exists() else None


def load_training(run: Run) -> TrainingResult:
    """Return what the training of a run left.

    Raises:
        UserError: it was not trained to its end.
    """
    if (found := left_by(run, TrainingResult)) is None:
        raise UserError(
            f"run {run.run_id} was not trained to its end: go on with `stratagem train --resume {run.run_id}`"
        )
    return found


def load_evaluation(run: Run) -> EvaluationResult:
    """Return the evaluation of a run.

    Raises:
        UserError: it was not evaluated.
    """
    if (found := left_by(run, EvaluationResult)) is None:
        raise UserError(f"run {run.run_id} was not evaluated: `stratagem evaluate --run {run.run_id}`")
    return found


def forget_results(run: Run) -> None:
    """Remove what the stages of a run left, because it is to train on; its checkpoints stay."""
    folder = config.project_root() / run.folder
    for path in (folder / "summary.json", *(folder / "records" / name for name in RESULTS.values())):
        path.unlink(missing_ok=True)


def finished() -> list[str]:
    """Return the ids of the runs that have finished."""
    return [path.parent.name for path in config.project_root().glob("mlruns/runs/*/summary.json")]


def _folder() -> Path:
    return config.project_root() / "mlruns" / "active"


def _refusal(key: str, what: str) -> UserError:
    who = ""
    for path in _folder().glob(f"{key}.*.json"):
        with contextlib.suppress(UserError):  # Just ended.
            holder = records.load(Holder, path)
            run = f", run {holder.run_id}" if holder.run_id else ""
            if psutil.pid_exists(holder.pid) or holder.host != socket.gethostname():
                who = f" by process {holder.pid} on {holder.host} since {holder.since}{run}"
    return UserError(
        f"{what} with these settings is being done{who}: wait for its end, end that process, or change a setting, such "
        "as --set train.seed=1"
    )

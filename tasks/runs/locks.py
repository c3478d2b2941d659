"""Locks of running runs.

The process of a run holds two locks: the run's lock and one on a note that describes what it does. The kernel releases
both when the process dies, for any reason. A note with a free lock belongs to a killed process, whose incomplete files
are then removed.

A process only ends runs of this machine and this project. A host name and a path do not identify these: two containers
may share both.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from tasks import config, records
from tasks.records import Holder, Run
from tasks.runs import outcome
from tasks.runs.entries import PLACES, find_runs, load, read_runs, resolve
from tasks.system import files, network
from tasks.system.errors import UserError

logger = logging.getLogger(__name__)

# A process that tests whether a lock is free holds it for a moment.
MOMENT_SECONDS = 2.0
SCRATCH = ("data/*/.scratch.*", "data/*/.prepared.*", "mlruns/.cache.*")
"""Glob patterns of a project's scratch folders."""


class RunLock:
    """The lock of a run in this process, with the note that describes it."""

    def __init__(self, note: IO[str], holder: Holder) -> None:
        self._note = note
        self.holder = holder
        fcntl.flock(note, fcntl.LOCK_EX)
        self.note()

    def note(self, **known: str) -> None:
        """Add known fields, such as ``run_id``, to the note."""
        self.holder = self.holder.model_copy(update=known)
        self._note.seek(0)
        self._note.write(self.holder.model_dump_json())
        self._note.truncate()
        self._note.flush()


def key_of(settings: config.Settings) -> str:
    """Return the lock key of the settings: two commands with the same work have the same key."""
    return settings.digest()[:16]


def key_of_asked(settings: config.Settings) -> str:
    """Return the key of a command that still waits for its data, which determine the remaining settings."""
    return f"asked-{key_of(settings)}"


@contextlib.contextmanager
def lock(key: str, what: str, flow_run_id: str | None = None) -> Iterator[RunLock]:
    """Hold the exclusive lock of a key until the block ends or the process dies.

    Args:
        key: the key of the settings, see ``key_of``; or any name for work that only one process may do.
        what: the description that other processes read, such as ``one_device fit on digits``.
        flow_run_id: the id of the Prefect flow run.

    Raises:
        UserError: another process holds the lock; names that process.
    """
    folder = _folder()
    file_lock = FileLock(folder / f"{key}.lock", timeout=MOMENT_SECONDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file_lock.acquire()
    except Timeout:
        raise _refusal(key, what) from None
    except OSError as error:
        raise UserError(
            f"{file_lock.lock_file} cannot be written ({error.strerror}): it may belong to another user. Ask them, or "
            "make mlruns/active writable and remove it"
        ) from None
    path = folder / f"{key}.{uuid.uuid4().hex[:8]}.json"
    try:
        with path.open("w", encoding="utf-8") as note:
            yield RunLock(
                note,
                Holder(
                    key=key,
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    boot=boot_id(),
                    since=records.now(),
                    what=what,
                    flow_run_id=flow_run_id,
                ),
            )
    finally:
        path.unlink(missing_ok=True)
        # Remove the file while it is locked: a process that has opened it notices this and creates a new file.
        Path(file_lock.lock_file).unlink(missing_ok=True)
        file_lock.release()


@contextlib.contextmanager
def lock_run(settings: config.Settings, resume: str | None = None, flow_run_id: str | None = None) -> Iterator[RunLock]:
    """Hold the locks of these settings and of the run to resume, as ``lock`` does.

    Args:
        settings: the settings of the run.
        resume: the id of a run, or ``latest`` on the settings' dataset.
        flow_run_id: the id of the Prefect flow run.

    Raises:
        UserError: another process holds a lock; or the run to resume does not exist.
    """
    with contextlib.ExitStack() as stack:
        run_lock = stack.enter_context(lock(key_of(settings), describe(settings), flow_run_id))
        named = resolve(resume, settings.dataset.name) if resume is not None else None
        if named is not None and named.key != run_lock.holder.key:
            stack.enter_context(lock(named.key, f"run {named.run_id}", flow_run_id))
        yield run_lock


def refuse_locked(settings: config.Settings, resume: str | None = None) -> None:
    """Refuse, before anything starts, to run what another process is running.

    Raises:
        UserError: names that process; or the run to resume does not exist.
    """
    named = resolve(resume, settings.dataset.name) if resume is not None else None
    wanted = dict.fromkeys((key_of(settings), key_of_asked(settings)), describe(settings))
    if named is not None:
        wanted[named.key] = f"run {named.run_id}"
    for key, what in wanted.items():
        if is_locked(key):
            raise _refusal(key, what)


def describe(settings: config.Settings) -> str:
    """Return the description of a run that has no name yet."""
    return f"{settings.strategy.kind} {settings.train.loop} on {settings.dataset.name}"


def is_locked(key: str) -> bool:
    """Return whether any process, including this one, holds the lock of a key."""
    try:
        return files.is_locked(_folder() / f"{key}.lock")
    except FileNotFoundError:
        return False
    except OSError:  # It belongs to another user, who may be using it.
        return True


def is_abandoned(run: Run) -> bool:
    """Return whether a run of this machine has no process, in any container; False for a run of another machine."""
    return _is_here(run) and not is_locked(run.key)


def at_work_on(dataset: str) -> list[Run]:
    """Return the running runs and comparisons on a dataset; on another machine, those with the status RUNNING."""
    found = [run for run in find_runs(*PLACES) if run.dataset == dataset]
    return [run for run in found if outcome.is_running(run) and not is_abandoned(run)]


def crashed_holders() -> list[tuple[Path, Holder]]:
    """Return the notes of this machine's processes that died during their work, with their paths."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(UserError, OSError):  # The process has just ended.
            holder = records.load(Holder, path)
            if _is_here(holder) and not files.is_locked(path):
                found.append((path, holder))
    return found


def remove_leftovers(mine: str = "") -> list[Path]:
    """Remove the incomplete files of killed processes in data/ and in the folders of runs, and their cached records.

    Args:
        mine: a key that the caller holds, so that no other process works under it.

    Returns:
        The removed paths.
    """
    root = config.project_root()
    removed = files.remove_scratch([path for pattern in SCRATCH for path in root.glob(pattern)], root)
    for folder in [one for place in PLACES for one in root.glob(f"mlruns/{place}/*")]:
        for path in half_written(folder):
            run = load(folder.relative_to(root).as_posix())
            if run is not None and (run.key == mine or is_abandoned(run)) and files.is_inside(path, root):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                removed.append(path)
    # A free lock file belongs to a killed process.
    for path in _folder().glob("*.lock"):
        with contextlib.suppress(Timeout, OSError), FileLock(path, blocking=False):
            path.unlink(missing_ok=True)
    for why in read_runs("runs")[1].values():
        logger.warning("%s", why)
    return removed


def half_written(folder: Path) -> list[Path]:
    """Return the incomplete files in a run's folder, of the current process of the run or of a killed one."""
    return [*folder.glob(".*.partial*"), *folder.glob("*/.*.partial*")]


def _is_here(left: Run | Holder) -> bool:
    """Return whether a run or a note belongs to this machine, where locks are reliable. The host name alone is not
    enough, because each container has its own; nor is the boot id, which changes at each start."""
    return left.host == socket.gethostname() or (left.boot != "" and left.boot == boot_id())


def _folder() -> Path:
    return config.project_root() / "mlruns" / "active"


def _refusal(key: str, what: str) -> UserError:
    who = ""
    for path in _folder().glob(f"{key}.*.json"):
        with contextlib.suppress(UserError, OSError):  # Just ended.
            holder = records.load(Holder, path)
            run = f", run {holder.run_id}" if holder.run_id else ""
            if files.is_locked(path):
                who = f" in process {holder.pid} on {holder.host} since {holder.since}{run}"
    return UserError(
        f"{what} with these settings is already running{who}: wait until it ends, stop that process, or change a "
        "setting, such as --set train.seed=1"
    )


def project_id() -> str:
    """Return the id that distinguishes this project's folder on a shared MLflow server; the first call creates it.

    It consists of the text in mlruns/.id and that file's inode number. So it is the same in all containers that share
    the folder and after a move within the file system, but not in a copy, whose original may have running runs.

    Raises:
        StratagemError: mlruns/.id cannot be read or written.
    """
    path = config.project_root() / "mlruns" / ".id"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Another process may be writing it.
            file.seek(0)
            if not (found := file.read(32)):
                found = uuid.uuid4().hex
                file.write(found)
            return f"{found}.{os.fstat(file.fileno()).st_ino}"
    except OSError as error:
        raise files.unwritable(path, error) from None


def store_name() -> str:
    """Return the name under which a run records its MLflow store: empty for the project's own store, which moves with
    the project."""
    return network.without_userinfo(os.environ.get("MLFLOW_TRACKING_URI", ""))


def boot_id() -> str:
    """Return the boot id of this machine, the same in all its containers; empty if unavailable."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""

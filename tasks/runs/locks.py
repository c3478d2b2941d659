"""Which runs are at work.

The process at work on a run holds a lock, which the kernel frees when that process dies, however it does, and keeps a
note of what it does. A note without its lock is of a process that was killed; what that left half-written is removed.

What a process may end is of this machine and of this project. A host's name and a path do not identify them: two
containers may have both in common.
"""

import contextlib
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from tasks import config, records
from tasks.records import Holder, Run
from tasks.runs.entries import PLACES, find_entries, find_named, find_unreadable, load
from tasks.system import clock, files, network
from tasks.system.errors import UserError

logger = logging.getLogger(__name__)

# A process that looks whether a lock is free holds it for a moment.
MOMENT_SECONDS = 2.0


class RunLock:
    """The lock of a run that this process is at work on, with the note of what it does."""

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


def key_of_asked(settings: config.Settings) -> str:
    """Return the same of commands that still wait for their data, by which the rest of the settings is chosen."""
    return f"asked-{key_of(settings)}"


@contextlib.contextmanager
def lock(key: str, what: str, flow_run_id: str | None = None) -> Iterator[RunLock]:
    """Take the lock of a key, which one process alone can have, until the block ends or the process dies.

    Args:
        key: of the settings, see ``key_of``; or any name for what is done once.
        what: what others read about it, such as ``one_device fit on digits``.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: another process does it now; names it.
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
            f"{file_lock.lock_file} cannot be written ({error.strerror}): it may be another user's. Ask them, or make "
            "mlruns/active writable and remove it"
        ) from None
    path = folder / f"{key}.{uuid.uuid4().hex[:8]}.json"
    try:
        yield RunLock(
            path,
            Holder(
                key=key,
                pid=os.getpid(),
                host=socket.gethostname(),
                boot=boot_id(),
                process_space=process_space(),
                since=clock.now(),
                what=what,
                flow_run_id=flow_run_id,
            ),
        )
    finally:
        path.unlink(missing_ok=True)
        # Still locked: who has opened it sees that it is gone, and makes another one.
        Path(file_lock.lock_file).unlink(missing_ok=True)
        file_lock.release()


@contextlib.contextmanager
def lock_run(settings: config.Settings, resume: str | None = None, flow_run_id: str | None = None) -> Iterator[RunLock]:
    """Take the lock of these settings, and that of the run that is to be resumed, as ``lock`` does.

    Args:
        resume: the id of a run, or ``latest`` on the settings' dataset.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: another process is; or there is no such run.
    """
    with contextlib.ExitStack() as stack:
        run_lock = stack.enter_context(lock(key_of(settings), describe(settings), flow_run_id))
        named = find_named(settings, resume)
        if named is not None and named.key != run_lock.holder.key:
            stack.enter_context(lock(named.key, f"run {named.run_id}", flow_run_id))
        yield run_lock


def refuse_locked(settings: config.Settings, resume: str | None = None) -> None:
    """Refuse what another process is doing now, before anything is started.

    Raises:
        UserError: names that process; or there is no run to resume.
    """
    named = find_named(settings, resume)
    wanted = dict.fromkeys((key_of(settings), key_of_asked(settings)), describe(settings))
    if named is not None:
        wanted[named.key] = f"run {named.run_id}"
    for key, what in wanted.items():
        if is_locked(key):
            raise _refusal(key, what)


def describe(settings: config.Settings) -> str:
    """Return what a run is called before it has a name."""
    return f"{settings.strategy.kind} {settings.train.loop} on {settings.dataset.name}"


def is_locked(key: str) -> bool:
    """Return whether a process, also this one, is at work on what has this key."""
    try:
        return files.is_locked(_folder() / f"{key}.lock")
    except FileNotFoundError:
        return False
    except OSError:  # Another user's, who need not be at work; nothing of theirs is ours to end.
        return True


def is_abandoned(run: Run) -> bool:
    """Return whether no process of this machine, in any container, is at work on a run; False for another machine's."""
    return _is_here(run) and not is_locked(run.key)


def at_work_on(dataset: str) -> list[Run]:
    """Return the runs and comparisons on a dataset that are at work; those of another machine, if they say so."""
    running = [entry.run for entry in find_entries(*PLACES) if entry.is_running and entry.dataset == dataset]
    return [run for run in running if not is_abandoned(run)]


def crashed_holders() -> list[tuple[Path, Holder]]:
    """Return the notes of this machine's processes that died at work, and where each lies."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(UserError):  # Just ended.
            holder = records.load(Holder, path)
            # Not by the time of the note: a clock may be set back.
            if _is_here(holder) and not (is_locked(holder.key) and _may_live(holder)):
                found.append((path, holder))
    return found


def remove_leftovers(mine: str = "") -> list[Path]:
    """Remove what killed processes left half-written in data/ and in the folders of runs, with the records that they
    cached; return the paths.

    Args:
        mine: a key that the caller holds; what was done under it before is over.
    """
    root = config.project_root()
    removed = []
    for lock, pattern in ((".download.lock", ".scratch.*"), (".prepare.lock", ".prepared.*")):
        for path in root.glob(f"data/*/{pattern}"):
            if files.is_inside(path, root):  # Not even a lock is written elsewhere.
                with contextlib.suppress(Timeout), FileLock(path.with_name(lock), blocking=False):
                    removed += files.remove_scratch([path], root)
    for path in root.glob("mlruns/.cache.*"):
        if (path / files.MARK).is_file():
            with contextlib.suppress(Timeout, OSError), FileLock(path / files.MARK, blocking=False):
                removed += files.remove_scratch([path], root)
    for path in [*root.glob("mlruns/runs/*/checkpoints/.*.partial"), *root.glob("mlruns/runs/*/models/.*.partial*")]:
        run = load(path.parents[1].relative_to(root).as_posix())
        if run is not None and (run.key == mine or is_abandoned(run)) and files.is_inside(path, root):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path)
    # Those of processes that were killed: that they are free says all.
    for path in _folder().glob("*.lock"):
        with contextlib.suppress(Timeout, OSError), FileLock(path, blocking=False):
            path.unlink(missing_ok=True)
    for why in find_unreadable().values():
        logger.warning("%s", why)
    return removed


def _is_here(left: Run | Holder) -> bool:
    """Return whether a run or a note is of this machine, where a lock tells who is at work. The host name alone does
    not say it, because containers have names of their own; nor the boot id alone, which changes at each start."""
    return left.host == socket.gethostname() or (left.boot != "" and left.boot == boot_id())


def _may_live(holder: Holder) -> bool:
    """Return whether the process of a note may be the one that holds the lock; a process id says it only where it was
    noted, not in another container."""
    seen_here = holder.process_space == process_space() if holder.process_space else holder.host == socket.gethostname()
    return not seen_here or psutil.pid_exists(holder.pid)


def _folder() -> Path:
    return config.project_root() / "mlruns" / "active"


def _refusal(key: str, what: str) -> UserError:
    who = ""
    for path in _folder().glob(f"{key}.*.json"):
        with contextlib.suppress(UserError):  # Just ended.
            holder = records.load(Holder, path)
            run = f", run {holder.run_id}" if holder.run_id else ""
            if _may_live(holder):
                who = f" by process {holder.pid} on {holder.host} since {holder.since}{run}"
    return UserError(
        f"{what} with these settings is being done{who}: wait for its end, end that process, or change a setting, such "
        "as --set train.seed=1"
    )


def project_id() -> str:
    """Return what this project's folder is called by others that share an MLflow server; made when first asked for.

    It lies in mlruns/.id and ends with that file's number in the file system: it stays when the folder is moved there,
    is seen by all containers that share the folder, and is another one in a copy, whose original may be at work.

    Raises:
        StratagemError: mlruns/.id cannot be read or written.
    """
    path = config.project_root() / "mlruns" / ".id"
    try:
        return _read_id(path) or _make_id(path)
    except OSError as error:
        raise files.unwritable(path, error) from None


def _read_id(path: Path) -> str | None:
    """Return the id; None where there is no file, or a damaged one."""
    with contextlib.suppress(FileNotFoundError, ValueError), path.open(encoding="ascii") as file:
        return f"{uuid.UUID(file.read(64)).hex}.{os.fstat(file.fileno()).st_ino}"
    return None


def _make_id(path: Path) -> str:
    """Make the file in one step, whole, unless another process has just done it; return the id."""
    path.parent.mkdir(exist_ok=True)
    if path.exists():  # Damaged. What the old id names is then ended by nobody: better than to end what is at work.
        path.unlink(missing_ok=True)
    new = uuid.uuid4().hex
    aside = path.with_name(f".id.{new}")
    aside.write_text(new, encoding="ascii")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    except OSError:  # A file system without links.
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    return _read_id(path) or _make_id(path)


def store_name() -> str:
    """Return the name by which a run remembers its MLflow store: empty for the project's own, which may be moved
    with it."""
    return network.without_userinfo(os.environ.get("MLFLOW_TRACKING_URI", ""))


def boot_id() -> str:
    """Return what names this machine from its start to its end, in all containers; empty where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def process_space() -> str:
    """Return what names the processes among which a process id means one; empty where nothing does."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"
    return ""

"""A run on its way to its remote: while it trains, at its end, and later what was left.

What lies in the run's folder is the whole truth, and copying is making the remote like it: what is not there yet is
copied, and what is gone here is removed there. So nothing need be remembered while the remote is away.
"""

import contextlib
import functools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tasks import config, records, runs
from tasks.records import Copy, Run, ToCopy
from tasks.runs import committed, uncommitted
from tasks.runs.remote.address import Place, open_place, reason
from tasks.system import clock, files
from tasks.system.errors import StratagemError

INDEX = "run.json"
MARK = "remote.json"
LOCK = ".remote.lock"
# What no other machine needs.
LEFT_HERE = ("checkpoints", "damaged_checkpoints", MARK)
# What nobody else is to read, and no other machine needs to go on.
PRIVATE = uncommitted.FILE
MAX_TEXT_BYTES = 4 * 2**20

LOOK_SECONDS = 1.0
# A remote that did not take something is asked again after so long.
PAUSE_SECONDS = 10.0
# The end of a run waits as long as something arrives, and so long for the next part of it.
PATIENCE_SECONDS = 60.0
# What copied the run a moment ago may be at a large checkpoint.
LOCK_SECONDS = 3600.0


class TakenOver(StratagemError):
    """Another project trains the run now, and alone copies it."""


@contextlib.contextmanager
def copied_meanwhile(run: Run, address: str | None) -> Iterator[None]:
    """Copy a run from a thread, at each new checkpoint, while the block runs; the block waits for nothing.

    Args:
        run: one in mlruns/runs; no other is copied.
        address: ``checkpoint.remote``; None copies nothing.
    """
    if address is None or not run.folder.startswith("mlruns/runs/"):
        yield
        return
    _save_mark(run, ToCopy(address=address))
    ended = threading.Event()
    threading.Thread(target=_copy_until, args=(run, address, ended), name="remote-copier", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _copy_until(run: Run, address: str, ended: threading.Event) -> None:
    seen = None
    while not ended.wait(LOOK_SECONDS):
        now = steps_in(config.project_root() / run.folder)
        if now == seen:
            continue
        try:
            copy_run(run, address)
            if seen is None:
                deliver_kept(address)  # It answers: what runs before this one left.
            seen = now
        except TakenOver as error:
            print(error, file=sys.stderr)
            return
        except Exception as error:  # Whatever ails the remote, the training goes on.
            _tell_once(run, address, error)
            ended.wait(PAUSE_SECONDS)


def finish(run: Run) -> None:
    """Copy what is left of a run that has ended; where the remote does not take it, it is kept for ``deliver_kept``.

    Args:
        run: its status says that it has ended.
    """
    mark = _load_mark(run)
    if mark is None:
        return
    done: list[BaseException | None] = []

    def copy() -> None:
        try:
            copy_run(run, mark.address)
            done.append(None)
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=copy, name="remote-finisher", daemon=True)
    thread.start()
    since = time.time()
    while thread.is_alive() and time.time() - max(since, _last_progress(run)) < PATIENCE_SECONDS:
        thread.join(0.2)
    error = done[0] if done else TimeoutError(f"nothing arrived in {PATIENCE_SECONDS:g} seconds")
    if isinstance(error, TakenOver):
        print(error, file=sys.stderr)
    elif error is not None:
        _tell_once(run, mark.address, error)


def deliver_kept(address: str | None = None) -> tuple[list[records.Ended], list[str]]:
    """Copy what is left of all runs that have ended; return what was copied, and which runs were not, and why.

    Args:
        address: look at what was to be copied there alone.
    """
    copied, kept = [], []
    for path in sorted((config.project_root() / "mlruns" / "runs").glob(f"*/{MARK}")):
        run = runs.look_up(path.parent.name)
        mark = _load_mark(run) if run is not None else None
        if run is None or mark is None or runs.is_locked(run.key) or address not in (None, mark.address):
            continue
        try:
            copy_run(run, mark.address)
            copied.append(
                records.Ended(what=f"the copy of run {run.run_id}", status="whole", reason=f"it is at {mark.address}")
            )
        except Exception as error:
            kept.append(f"run {run.run_id} is not all at {mark.address}: {reason(error)}")
    return copied, kept


def copy_run(run: Run, address: str) -> None:
    """Make the remote like the run's folder: checkpoints, then all other files, then the index that names them; only
    then is removed what is gone here.

    Raises:
        TakenOver: another project trains the run now.
        Exception: what the remote's file system raises.
    """
    folder = config.project_root() / run.folder
    if (folder / "records" / "pruned.json").exists():
        (folder / MARK).unlink(missing_ok=True)  # What was pruned here to make room stays there.
        return
    try:
        with FileLock(folder / LOCK, timeout=LOCK_SECONDS):
            _copy(run, folder, address)
    except Timeout:
        raise TimeoutError("another process copies this run") from None


def _copy(run: Run, folder: Path, address: str) -> None:
    place = open_place(address).below("runs", run.run_id)
    there = place.find()
    before = read_index(place) if INDEX in there else None
    if before is not None and before.project != runs.project_id():
        (folder / MARK).unlink(missing_ok=True)
        raise TakenOver(taken_over(run.run_id, address, before))
    ended = _has_ended(run)
    steps = steps_in(folder)
    texts, others = _texts_and_others(folder)
    for step in steps:
        _copy_checkpoint(folder, place, step, there)
    index = _copy_files(folder, place, before, texts, others, there)
    gone = {step_of(name) for name in there} - {None, *steps, *steps_in(folder)} if steps else set()
    for name in sorted(there, key=lambda name: not name.endswith(f"/{committed.STATE}")):
        # A folder that lost all its checkpoints is no reason to lose them there, too.
        if step_of(name) in gone or (name.startswith("files/") and name.removeprefix("files/") not in index.files):
            place.remove(name)  # Of a checkpoint the state first: without it, what is left is none.
    if ended:
        (folder / MARK).unlink(missing_ok=True)
    elif (mark := _load_mark(run)) is not None and mark.told:
        print(f"run {run.run_id} is copied to {address} again", file=sys.stderr)
        _save_mark(run, mark.model_copy(update={"told": False}))


def _copy_checkpoint(folder: Path, place: Place, step: int, there: dict[str, int]) -> None:
    checkpoint, name = folder / "checkpoints" / str(step), f"checkpoints/{step}"
    try:
        state = (checkpoint / committed.STATE).read_bytes()
        if f"{name}/{committed.STATE}" in there:
            if place.read(f"{name}/{committed.STATE}") == state:
                return
            place.remove(f"{name}/{committed.STATE}")  # Of another training of this step, which is done again.
        committed.verify(checkpoint)
        for path in sorted(checkpoint.iterdir()):
            if path.name != committed.STATE:
                place.put(path, f"{name}/{path.name}", _progress(folder))
    except (ValueError, KeyError):
        return  # It is damaged here; what restores it says so.
    except FileNotFoundError:
        if checkpoint.exists():
            raise
        return  # Pruned meanwhile.
    place.write(f"{name}/{committed.STATE}", state)


def _texts_and_others(folder: Path) -> tuple[dict[str, str], list[Path]]:
    """Return the small texts of a run, with what is in them now, and its other files."""
    texts, others = {}, []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts) or path.suffix == ".lock"
        left_here = name.parts[0] in LEFT_HERE or name.as_posix() == PRIVATE
        if hidden or left_here or path.is_symlink() or not path.is_file():
            continue
        if len(name.parts) == 1 or name.parts[0] == "records":
            with contextlib.suppress(UnicodeDecodeError, FileNotFoundError):
                if path.stat().st_size <= MAX_TEXT_BYTES:
                    texts[name.as_posix()] = path.read_text(encoding="utf-8")
                    continue
        others.append(path)
    return texts, others


def _copy_files(
    folder: Path, place: Place, before: Copy | None, texts: dict[str, str], others: list[Path], there: dict[str, int]
) -> Copy:
    known, found = before.files if before is not None else {}, {}
    for path in others:
        name = path.relative_to(folder).as_posix()
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            digest = _digest(path, stat.st_size, stat.st_mtime_ns)
            if known.get(name) != digest or there.get(f"files/{name}") != stat.st_size:
                place.put(path, f"files/{name}", _progress(folder))
            found[name] = digest
    index = Copy(project=runs.project_id(), host=socket.gethostname(), at=clock.now(), texts=texts, files=found)
    if before is None or index.model_copy(update={"at": before.at}) != before:
        write_index(place, index)
    return index


@functools.cache
def _digest(path: Path, size: int, changed: int) -> str:
    """Return the sha256 of a file, which is read again when it was written to."""
    return files.digest(path)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's file by its name at a remote, None of any other file."""
    parts = name.split("/")
    return int(parts[1]) if parts[0] == "checkpoints" and len(parts) == 3 and parts[1].isdigit() else None


def _progress(folder: Path) -> Any:
    """Return a callback that notes in the time of the lock's file that a part of a file has arrived."""
    from fsspec.callbacks import Callback  # 0.1 s that a run without a remote need not wait for.

    lock = folder / LOCK
    return Callback(hooks={"progress": lambda size, value, **more: lock.touch()})


def _last_progress(run: Run) -> float:
    with contextlib.suppress(FileNotFoundError):
        return (config.project_root() / run.folder / LOCK).stat().st_mtime
    return 0.0


def steps_in(folder: Path) -> list[int]:
    """Return the steps whose checkpoint lies in a run's folder, rising."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


def read_index(place: Place) -> Copy:
    """Return what a remote has of a run.

    Raises:
        FileNotFoundError: nothing, or it was not copied to its end even once.
        ValueError: it is not what was written.
        UserError: it is of another format.
    """
    return Copy.model_validate(committed.parse(place.read(INDEX), f"{place.root}/{INDEX}"))


def write_index(place: Place, index: Copy) -> None:
    """Write what a remote has of a run."""
    place.write(INDEX, committed.signed(index.model_dump(mode="json")))


def taken_over(run_id: str, address: str, index: Copy) -> str:
    """Return the message for a run that another project goes on with."""
    return (
        f"run {run_id} is gone on with by another copy of the project, on {index.host} since {index.at} ({address}): "
        "nothing more of it is copied from here. Resume it there, or start a new one with --fresh"
    )


def _has_ended(run: Run) -> bool:
    status = runs.status(run)
    return status is not None and status.status != "RUNNING"


def _tell_once(run: Run, address: str, error: BaseException) -> None:
    mark = _load_mark(run)
    if mark is None or mark.told:
        return
    _save_mark(run, mark.model_copy(update={"told": True}))
    print(
        f"run {run.run_id} cannot be copied to {address} now ({reason(error)}): it goes on, and what there is to copy "
        "is kept and copied later, also by `stratagem reconcile`",
        file=sys.stderr,
    )


def _load_mark(run: Run) -> ToCopy | None:
    path: Any = config.project_root() / run.folder / MARK
    with contextlib.suppress(StratagemError):
        return records.load(ToCopy, path) if path.exists() else None
    return None


def _save_mark(run: Run, mark: ToCopy) -> None:
    with contextlib.suppress(OSError):  # A full disk: the training tells it.
        records.save(mark, config.project_root() / run.folder / MARK)

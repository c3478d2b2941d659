"""A run on its way to its remote: while it trains, at its end, and later what was left.

What lies in the run's folder is the whole truth, and copying is making the remote like it: what is not there yet is
copied, and what is gone here is removed there. So nothing need be remembered while the remote is away.
"""

import contextlib
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
from tasks.system import files, utc
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
def copied_meanwhile(
    run: Run, address: str | None, look_seconds: float = LOOK_SECONDS, pause_seconds: float = PAUSE_SECONDS
) -> Iterator[None]:
    """Copy a run from a thread, at each new checkpoint, while the block runs; the block waits for nothing.

    Args:
        run: one in mlruns/runs; no other is copied.
        address: ``checkpoint.remote``; None copies nothing.
        look_seconds: after so long it is looked for a new checkpoint again.
        pause_seconds: after so long more a remote that did not take something is asked again.
    """
    if address is None or not run.folder.startswith("mlruns/runs/"):
        yield
        return
    _save_mark(run, ToCopy(address=address))
    ended = threading.Event()
    given = (run, address, ended, look_seconds, pause_seconds)
    threading.Thread(target=_copy_until, args=given, name="remote-copier", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _copy_until(run: Run, address: str, ended: threading.Event, look_seconds: float, pause_seconds: float) -> None:
    copier, seen = Copier(run, address), None
    while not ended.wait(look_seconds):
        now = copier.steps()
        if now == seen:
            continue
        try:
            copier.copy()
            if seen is None:
                deliver_kept(address)  # It answers: what runs before this one left.
            seen = now
        except TakenOver as error:
            print(error, file=sys.stderr)
            return
        except Exception as error:  # Whatever ails the remote, the training goes on.
            _tell_once(run, address, error)
            ended.wait(pause_seconds)


def finish(run: Run, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Copy what is left of a run that has ended; where the remote does not take it, it is kept for ``deliver_kept``.

    Args:
        run: its status says that it has ended.
        patience_seconds: so long it is waited for the next part to arrive.
    """
    mark = _load_mark(run)
    if mark is None:
        return
    done: list[BaseException | None] = []

    def copy() -> None:
        try:
            Copier(run, mark.address).copy()
            done.append(None)
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=copy, name="remote-finisher", daemon=True)
    thread.start()
    since = time.time()
    while thread.is_alive() and time.time() - max(since, _last_progress(run)) < patience_seconds:
        thread.join(0.2)
    error = done[0] if done else TimeoutError(f"nothing arrived in {patience_seconds:g} seconds")
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
            Copier(run, mark.address).copy()
            copied.append(
                records.Ended(what=f"the copy of run {run.run_id}", status="whole", reason=f"it is at {mark.address}")
            )
        except Exception as error:
            kept.append(f"run {run.run_id} is not all at {mark.address}: {reason(error)}")
    return copied, kept


class Copier:
    """Copies one run, as often as it is asked to."""

    def __init__(self, run: Run, address: str) -> None:
        self.run, self.address = run, address
        self.folder = config.project_root() / run.folder
        self._markers: dict[int, bytes] = {}
        """``state.json`` of the checkpoints that are known to be there."""
        self._digests: dict[str, tuple[int, int, str]] = {}

    def steps(self) -> list[int]:
        """Return the steps whose checkpoint is whole here, rising."""
        return steps_in(self.folder)

    def copy(self) -> None:
        """Make the remote like the run's folder: checkpoints, then all other files, then the index that names them;
        only then is removed what is gone here.

        Raises:
            TakenOver: another project trains the run now.
            Exception: what the remote's file system raises.
        """
        if (self.folder / "records" / "pruned.json").exists():
            (self.folder / MARK).unlink(missing_ok=True)  # What was pruned here to make room stays there.
            return
        try:
            with FileLock(self.folder / LOCK, timeout=LOCK_SECONDS):
                self._copy()
        except Timeout:
            raise TimeoutError("another process copies this run") from None

    def _copy(self) -> None:
        place = open_place(self.address).below("runs", self.run.run_id)
        there = place.find()
        before = read_index(place) if INDEX in there else None
        if before is not None and before.project != runs.project_id():
            (self.folder / MARK).unlink(missing_ok=True)
            raise TakenOver(taken_over(self.run.run_id, self.address, before))
        ended = _has_ended(self.run)
        steps = self.steps()
        texts, others = self._listed()
        for step in steps:
            self._copy_checkpoint(place, step, there)
        index = self._copy_files(place, before, texts, others, there)
        gone = {_step_of(name) for name in there} - {None, *steps, *self.steps()} if steps else set()
        for name in sorted(there, key=lambda name: not name.endswith(f"/{committed.STATE}")):
            # A folder that lost all its checkpoints is no reason to lose them there, too.
            if _step_of(name) in gone or (name.startswith("files/") and name.removeprefix("files/") not in index.files):
                place.remove(name)  # Of a checkpoint the state first: without it, what is left is none.
        if ended:
            (self.folder / MARK).unlink(missing_ok=True)
        elif (mark := _load_mark(self.run)) is not None and mark.told:
            print(f"run {self.run.run_id} is copied to {self.address} again", file=sys.stderr)
            _save_mark(self.run, mark.model_copy(update={"told": False}))

    def _copy_checkpoint(self, place: Place, step: int, there: dict[str, int]) -> None:
        folder, name = self.folder / "checkpoints" / str(step), f"checkpoints/{step}"
        try:
            marker = (folder / committed.STATE).read_bytes()
            if f"{name}/{committed.STATE}" in there:
                if self._markers.get(step, place.read(f"{name}/{committed.STATE}")) == marker:
                    self._markers[step] = marker
                    return
                place.remove(f"{name}/{committed.STATE}")  # Of another training of this step, which is done again.
            committed.verify(folder)
            for path in sorted(folder.iterdir()):
                if path.name != committed.STATE:
                    place.put(path, f"{name}/{path.name}", _progress(self.folder))
        except (ValueError, KeyError):
            return  # It is damaged here; what restores it says so.
        except FileNotFoundError:
            if folder.exists():
                raise
            return  # Pruned meanwhile.
        place.write(f"{name}/{committed.STATE}", marker)
        self._markers[step] = marker

    def _listed(self) -> tuple[dict[str, str], list[Path]]:
        """Return the small texts of the run, with what is in them now, and its other files."""
        texts, others = {}, []
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in name.parts) or path.suffix == ".lock"
            if hidden or name.parts[0] in LEFT_HERE or name.as_posix() == PRIVATE:
                continue
            if path.is_symlink() or not path.is_file():
                continue
            if len(name.parts) == 1 or name.parts[0] == "records":
                with contextlib.suppress(UnicodeDecodeError, FileNotFoundError):
                    if path.stat().st_size <= MAX_TEXT_BYTES:
                        texts[name.as_posix()] = path.read_text(encoding="utf-8")
                        continue
            others.append(path)
        return texts, others

    def _copy_files(
        self, place: Place, before: Copy | None, texts: dict[str, str], others: list[Path], there: dict[str, int]
    ) -> Copy:
        known, found = before.files if before is not None else {}, {}
        for path in others:
            name = path.relative_to(self.folder).as_posix()
            with contextlib.suppress(FileNotFoundError):
                digest, size = self._digest(path, name), path.stat().st_size
                if known.get(name) != digest or there.get(f"files/{name}") != size:
                    place.put(path, f"files/{name}", _progress(self.folder))
                found[name] = digest
        index = Copy(project=runs.project_id(), host=socket.gethostname(), at=utc.now(), texts=texts, files=found)
        if before is None or index.model_copy(update={"at": before.at}) != before:
            write_index(place, index)
        return index

    def _digest(self, path: Path, name: str) -> str:
        stat = path.stat()
        size, changed, digest = self._digests.get(name, (-1, -1, ""))
        if (size, changed) != (stat.st_size, stat.st_mtime_ns):
            digest = files.digest(path)
            self._digests[name] = stat.st_size, stat.st_mtime_ns, digest
        return digest


def _step_of(name: str) -> int | None:
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
    """
    return Copy.model_validate(committed.parse(place.read(INDEX)))


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

"""`stratagem up`: whether what it keeps runs and answers, and what one that was killed has left in mlruns/up/."""

import os
import shlex
import socket
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks import records
from tasks.operations.doctor import Here, Remark
from tasks.operations.doctor._sqlite import look_at
from tasks.records import Operation
from tasks.system import files
from tasks.system.errors import UserError, listed
from tasks.system.machine import find_process
from tasks.system.network import unreachable_reason

ANSWER_SECONDS = 2.0
AGAIN = "stratagem down && stratagem up --detach"


def look(here: Here) -> Iterator[Remark]:
    """Yield what is wrong with what `stratagem up` runs, or with what it has left."""
    folder = here.root / "mlruns" / "up"
    if not os.path.lexists(folder):
        yield Remark("ok", "it was never started here")
        return
    if wrong := _look_at_folder(folder):
        yield wrong
        return
    try:
        held = files.is_locked(folder / "lock")
    except FileNotFoundError:
        held = False
    looked = look_at(folder / "prefect" / "prefect.db", "prefect", "`stratagem up`")
    yield from (one for one in looked if one.level != "ok")
    try:
        state = records.load(Operation, folder / "state.json") if (folder / "state.json").exists() else None
    except UserError as error:
        mend = AGAIN if held else f"rm {shlex.quote(str(folder / 'state.json'))}; `stratagem up` writes it anew"
        yield Remark("error" if held else "warning", f"its state is of another version, or damaged: {error}", mend)
        return
    yield from (_look_at_running(state) if held else _look_at_ended(state))


def _look_at_folder(folder: Path) -> Remark | None:
    """Return why passwords are not safe in a folder; None if they are."""
    quoted, found = shlex.quote(str(folder)), folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        text = f"{folder} is a link, a file or another user's, and is to hold passwords"
        return Remark("error", text, f"mv {quoted} {quoted}.aside")
    if stat.S_IMODE(found.st_mode) & 0o077:
        return Remark("error", f"others may enter {folder}, which has passwords", f"chmod 700 {quoted}")
    return None


def _look_at_running(state: Operation | None) -> Iterator[Remark]:
    if state is None or find_process(state.pid, state.created) is None:
        if state is not None and state.host != socket.gethostname():
            yield Remark("warning", f"it runs on {state.host}, which shares this folder", "stratagem down, there")
        else:
            yield Remark(
                "warning", "it has just been started, or another process holds mlruns/up/lock", "stratagem status"
            )
        return
    silent = [
        f"{one.name} ({one.last_end or 'no answer'})"
        for one in state.services
        if find_process(one.pid, one.created) is None
        or (one.address and unreachable_reason(f"{one.address}/", ANSWER_SECONDS) is not None)
    ]
    if silent:
        text = f"it runs, and does not have all that it keeps: {listed(silent)}"
        yield Remark("warning", text, f"stratagem status; see mlruns/up/*.log; {AGAIN}")
    if others := list(_other_versions(state)):
        yield Remark("warning", f"it runs what is no more installed: {listed(others)}", AGAIN)
    if not silent and not others:
        yield Remark("ok", f"it runs since {state.since}, and all answers")


def _other_versions(state: Operation) -> Iterator[str]:
    """Yield the packages whose installed version is not the running one."""
    for package, running in state.versions.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = "not installed"
        if running != installed:
            yield f"{package} {running}, now {installed}"


def _look_at_ended(state: Operation | None) -> Iterator[Remark]:
    if state is None or state.phase == "ending" or state.host != socket.gethostname():
        yield Remark("ok", "it does not run")
        return
    left = [str(one.pid) for one in state.services if find_process(one.pid, one.created) is not None]
    still = f"; of what it kept, processes {listed(left)} are ending" if left else ""
    text = f"it was killed (it began {state.since}){still}: schedules do not fire, nothing continues what was running"
    yield Remark("warning", text, "stratagem up --detach")

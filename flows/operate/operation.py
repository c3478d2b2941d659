"""What `stratagem up` writes into mlruns/up/ while it runs, and what other commands read there.

Only the user may enter the folder, whatever the mode of mlruns/: it holds the password of the servers and Prefect's
database. `up` runs if its lock is held; the kernel frees the lock when the process dies.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
from filelock import FileLock, Timeout

from flows.operate.prefect_server import make_password
from tasks import config, records
from tasks.records import Operation
from tasks.system import files
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import find_process

POOL = "local-process"
"""The work pool of prefect.yaml."""
WORKER = "up"
KEY = re.compile(r"[\w-]+:[\w-]{32,}")
# A process that looks whether the lock is free holds it for a moment.
MOMENT_SECONDS = 2.0
# A guard gives flow runs a minute, then what it guards another one, and what that leaves behind twice its grace.
END_SECONDS = 150.0
ANSWER_SECONDS = 10.0


def folder() -> Path:
    """Return mlruns/up, which only this user may enter; it is made if it is not there.

    Raises:
        UserError: it is another user's, or no folder.
    """
    path = config.project_root() / "mlruns" / "up"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.getuid():
            raise UserError(f"{path} is a link or another user's: it is to hold passwords. Move it away")
        if stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise files.unwritable(path, error) from None
    return path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold the lock of what runs here, or of a database, within the block; False where another process holds it."""
    file_lock = FileLock(path, timeout=MOMENT_SECONDS, mode=0o600)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file_lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        raise files.unwritable(path, error) from None
    try:
        yield True
    finally:
        file_lock.release()


def is_held() -> bool:
    """Return whether a process keeps the servers of this project."""
    try:
        return files.is_locked(config.project_root() / "mlruns" / "up" / "lock")
    except OSError:
        return False


def load() -> Operation | None:
    """Return the record of what `stratagem up` runs here, or ran last; None where there is none that can be read."""
    try:
        return records.load(Operation, config.project_root() / "mlruns" / "up" / "state.json")
    except UserError:
        return None


def save(state: Operation) -> None:
    """Write mlruns/up/state.json."""
    records.save(state, folder() / "state.json")


def private_key() -> str:
    """Return the password of the servers, ``user:password``: the one of the last start, which a browser and a shell may
    hold, unless others could have read it."""
    path = folder() / "key"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            key = path.read_text(encoding="utf-8").strip()
            if KEY.fullmatch(key):
                return key
    key = make_password()
    with files.replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(key + "\n")
    return key


def write_environment(values: dict[str, str]) -> Path:
    """Write the variables with which a shell can ask the servers, for `source`; return the path."""
    path = folder() / "environment"
    with files.replacing(path) as temporary:
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())
        temporary.write_text(lines, encoding="utf-8")
        temporary.chmod(0o600)
    return path


def created(pid: int) -> float:
    """Return when a process began, in seconds since 1970; 0.0 where there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def await_leftovers(state: Operation | None) -> None:
    """Wait for the end of what an `up` that was killed had started: its guards end by themselves."""
    if state is not None and state.host == socket.gethostname():
        left = [found for one in state.services if (found := find_process(one.pid, one.created)) is not None]
        psutil.wait_procs(left, END_SECONDS)


def take_down() -> bool:
    """End what runs here and wait for it; False where nothing does.

    Raises:
        StratagemError: it does not end, or it is another machine's.
    """
    if not is_held():
        return False
    state, process = load(), None
    end = time.monotonic() + 2 * END_SECONDS  # One that has just begun writes its state after the leftovers' end.
    while state is None or (process := find_process(state.pid, state.created)) is None:
        if time.monotonic() > end or (state is not None and state.host != socket.gethostname()):
            break
        if not is_held():
            return False
        time.sleep(0.2)
        state = load()
    if state is None or process is None:
        where = f" on {state.host}" if state else ""
        raise StratagemError(f"{folder()}/lock is held by a process{where} that cannot be found here: end it there")
    process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 2 * END_SECONDS
    while is_held() or find_process(state.pid, state.created) is not None:
        if time.monotonic() > end:
            raise StratagemError(f"process {state.pid} (`stratagem up`) does not end: see {folder()}/up.log")
        time.sleep(0.2)
    return True


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    """Return what the Prefect server of `up` answers; None where it does not.

    Args:
        address: of the server.
        path: below /api/.
        body: of the POST.
    """
    user, _, password = private_key().partition(":")
    try:
        answer = requests.post(
            f"{address}/api/{path}", json=body, auth=(user, password), timeout=ANSWER_SECONDS, allow_redirects=False
        )
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError):
        return None


def worker_heartbeat(address: str) -> float | None:
    """Return the time of the worker's last heartbeat, in seconds since 1970."""
    for worker in ask(address, f"work_pools/{POOL}/workers/filter", {}) or []:
        if worker.get("name") == WORKER and worker.get("last_heartbeat_time"):
            return datetime.fromisoformat(worker["last_heartbeat_time"].replace("Z", "+00:00")).timestamp()
    return None


def deployments() -> list[dict[str, Any]]:
    """Return the deployments of prefect.yaml as Prefect reads them, with its anchors.

    Raises:
        UserError: it is not there, or has none.
    """
    try:
        read = yaml.safe_load((config.project_root() / "prefect.yaml").read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = read["deployments"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"prefect.yaml cannot be read ({why}): restore it") from None
    return found

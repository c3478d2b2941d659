"""`stratagem up`: starts Prefect's server, MLflow's pages and a worker, restarts any that ends, and stops all of them,
the worker first.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock, Timeout

from flows.operate import notifications, operation, servers
from flows.operate.prefect_server import check_proxy, set_environment
from flows.operate.servers import Server
from tasks import config, records
from tasks.records import Operation
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import find_process
from tasks.system.network import without_secrets

LOOK_SECONDS = 0.5
# A process that checks whether the lock is free holds it for a moment.
MOMENT_SECONDS = 2.0
# If one ends this often before all have answered, a restart will not help.
MAX_FIRST_ENDS = 3


class Up:
    """The three programs of one project; its process holds the lock of mlruns/up."""

    def __init__(self) -> None:
        folder = operation.folder()
        self._phase: Literal["starting", "ready", "ending"] = "starting"
        if before := operation.load():  # Of an `up` that was killed: its guards end by themselves.
            left = [found for one in before.services if (found := find_process(one.pid, one.created)) is not None]
            psutil.wait_procs(left, operation.END_SECONDS)
        self._listening = servers.listen(folder / "ports.json")
        prefect_home = folder / "prefect"
        temporary = folder / "tmp"  # A killed program leaves its files there, and Prefect's contain the password.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        os.environ["TMPDIR"] = str(temporary)
        set_environment(debug=True)  # Its lines go to a file.
        check_proxy()
        key = operation.private_key()
        listening = self._listening["prefect"]
        self._prefect = servers.prefect_server(
            listening, key, folder / "prefect.log", schedules=True, home=prefect_home
        )
        pages = servers.mlflow_pages(self._listening["mlflow"], key, folder / "mlflow.log")
        asked = {
            "PREFECT_API_URL": f"{self._prefect.address}/api",
            "PREFECT_API_AUTH_STRING": key,
            "PREFECT_HOME": str(prefect_home),
            "PROJECT_ROOT": str(config.project_root()),
        }
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in asked.items())
        operation.write_private(folder / "environment", lines)
        links = {"STRATAGEM_MLFLOW_PAGES": pages.address} if pages else {}
        command = (sys.executable, "-m", "flows.operate.worker")
        self._worker = Server("worker", command, {**os.environ, **asked, **links}, folder / "worker.log")
        self._children = [one for one in (self._prefect, pages, self._worker) if one is not None]

    def run(self, stop: threading.Event, when_ready: Callable[[], None]) -> None:
        """Keep everything running until ``stop`` is set, then end everything.

        Raises:
            StratagemError: a program does not start.
        """
        self._save()
        try:
            while not stop.is_set():
                for child in self._children:
                    self._look(child)
                if self._phase == "starting" and self._all_answer():
                    self._phase = "ready"
                    self._save()
                    when_ready()
                stop.wait(LOOK_SECONDS)
        finally:
            self._phase = "ending"
            self._save()
            for child in reversed(self._children):  # The worker first: its trainings still report their end.
                child.close()
            for listening in self._listening.values():
                listening.close()

    def _look(self, child: Server) -> None:
        """Start the program if it does not run, the worker only when its server answers; note if it has ended."""
        if child.process is None:
            if time.monotonic() >= child.not_before and (child is not self._worker or self._prefect.answers()):
                child.start()
                self._save()
        elif not child.process.alive:
            code = child.process.wait()
            child.note_end(code)
            last = last_line(child.log)
            if self._phase == "starting" and child.restarts >= MAX_FIRST_ENDS:
                raise _error(f"{child.name} did not start ({child.last_end}): {last}; see {child.log}", code)
            self._save()
            print(f"{records.now()} {child.name} ended ({child.last_end})", file=sys.stderr, flush=True)
            if self._phase == "ready":
                title = f"{child.name} restarts on {socket.gethostname()}"
                body = f"It ended ({child.last_end}); restart {child.restarts}. Its last line: {last}"
                threading.Thread(target=notifications.tell, args=("restart", title, body), daemon=True).start()

    def _all_answer(self) -> bool:
        if not all(child.answers() for child in self._children):
            return False
        workers = operation.ask(self._prefect.address, f"work_pools/{operation.POOL}/workers/filter", {}) or []
        beats = [one["last_heartbeat_time"] for one in workers if one["name"] == operation.WORKER]
        return any(one and datetime.fromisoformat(one).timestamp() > self._worker.began for one in beats)

    def _save(self) -> None:
        state = Operation(
            pid=os.getpid(),
            created=psutil.Process().create_time(),
            host=socket.gethostname(),
            phase=self._phase,
            services=tuple(child.state() for child in self._children),
        )
        records.save(state, operation.folder() / "state.json")


def keep(when_ready: Callable[[], None]) -> bool:
    """Keep everything running until a signal; return False, and do nothing, if another process already does so.

    Raises:
        StratagemError: a program does not start.
        KeyboardInterrupt: Ctrl-C.
    """
    stop, told = threading.Event(), list[int]()

    def end(number: int, frame: object) -> None:
        told.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # A second one ends this process, and the guards end the others.

    try:
        lock = FileLock(operation.folder() / "lock", timeout=MOMENT_SECONDS, mode=0o600).acquire()
    except Timeout:
        return False
    with lock:
        os.umask(0o077)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, end)
        Up().run(stop, when_ready)
    if told[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    return True


def check_environment() -> None:
    """Check the environment before anything starts.

    Raises:
        UserError: PREFECT_API_URL names a server that is not `up`'s, or an address of STRATAGEM_NOTIFY is wrong.
    """
    notifications.check()
    url, own = os.environ.get("PREFECT_API_URL"), operation.load()
    if url and (own is None or url.rstrip("/") != f"{own.services[0].address}/api"):
        raise UserError(
            f"PREFECT_API_URL = {url}: `stratagem up` starts its own Prefect server: unset the variable. To start a "
            "worker for your server, use `prefect worker start` (docs/operate.md)"
        )
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_PROFILE"):
        os.environ.pop(name, None)


def start_in_background() -> bool:
    """Start `stratagem up`, and return when everything answers; False if another process started it first.

    Raises:
        UserError: an environment variable prevents the start.
        StratagemError: it ended instead; the message says why.
    """
    os.umask(0o077)
    log = operation.folder() / "up.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stratagem", "up"],
            cwd=config.project_root(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            if (state := operation.load()) and (state.pid, state.phase) == (process.pid, "ready"):
                return True
            time.sleep(LOOK_SECONDS / 2)
    except BaseException:  # Ctrl-C, before everything answers.
        process.terminate()
        process.wait()
        raise
    if process.returncode == 0 and operation.is_held():  # Another one was quicker.
        return False
    raise _error(f"{last_line(log).removeprefix('error: ')} (the log: {log})", process.returncode)


def deploy() -> None:
    """Apply the current prefect.yaml to the running server; do nothing if `up` is not ready.

    Raises:
        UserError: prefect.yaml cannot be deployed.
    """
    state = operation.load()
    if state is None or state.phase != "ready":
        return
    set_environment(debug=False)
    os.environ["PREFECT_API_URL"] = f"{state.services[0].address}/api"
    os.environ["PREFECT_API_AUTH_STRING"] = operation.private_key()
    from prefect.client.orchestration import get_client  # Reads these variables on import.

    from flows.operate import worker

    with get_client(sync_client=True) as client:
        worker.deploy(client, config.project_root())


def _error(said: str, code: int) -> StratagemError:
    """Return the error of a program that ended with this exit code."""
    return (UserError if code == UserError.exit_code else StratagemError)(said)


def last_line(log: Path) -> str:
    """Return the last line of a log, without secrets."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return without_secrets(lines[-1].strip()) if lines else "it printed nothing"

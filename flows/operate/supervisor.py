"""What `stratagem up` does: starts the servers and the worker, and whichever dies again, until it is told to end.

`python -m flows.operate.supervisor` does the same in the background.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Literal

from flows.operate import notifications, operation, servers
from flows.operate.prefect_server import set_environment
from flows.operate.servers import Server
from tasks import config
from tasks.process.environment import keep_private
from tasks.records import Operation, ServiceState
from tasks.system import clock
from tasks.system.errors import StratagemError, UserError
from tasks.system.network import unreachable_reason, without_secrets

LOOK_SECONDS = 0.5
# So often one may die before all of them have answered once: then something is wrong that no restart mends.
MAX_FIRST_TRIES = 3
# How often it looks for flow runs that have crashed.
WATCH_SECONDS = 15.0
# A server that has not answered yet takes requests, and lets them wait.
ANSWER_SECONDS = 2.0
# A program that has lived so long begins again with the shortest pause.
STEADY_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_LOG_BYTES = 20_000_000
# The exit code of one that came second.
RUNS_ALREADY = os.EX_TEMPFAIL
VERSIONS = {package: version(package) for package in ("stratagem", "prefect", "mlflow")}


@dataclass
class SupervisedProgram:
    """A server or the worker, and what became of it so far."""

    server: Server
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    """In seconds since 1970."""
    not_before: float = 0.0
    """When it may restart, on the clock of `time.monotonic`."""
    deaths_in_a_row: int = 0
    restarts: int = 0
    last_end: str | None = None

    def state(self) -> ServiceState:
        """Return it as others read it."""
        pid = self.process.pid if self.process is not None else 0
        return ServiceState(
            name=self.server.name,
            pid=pid,
            created=operation.created(pid) if pid else 0.0,
            since=clock.at(self.began),
            restarts=self.restarts,
            last_end=self.last_end,
            address=self.server.address,
            log=str(self.log.relative_to(config.project_root())),
        )

    def start(self) -> None:
        """Start it, with a new log where the old one is large."""
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with open_log(self.log) as output:
            self.process = servers.start(self.server, output)
        self.began = time.time()

    def note_death(self, how: str) -> float:
        """Take note that it has ended; return the pause before it restarts, which grows with each death."""
        if time.time() - self.began > STEADY_SECONDS:
            self.deaths_in_a_row = 0
        self.deaths_in_a_row += 1
        self.restarts += 1
        self.process, self.last_end = None, how
        pause = min(2.0 ** (self.deaths_in_a_row - 1), LONGEST_PAUSE_SECONDS)
        self.not_before = time.monotonic() + pause
        return pause

    def answers(self) -> bool:
        """Return whether it runs and takes requests."""
        running = self.process is not None and self.process.poll() is None
        return running and unreachable_reason(self.server.health, ANSWER_SECONDS) is None


class Supervisor:
    """The programs of one project. It holds the lock of mlruns/up."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._folder = operation.folder()
        operation.await_leftovers(operation.load())
        self._since = clock.now()
        self._ready = False
        self._listening = servers.listen(self._folder / "ports.json")
        key = operation.private_key()
        home = _home_of_prefect()
        set_environment(debug=True)  # Its lines go to a file.
        prefect = servers.prefect_server(self._listening["prefect"], key, schedules=True, home=home)
        pages = servers.mlflow_pages(self._listening["mlflow"], key)
        asked = {
            "PREFECT_API_URL": f"{prefect.address}/api",
            "PREFECT_API_AUTH_STRING": key,
            "PREFECT_HOME": str(home),
            "PROJECT_ROOT": str(config.project_root()),
        }
        operation.write_environment(asked)
        links = {"STRATAGEM_MLFLOW_PAGES": pages.address} if pages else {}
        self._worker_environment = {**os.environ, **asked, **links}
        self._deployed = False
        self._told: set[tuple[str, int]] = set()
        self._prefect = SupervisedProgram(prefect, self._log("prefect"))
        self._pages = [SupervisedProgram(pages, self._log("mlflow"))] if pages else []
        self._worker = SupervisedProgram(self._new_worker(), self._log("worker"))
        self._kept = [self._prefect, *self._pages, self._worker]

    def run(self, when_ready: Callable[[], None]) -> None:
        """Keep everything running until it is told to stop, then end everything.

        Raises:
            StratagemError: something cannot be started at all.
        """
        self._save("starting")
        watch = threading.Thread(target=self._watch, daemon=True)
        try:
            while not self._stop.is_set():
                for kept in self._kept:
                    self._look(kept)
                if not self._ready and self._all_answer():
                    self._ready = True
                    self._save("ready")
                    when_ready()
                    watch.start()
                self._stop.wait(LOOK_SECONDS)
        finally:
            self._end()

    def _look(self, kept: SupervisedProgram) -> None:
        """Start what does not run, the worker when its server answers; note what has died."""
        if kept.process is None:
            if time.monotonic() < kept.not_before or (kept is self._worker and not self._prefect.answers()):
                return
            if kept is self._worker:
                kept.server = self._new_worker()
            kept.start()
            self._save()
        elif (code := kept.process.poll()) is not None:
            self._note_death(kept, death_in_words(code))

    def _note_death(self, kept: SupervisedProgram, how: str) -> None:
        pause = kept.note_death(how)
        if not self._ready and kept.deaths_in_a_row >= MAX_FIRST_TRIES:
            raise StratagemError(f"{kept.server.name} does not start ({how}): {last_line(kept.log)}; see {kept.log}")
        self._save()
        print(f"{clock.now()} {kept.server.name} has ended ({how}); restarting in {pause:.0f} s", file=sys.stderr)
        if self._ready:
            title = f"{kept.server.name} restarts on {socket.gethostname()}"
            body = f"It had ended ({how}), the {kept.restarts}. time. Its last line: {last_line(kept.log)}"
            threading.Thread(target=notifications.tell, args=("restart", title, body), daemon=True).start()

    def _all_answer(self) -> bool:
        if not all(kept.answers() for kept in (self._prefect, *self._pages)) or self._worker.process is None:
            return False
        heartbeat = operation.worker_heartbeat(self._prefect.server.address)
        self._deployed = heartbeat is not None and heartbeat > self._worker.began
        return self._deployed

    def _watch(self) -> None:
        """Tell which flow runs have crashed while their worker lives: nobody begins them again."""
        while not self._stop.wait(WATCH_SECONDS):
            try:
                self._tell_crashed()
            except Exception as error:  # The servers go on, whatever is wrong here.
                print(f"{clock.now()} warning: {without_secrets(str(error))}", file=sys.stderr)

    def _tell_crashed(self) -> None:
        if self._worker.process is None or self._worker.process.poll() is not None:
            return
        states = {"type": {"any_": ["CRASHED"]}}
        since = datetime.fromtimestamp(self._worker.began, UTC).isoformat()
        crashed = {"flow_runs": {"state": states, "end_time": {"after_": since}}}
        pool = {"work_pools": {"name": {"any_": [operation.POOL]}}}
        for run in operation.ask(self._prefect.server.address, "flow_runs/filter", crashed | pool) or []:
            if (one := (run["id"], run.get("run_count", 0))) in self._told:
                continue  # Prefect's worker reports a crash twice, some seconds apart.
            self._told.add(one)
            reason = (run.get("state") or {}).get("message") or "its process died"
            notifications.tell_failure(run["name"], *one, reason)

    def _end(self) -> None:
        """End the worker first: what it trains saves a step and tells its server."""
        with contextlib.suppress(OSError):  # A full disk; all is ended nevertheless.
            self._save("ending")
        for kept in reversed(self._kept):
            if kept.process is not None:
                servers.end(kept.process)
                kept.process = None
        for listening in self._listening.values():
            listening.close()

    def _save(self, phase: Literal["starting", "ready", "ending"] | None = None) -> None:
        state = Operation(
            pid=os.getpid(),
            created=operation.created(os.getpid()),
            host=socket.gethostname(),
            since=self._since,
            phase=phase or ("ready" if self._ready else "starting"),
            services=tuple(kept.state() for kept in self._kept),
            versions=VERSIONS,
        )
        operation.save(state)

    def _new_worker(self) -> Server:
        options = [] if self._deployed else ["--deploy"]
        command = (sys.executable, "-m", "flows.operate.worker", *options)
        return Server("worker", command, self._worker_environment)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def keep(when_ready: Callable[[], None]) -> bool:
    """Keep everything running until a signal; return False, and do nothing, where another process does so already.

    Raises:
        UserError: it cannot be started with what the environment holds, or `up` of another project keeps its database.
        StratagemError: something does not start.
        KeyboardInterrupt: Ctrl-C.
    """
    check_environment()
    stop = threading.Event()
    told: list[int] = []

    def end(number: int, frame: object) -> None:
        told.append(number)
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # A second one ends this process, and the guards end the others.

    with contextlib.ExitStack() as holding:
        if not holding.enter_context(operation.lock(operation.folder() / "lock")):
            return False
        home = _home_of_prefect()
        # Two workers that know of one pool would each end what the other has at work, and run it in their own project.
        if not holding.enter_context(operation.lock(home / "up.lock")):
            raise UserError(
                f"PREFECT_HOME = {home}: `stratagem up` of another project keeps its Prefect server there: unset the "
                "variable, then this project has a database of its own; or give another folder"
            )
        os.umask(0o077)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, end)
        Supervisor(stop).run(when_ready)
    if told[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    return True


def _home_of_prefect() -> Path:
    """Return the folder of the database of Prefect's server: this project's own, where PREFECT_HOME says nothing."""
    given = os.environ.get("PREFECT_HOME")
    return Path(given).expanduser().absolute() if given else operation.folder() / "prefect"


def check_environment() -> None:
    """Refuse what cannot be kept, before anything starts.

    Raises:
        UserError: PREFECT_API_URL names another server than that of `up`, or an address of STRATAGEM_NOTIFY is wrong.
    """
    notifications.check()
    url, own = os.environ.get("PREFECT_API_URL"), operation.load()
    known = [f"{one.address}/api" for one in own.services if one.name == "prefect"] if own else []
    if url and url.rstrip("/") not in known:
        raise UserError(
            f"PREFECT_API_URL = {url}: `stratagem up` starts a Prefect server of its own: unset the variable. A worker "
            "for that server is started with `prefect worker start`, see docs/operate.md"
        )
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_PROFILE"):
        os.environ.pop(name, None)


def start_in_background() -> bool:
    """Start the supervisor as a process of its own, and return when everything answers; False where another process was
    quicker.

    Raises:
        UserError: it cannot be started with what the environment holds.
        StratagemError: it ended instead; says why.
    """
    log = operation.folder() / "up.log"
    with open_log(log) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.operate.supervisor"],
            cwd=config.project_root(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None and not _is_ready(process.pid):
            time.sleep(LOOK_SECONDS / 2)
    except BaseException:  # Ctrl-C, before everything answers.
        process.terminate()
        process.wait()
        raise
    if process.returncode == RUNS_ALREADY:
        return False
    if process.returncode is not None:
        said = f"{last_line(log).removeprefix('error: ')} (the log: {log})"
        raise UserError(said) if process.returncode == UserError.exit_code else StratagemError(said)
    return True


def _is_ready(pid: int) -> bool:
    state = operation.load()
    return state is not None and state.pid == pid and state.phase == "ready"


def death_in_words(code: int) -> str:
    """Return how a guard ended, or what it guards: 128 and the signal's number is what a shell makes of one."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"


def open_log(log: Path) -> IO[bytes]:
    """Open a log to write on, which only this user may read."""
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab")


def last_line(log: Path) -> str:
    """Return the last line of a log, without secrets."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return without_secrets(lines[-1].strip()) if lines else "it said nothing"


def main() -> None:
    """Be the supervisor in the background."""
    keep_private()
    try:
        if not keep(lambda: None):
            sys.exit(RUNS_ALREADY)
    except StratagemError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

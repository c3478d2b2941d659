"""What `stratagem up` does: starts the servers and the worker, and whichever dies again, until it is told to end.

`python -m flows.operate.supervisor` does the same in the background: it ends with the command that started it until
that command has seen everything answer; from then on it stays.
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
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from flows.operate import notifications, operation, servers
from flows.operate.prefect_server import set_environment
from flows.operate.servers import Server
from flows.operate.supervised import SupervisedProgram, death_in_words, last_line, open_log
from tasks import config
from tasks.process.environment import keep_private
from tasks.records import Operation
from tasks.system import clock, lifetime
from tasks.system.errors import StratagemError, UserError
from tasks.system.network import without_secrets

LOOK_SECONDS = 0.5
# So often one may die before all of them have answered once: then something is wrong that no restart mends.
MAX_FIRST_TRIES = 3
# What waits to be told is tried again, and flow runs that have crashed are looked for.
WATCH_SECONDS = 15.0
STAY = "stay"
# The exit code of one that came second.
RUNS_ALREADY = os.EX_TEMPFAIL


VERSIONS = {package: version(package) for package in ("stratagem", "prefect", "mlflow")}


class Supervisor:
    """The programs of one project. It holds the lock of mlruns/up."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._patience = operation.patience()
        self._folder = operation.folder()
        before = operation.load()
        operation.end_leftovers(before)
        self._worker_seen = before.worker_seen if before else 0.0
        self._since = clock.now()
        self._ready = False
        self._listening = servers.listen(self._folder / "ports.json")
        key = operation.private_key()
        home = _home_of_prefect()
        set_environment(debug=True)  # Its lines go to a file.
        prefect = servers.prefect_server(self._listening["prefect"], key, schedules=True, home=home)
        pages = servers.mlflow_pages(self._listening["mlflow"], key)
        self.asked = {
            "PREFECT_API_URL": f"{prefect.address}/api",
            "PREFECT_API_AUTH_STRING": key,
            "PREFECT_HOME": str(home),
            "PROJECT_ROOT": str(config.project_root()),
        }
        operation.write_environment(self.asked)
        links = {"STRATAGEM_MLFLOW_PAGES": pages.address} if pages else {}
        self._worker_environment = {**os.environ, **self.asked, **links}
        self._deployed = False
        self._prefect = SupervisedProgram(prefect, self._log("prefect"))
        self._pages = [SupervisedProgram(pages, self._log("mlflow"))] if pages else []
        self._worker = SupervisedProgram(self._new_worker(), self._log("worker"))
        self._kept = [self._prefect, *self._pages, self._worker]

    def run(self, when_ready: Callable[[], None]) -> None:
        """Keep everything running until it is told to stop, then end everything.

        Raises:
            StratagemError: something cannot be started at all.
        """
        lifetime.adopt_orphans()
        self._save("starting")
        watch = threading.Thread(target=self._watch, daemon=True)
        try:
            for kept in (self._prefect, *self._pages):
                self._start(kept)
            while not self._stop.is_set():
                self._look()
                if not self._ready and self._all_answer():
                    self._ready = True
                    self._save("ready")
                    when_ready()
                    watch.start()
                self._stop.wait(LOOK_SECONDS)
        finally:
            self._end()

    def _look(self) -> None:
        """Start again what has died or hangs; start the worker when its server answers."""
        for kept in self._kept:
            if kept.process is None:
                waits_for_server = kept is self._worker and not self._prefect.answers()
                if time.monotonic() >= kept.not_before and not waits_for_server:
                    self._start(kept)
            elif (code := kept.process.poll()) is not None:
                self._note_death(kept, death_in_words(code))
            elif kept.hangs(self._patience):
                servers.end(kept.process)
                self._note_death(kept, f"no answer for {kept.patience(self._patience):.0f} s")

    def _start(self, kept: SupervisedProgram) -> None:
        if kept is self._worker:
            kept.server = self._new_worker()
        kept.start()
        self._save()

    def _note_death(self, kept: SupervisedProgram, how: str) -> None:
        kept.note_end(how)
        # Of a guard that was killed.
        lifetime.end_children({one.process.pid for one in self._kept if one.process is not None})
        if not self._ready and kept.deaths_in_a_row >= MAX_FIRST_TRIES:
            raise StratagemError(f"{kept.server.name} does not start ({how}): {last_line(kept.log)}; see {kept.log}")
        pause = kept.pause()
        self._save()
        print(f"{clock.now()} {kept.server.name} has ended ({how}); started again in {pause:.0f} s", file=sys.stderr)
        if self._ready:
            title = f"{kept.server.name} is started again on {socket.gethostname()}"
            body = f"It had ended ({how}), the {kept.restarts}. time. Its last line: {last_line(kept.log)}"
            key = f"{kept.server.name} {kept.began}"
            threading.Thread(target=notifications.tell, args=("restart", key, title, body), daemon=True).start()

    def _all_answer(self) -> bool:
        if not all(kept.answers() for kept in (self._prefect, *self._pages)) or self._worker.process is None:
            return False
        heartbeat = operation.worker_heartbeat(self._prefect.server.address)
        self._deployed = heartbeat is not None and heartbeat > self._worker.began
        return self._deployed

    def _watch(self) -> None:
        """Tell what waits to be told, and which flow runs have crashed; note that the worker is at work."""
        while not self._stop.wait(WATCH_SECONDS):
            try:
                if self._worker.process is not None and self._worker.process.poll() is None:
                    looked = time.time()  # What crashes while this tells of others is found by the next look.
                    if self._tell_crashed():
                        self._worker_seen = looked
                        self._save()
                notifications.deliver()
            except Exception as error:  # Whatever ails it, the servers go on.
                print(f"{clock.now()} warning: {without_secrets(str(error))}", file=sys.stderr)

    def _tell_crashed(self) -> bool:
        """Tell of flow runs that have crashed while their worker lives: nobody takes them up. Return whether the server
        answered."""
        states = {"type": {"any_": ["CRASHED"]}}
        since = datetime.fromtimestamp(max(self._worker_seen - WATCH_SECONDS, self._worker.began), UTC).isoformat()
        crashed = {"flow_runs": {"state": states, "end_time": {"after_": since}}}
        pool = {"work_pools": {"name": {"any_": [operation.POOL]}}}
        found = operation.ask(self._prefect.server.address, "flow_runs/filter", crashed | pool)
        if found is None:
            return False
        for run in found:
            reason = (run.get("state") or {}).get("message") or "its process died"
            notifications.tell_failure(run["name"], run["id"], run.get("run_count", 0), reason)
        return True

    def _end(self) -> None:
        """End the worker first: what it trains saves a step and tells its server."""
        with contextlib.suppress(OSError):  # A full disk; all is ended nevertheless.
            self._worker_seen = time.time() if self._worker.process is not None else self._worker_seen
            self._save("ending")
        for kept in reversed(self._kept):
            if kept.process is not None:
                servers.end(kept.process)
                kept.process = None
        lifetime.end_children()
        for listening in self._listening.values():
            listening.close()
        with contextlib.suppress(OSError):
            self._save("ending")

    def _save(self, phase: Literal["starting", "ready", "ending"] | None = None) -> None:
        state = Operation(
            pid=os.getpid(),
            created=operation.created(os.getpid()),
            host=socket.gethostname(),
            since=self._since,
            phase=phase or ("ready" if self._ready else "starting"),
            services=tuple(kept.state() for kept in self._kept),
            worker_seen=self._worker_seen,
            versions=VERSIONS,
        )
        operation.save(state)

    def _new_worker(self) -> Server:
        options = [] if self._deployed else ["--deploy"]
        command = (sys.executable, "-m", "flows.operate.worker", *options, str(self._worker_seen))
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
        if not holding.enter_context(operation.lock()):
            return False
        holding.enter_context(operation.database_lock(_home_of_prefect()))
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
        UserError: PREFECT_API_URL names another server than that of `up`, an address of STRATAGEM_NOTIFY is wrong, or
            STRATAGEM_PATIENCE is no number.
    """
    notifications.check()
    operation.patience()
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
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    line_to_it = process.stdin
    try:
        while process.poll() is None and not _is_ready(process.pid):
            time.sleep(LOOK_SECONDS / 2)
        if process.returncode == RUNS_ALREADY:
            return False
        if process.returncode is not None:
            said = f"{last_line(log).removeprefix('error: ')} (the log: {log})"
            raise UserError(said) if process.returncode == UserError.exit_code else StratagemError(said)
        if line_to_it is not None:
            line_to_it.write(f"{STAY}\n")
        return True
    finally:
        if line_to_it is not None:
            line_to_it.close()


def _is_ready(pid: int) -> bool:
    state = operation.load()
    return state is not None and state.pid == pid and state.phase == "ready"


def main() -> None:
    """Be the supervisor in the background."""
    keep_private()
    stays = threading.Event()

    def end() -> None:
        if not stays.is_set():  # The command that started this has died.
            os.kill(os.getpid(), signal.SIGTERM)

    lifetime.when_input_closes(end, lambda line: stays.set() if line.strip() == STAY else None)
    try:
        if not keep(lambda: None):
            sys.exit(RUNS_ALREADY)
    except StratagemError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

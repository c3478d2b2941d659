"""One program that `stratagem up` keeps running, and what became of it: its starts, its answers, its ends, its log."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flows.operate import operation, servers
from flows.operate.operation import HEALTH_SECONDS
from flows.operate.servers import Server
from tasks import config
from tasks.records import ServiceState
from tasks.system import clock
from tasks.system.network import unreachable_reason, without_secrets

# One that has not answered yet takes requests, and lets them wait.
START_LOOK_SECONDS = 2.0
# One that has lived so long begins again with the shortest pause.
STEADY_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_LOG_BYTES = 20_000_000


@dataclass
class SupervisedProgram:
    """One program, and what became of it so far."""

    server: Server
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    began: float = 0.0
    """In seconds since 1970."""
    not_before: float = 0.0
    """On the clock of `time.monotonic`."""
    deaths_in_a_row: int = 0
    restarts: int = 0
    last_end: str | None = None
    answered_at: float = 0.0
    """On the clock of `time.monotonic`."""
    has_answered: bool = False
    """Since it was started."""

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
        self.began, self.answered_at, self.has_answered = time.time(), time.monotonic(), False

    def note_end(self, how: str) -> None:
        """Take note that it has ended."""
        if time.time() - self.began > STEADY_SECONDS:
            self.deaths_in_a_row = 0
        self.deaths_in_a_row += 1
        self.process, self.last_end = None, how

    def pause(self) -> float:
        """Have it wait before it is started again; return for how many seconds."""
        seconds = min(2.0 ** (self.deaths_in_a_row - 1), LONGEST_PAUSE_SECONDS)
        self.not_before = time.monotonic() + seconds
        self.restarts += 1
        return seconds

    def answers(self) -> bool:
        """Return whether it runs and takes requests."""
        running = self.process is not None and self.process.poll() is None
        return running and unreachable_reason(self.server.health, START_LOOK_SECONDS) is None

    def hangs(self, patience: float) -> bool:
        """Return whether it should answer, and has not done so for longer than the patience with it."""
        if not self.server.health:
            return False
        now, within = time.monotonic(), HEALTH_SECONDS if self.has_answered else START_LOOK_SECONDS
        if now - self.answered_at > HEALTH_SECONDS and unreachable_reason(self.server.health, within) is None:
            self.answered_at, self.has_answered = now, True
        return now - self.answered_at > self.patience(patience)

    def patience(self, usual: float) -> float:
        """Return for how long it may say nothing: a server that starts imports for a minute on a busy machine."""
        return usual if self.has_answered else max(usual, operation.PATIENCE_SECONDS)


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

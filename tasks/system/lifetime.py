"""How a process ends: with the one that started it, however that dies, because its standard input closes then; and by a
signal, from the process that started it, a service manager, or a terminal that closes. All signals mean the same.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from tasks.system import errors

if TYPE_CHECKING:
    import psutil

# An interrupted stage ends at its next training step; nobody waits for a step that hangs.
GRACE_SECONDS = 15.0
# A command whose stages have ended reports it to MLflow and Prefect, in a process that imports them. On a busy machine
# this took more than 15 s, and `stratagem reconcile` had to end a run that was interrupted from a notebook.
RECORD_SECONDS = 60.0
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As under nohup.
    STOP_SIGNALS.append(signal.SIGHUP)
# Of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def held_open() -> Iterator[int]:
    """Give a child process a standard input that closes when the block ends or this process dies, however it does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def close(process: "subprocess.Popen[str]") -> None:
    """Close the standard input of a process, which ends with it, and wait for its end."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # The process has died before it read a request.
            process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def when_input_closes(end: Callable[[], object], take: Callable[[str], object] = lambda line: None) -> None:
    """Call ``take`` with each line of this process's standard input, and ``end`` when that closes, in a thread."""

    def read() -> None:
        for line in sys.stdin:
            take(line)
        end()

    threading.Thread(target=read, daemon=True).start()


def input_closes_within(seconds: float) -> bool:
    """Return whether this process's standard input closes within a number of seconds; nothing else may read it."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


@contextlib.contextmanager
def ended_by_the_kernel() -> Iterator[None]:
    """Let the kernel end this process when standard input closes within the block, in which Python runs no thread and
    no request may arrive."""
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which ends a process that does not handle it.
    try:
        yield
    finally:
        fcntl.fcntl(0, fcntl.F_SETFL, flags)


def run_guarded(command: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code, as a shell has it.

    Everything that it started ends with it, also processes in sessions of their own, as a Prefect worker's flow runs.
    """
    adopt_orphans()
    guarded = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # It inherits a socket to listen on.
        process_group=0,
        preexec_fn=end_with_parent,  # noqa: PLW1509  # No thread runs yet.
    )

    def end() -> None:
        started = _children_of(guarded.pid)
        if started:
            # It is stopped, so that it starts nothing in their place. A Prefect worker that gets SIGTERM kills its flow
            # runs; if they get the signal themselves, they save their step and report how they ended.
            guarded.send_signal(signal.SIGSTOP)
            # A flow run, in a session of its own, gives its stages `GRACE_SECONDS` and then reports how it ended. A
            # stage saves its step and waits for the command that is stopped here.
            seconds = RECORD_SECONDS if any(map(_has_own_session, started)) else GRACE_SECONDS
            _terminate(started)
            _await_end(started, seconds)
            guarded.send_signal(signal.SIGCONT)
        guarded.terminate()
        try:
            guarded.wait(RECORD_SECONDS if started else GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            guarded.kill()

    when_input_closes(end)
    threading.Thread(target=_reap_orphans, args=(guarded.pid,), daemon=True).start()
    code = guarded.wait()
    end_children()
    return code if code >= 0 else 128 - code


def adopt_orphans() -> None:
    """Become the parent of processes whose parent, a child of this process, has ended; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_orphans(guarded: int) -> None:
    """Reap each adopted process until the guarded one ends; otherwise each flow run would leave a zombie."""
    with contextlib.suppress(ChildProcessError):  # There is no child left.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != guarded:
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def end_children() -> None:
    """End the children of this process, and all that they started.

    Each child gets SIGTERM first, so that a training can save its step.
    """
    import psutil

    ending = _children_of(os.getpid())
    family = [member for child in ending for member in (child, *_children_of(child.pid, recursive=True))]
    _terminate(ending)
    alive = _await_end(family, GRACE_SECONDS)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    _await_end(alive, GRACE_SECONDS)


def _children_of(pid: int, recursive: bool = False) -> "list[psutil.Process]":
    import psutil  # Takes 0.02 s, and only a guard needs it.

    try:
        return psutil.Process(pid).children(recursive)
    except psutil.NoSuchProcess:
        return []


def _has_own_session(process: "psutil.Process") -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def _terminate(processes: "Iterable[psutil.Process]") -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def _await_end(processes: "Iterable[psutil.Process]", seconds: float) -> "list[psutil.Process]":
    """Wait for the end of processes, for at most some seconds; return those that are still alive."""
    until, alive = time.monotonic() + seconds, list(processes)
    while (alive := [process for process in alive if not _has_ended(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _has_ended(process: "psutil.Process") -> bool:
    import psutil

    try:
        process.wait(0)  # It may have become this process's own child, which must be reaped.
    except psutil.TimeoutExpired:
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
    return True


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it dies; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_signals() -> None:
    """Ignore signals: no stage is at work, and the process that started this one needs it to end the run."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def set_on_signal(stop: threading.Event) -> None:
    """Let a signal set an event: a training then stops after the checkpoint of its next step."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop.set())


def raise_on_signal() -> None:
    """Let the first signal end the stage by an exception; a second one would end the process before it ends the run.

    Raises:
        KeyboardInterrupt: later, in the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else errors.Terminated

    for number in STOP_SIGNALS:
        signal.signal(number, end)

"""Processes that end when the one that started them does, however that dies: their standard input closes then."""

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

# A stage that is interrupted ends at its next training step; a step that hangs is not waited for.
GRACE_SECONDS = 15.0
# A command whose stages were ended tells MLflow and Prefect of it, by a process that imports them: on a busy machine it
# took more than 15 s, and a run that was interrupted from a notebook stayed for `stratagem reconcile` to end.
RECORD_SECONDS = 60.0
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
    """End a process that ends when its standard input closes, and wait for it."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # A request that a dead process did not take.
            process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def when_input_closes(end: Callable[[], object], take: Callable[[str], object] = lambda line: None) -> None:
    """Call ``end``, in a thread, when this process's standard input closes; ``take`` gets each line before."""

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
    """End with standard input within the block, where no thread of Python's can run; no request may come in it."""
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which ends a process that does not handle it.
    try:
        yield
    finally:
        fcntl.fcntl(0, fcntl.F_SETFL, flags)


def run_guarded(command: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code, as a shell has it.

    What it started ends with it, also what has a session of its own, as the flow runs of a Prefect worker do.
    """
    adopt_orphans()
    guarded = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # What this process was given is for it: a socket to listen on.
        process_group=0,
        preexec_fn=end_with_parent,  # noqa: PLW1509  # No thread runs yet.
    )

    def end() -> None:
        started = _children_of(guarded.pid)
        if started:
            # It is stopped, so that it starts nothing in their place. A Prefect worker that is told to end kills its
            # flow runs; told themselves, they save their step and say how they ended.
            guarded.send_signal(signal.SIGSTOP)
            # A flow run, in a session of its own, gives its stages `GRACE_SECONDS` and says then how it ended. A stage
            # saves its step and waits for the command that is stopped here.
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
    """Let what this process's children leave behind become children of its own, which can be found; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap_orphans(guarded: int) -> None:
    """Take note of the end of each adopted process, until the guarded one ends: a zombie stayed of each flow run."""
    with contextlib.suppress(ChildProcessError):  # There is no child left.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != guarded:
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def end_children() -> None:
    """End the children of this process, with all that they started.

    Each is told first, so that a training can save its step.
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
    import psutil  # 0.02 s, which only a guard needs.

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
    """Wait until processes have ended, for some seconds at most; return those that have not."""
    until, alive = time.monotonic() + seconds, list(processes)
    while (alive := [process for process in alive if not _has_ended(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _has_ended(process: "psutil.Process") -> bool:
    import psutil

    try:
        process.wait(0)  # Also of one that has become this process's own child meanwhile, which must be waited for.
    except psutil.TimeoutExpired:
        try:
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
    return True


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it dies; Linux alone can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

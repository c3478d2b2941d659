"""Processes that end when the one that started them does, however that dies: their standard input closes then."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

# A stage that is interrupted ends at its next training step; a step that hangs is not waited for.
GRACE_SECONDS = 15.0


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
    """Return whether this process's standard input closes within so long, where nothing else reads it."""
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
    """Run a command until it ends or standard input closes; return its exit code. What it started ends with it."""
    guarded = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def end() -> None:
        guarded.terminate()
        try:
            guarded.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            guarded.kill()

    when_input_closes(end)
    code = guarded.wait()
    with contextlib.suppress(ProcessLookupError):  # What is left of its group.
        os.killpg(guarded.pid, signal.SIGKILL)
    return code

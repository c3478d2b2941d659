"""How a process ends: with the one that started it, however that dies, because its standard input closes then; and by a
signal, from the process that started it, a service manager, or a terminal that closes. All signals mean the same.

`python -m tasks.system.lifetime COMMAND...` is a guard: it runs a command, and ends it, with all that it started, when
its standard input closes.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from tasks.system import errors

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


def when_input_closes(end: Callable[[], object], take: Callable[[str], object] = lambda line: None) -> None:
    """Call ``take`` with each line of this process's standard input, and ``end`` when that closes, in a thread."""

    def read() -> None:
        for line in sys.stdin:
            take(line)
        end()

    threading.Thread(target=read, daemon=True).start()


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
    import psutil  # Takes 0.02 s, and only a guard needs it.

    adopt_orphans()
    guarded = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # It inherits a socket to listen on.
        process_group=0,
        preexec_fn=end_with_parent,  # noqa: PLW1509  # No thread runs yet.
    )

    def end() -> None:
        # A Prefect worker that gets SIGTERM kills its flow runs, each in a session of its own. If they get the signal
        # first, they save their step and report how they ended.
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            started = psutil.Process(guarded.pid).children()
            flow_runs = [one for one in started if os.getsid(one.pid) == one.pid]
            for one in flow_runs:
                one.terminate()
            psutil.wait_procs(flow_runs, RECORD_SECONDS)
        guarded.terminate()
        try:
            guarded.wait(RECORD_SECONDS)
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

    this = psutil.Process()
    ending, family = this.children(), this.children(recursive=True)
    for child in ending:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for member in psutil.wait_procs(family, GRACE_SECONDS)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
            member.wait(GRACE_SECONDS)


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it dies; only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_signals() -> None:
    """Ignore signals: no stage is running, and the process that started this one needs it to end the run."""
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


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:]))

"""How a process ends: with its parent, whose death closes the child's standard input; or by a signal from the parent, a
service manager, or a terminal that closes. All signals have the same effect.

`python -m tasks.system.lifetime COMMAND...` is a guard: it runs a command, and ends it with all its descendants when
standard input closes.
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

# The time for an interrupted stage to finish its training step; after that, it is killed.
GRACE_SECONDS = 15.0
# The time for a command to report to MLflow and Prefect that it was interrupted. On a busy machine, 15 s were too
# short: `stratagem reconcile` had to end a run that was interrupted from a notebook.
RECORD_SECONDS = 60.0
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it.
    STOP_SIGNALS.append(signal.SIGHUP)
# Of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def when_input_closes(end: Callable[[], object], take: Callable[[str], object] = lambda line: None) -> None:
    """In a thread, call ``take`` with each line of standard input, and ``end`` when standard input closes."""

    def read() -> None:
        for line in sys.stdin:
            take(line)
        end()

    threading.Thread(target=read, daemon=True).start()


@contextlib.contextmanager
def ended_by_the_kernel() -> Iterator[None]:
    """Let the kernel end this process when standard input closes, for a block in which Python runs no other thread. No
    request may arrive during the block."""
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # Sends SIGIO, which ends a process that does not handle it.
    try:
        yield
    finally:
        fcntl.fcntl(0, fcntl.F_SETFL, flags)


def run_guarded(command: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code in the shell's notation.

    All its descendants end with it, including those in other sessions, such as the flow runs of a Prefect worker.
    """
    import psutil  # Takes 0.02 s, and only a guard needs it.

    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # Become the parent of descendants whose own parent has ended.
    guarded = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        close_fds=False,  # The command inherits a socket to listen on.
        process_group=0,
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  # No thread runs yet.
    )

    def end() -> None:
        # On SIGTERM, a Prefect worker kills its flow runs, each of which has its own session. If they receive the
        # signal first, they save their step and report how they ended.
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


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap_orphans(guarded: int) -> None:
    """Reap each adopted process until the guarded one ends; otherwise each flow run would leave a zombie."""
    with contextlib.suppress(ChildProcessError):  # No child is left.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != guarded:
            os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)


def end_children() -> None:
    """End the descendants of this process. The children first receive SIGTERM, so that a training can save its step."""
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


def ignore_signals() -> None:
    """Ignore signals: no stage is running, and the parent process needs this one to end the run."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def set_on_signal(stop: threading.Event) -> None:
    """Make signals set an event, on which a training saves a checkpoint after its next step and stops."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: stop.set())


def raise_on_signal() -> None:
    """Make the first signal raise ``KeyboardInterrupt`` in the main thread. Later signals are ignored: they would end
    the process before it ends the run."""

    def end(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise KeyboardInterrupt if number == signal.SIGINT else errors.Terminated

    for number in STOP_SIGNALS:
        signal.signal(number, end)


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:]))

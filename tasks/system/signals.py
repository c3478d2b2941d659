"""What a stage process does when it is told to stop: by the process that started it, by a service manager that tells
every process, or by a terminal that closes. All three signals mean the same.
"""

import signal
import threading
from types import FrameType

from tasks.system import errors

TOLD_TO_STOP = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # As under nohup.
    TOLD_TO_STOP.append(signal.SIGHUP)


def ignore() -> None:
    """Do nothing: no stage is at work, and the process that started this one needs it to end the run."""
    for number in TOLD_TO_STOP:
        signal.signal(number, signal.SIG_IGN)


def stop_gently(stop: threading.Event) -> None:
    """Let a training see that it is to stop, which it does after a checkpoint of its next step."""

    def tell(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in TOLD_TO_STOP:
        signal.signal(number, tell)


def stop_at_once() -> None:
    """Let the stage end by an exception, once: the second of two signals would end the process, and no one the run.

    Raises:
        KeyboardInterrupt: later, in the main thread.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        raise KeyboardInterrupt if number == signal.SIGINT else errors.Terminated

    for number in TOLD_TO_STOP:
        signal.signal(number, end)

"""A child process, with requests and answers. `lifetime` is the child's side: it ends when this process dies, because
that closes its standard input."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tasks.system import lifetime

END_SECONDS = 40.0
"""The time for DVC or a server to end before this process kills it."""

Message = dict[str, Any]


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that ends with all its children when its standard input closes."""
    return [sys.executable, "-m", "tasks.system.lifetime", *command]


class Child(subprocess.Popen[str]):
    """A child process on this machine, which may read and write JSON lines."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        """Start the process.

        Args:
            command: the program and its arguments.
            environment: its complete environment.
            options: options of ``subprocess.Popen``. By default, standard output is a pipe, and the child has its own
                process group: Ctrl-C reaches only this process, which forwards it once.
        """
        defaults = {"stdout": subprocess.PIPE, "process_group": 0}
        super().__init__(command, stdin=subprocess.PIPE, env=environment, text=True, **{**defaults, **options})
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.poll() is None

    @property
    def output(self) -> IO[str]:
        """Its standard output, if that is a pipe."""
        if self.stdout is None:
            raise ValueError("its standard output goes elsewhere")
        return self.stdout

    @property
    def death(self) -> str:
        """How the process ended; wait until it has."""
        code = self.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @property
    def peak_memory_bytes(self) -> int:
        """The peak memory of the process; 0 if the kernel does not report it."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
            return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"^VmHWM:\s+(\d+)", status, re.MULTILINE))
        return 0

    def send(self, message: Message) -> None:
        """Send a JSON line. Ignore that the process has died: the end of its messages shows that."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(json.dumps(message) + "\n")
                self.stdin.flush()

    def messages(self) -> Iterator[Message]:
        """Yield its JSON lines until it closes its standard output."""
        for line in self.output:
            with contextlib.suppress(ValueError):  # A killed process leaves half a line.
                yield json.loads(line)

    def listen(self, take: Callable[[Message | None], object]) -> None:
        """In a thread, call ``take`` with each of its messages, and with None at their end."""

        def read() -> None:
            with self.output:
                for message in self.messages():
                    take(message)
            take(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """Kill the process, even if it is stopped, and wait for it."""
        super().kill()
        self.close()

    def close_input(self) -> None:
        """Close its standard input; the project's own processes end then."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # The process died before it read a request.
                self.stdin.close()

    def close(self, seconds: float | None = lifetime.GRACE_SECONDS) -> None:
        """Close its standard input and wait until the process ends; kill it after ``seconds``, if given."""
        self.close_input()
        self._end_within(seconds)
        if self._reader is not None:
            self._reader.join(1.0)  # A forked grandchild can keep the pipe open for longer.
        elif self.stdout is not None:
            self.stdout.close()

    def terminate_group(self) -> None:
        """Send SIGTERM to the process and its children, and wait for it; kill it if it takes too long."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        self._end_within(END_SECONDS)

    def _end_within(self, seconds: float | None) -> None:
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            super().kill()
            self.wait()

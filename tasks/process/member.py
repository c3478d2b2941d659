"""One child process on this machine, `python -m tasks serve`, `assist` or `tf_server`: its requests and replies."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from tasks import config
from tasks.strategies.engines import Member
from tasks.strategies.engines.isolation import Network
from tasks.system import lifetime

READER_SECONDS = 1.0

Message = dict[str, Any]


class Patience(NamedTuple):
    """How long to wait for a process."""

    start_seconds: float = 300.0
    """From a request until the first heartbeat of a process that builds the strategy for it: imports on a busy machine,
    and waiting for the last of its peers."""
    lost_peer_seconds: float = 5.0
    """When a process fails because another one died, that death is noticed within this time."""
    poll_seconds: float = 1.0


PATIENCE = Patience()


class MemberProcess:
    """A member of a cluster, or the only process of a strategy without one."""

    has_place = True
    """Whether it can be restarted at the same place."""

    def __init__(
        self,
        member: Member,
        entry: str,
        environment: Mapping[str, str],
        log: Path | None,
        replies: "Replies",
        network: Network | None = None,
    ) -> None:
        """Start the process.

        Args:
            member: its role, with variables of its own.
            entry: the stage of `python -m tasks`.
            environment: the member's variables are added to it.
            log: for its standard error; the chief writes to the terminal, and only its libraries write to the log.
            replies: receives its messages, and None at its end.
            network: the network namespace to start it in, if not this process's.
        """
        self.member = member
        self.entry = entry
        self.has_begun = False
        """Whether it has sent a heartbeat."""
        self.silent_seconds = 0.0
        """Since its last heartbeat, or since its first request."""
        environment = {**environment, **member.environment}
        kept: IO[bytes] | None = None
        if log is not None:
            environment["STRATAGEM_LOG"] = str(log)
            if entry != "serve":
                kept = log.open("ab")
        command = [sys.executable, "-m", "tasks", entry]
        self._process = subprocess.Popen(
            network.command(command) if network is not None else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=kept,
            cwd=config.project_root(),
            env=environment,
            text=True,
            process_group=0,  # Ctrl-C reaches this process alone, which passes it on once.
            pass_fds=network.descriptors if network is not None else (),
        )
        if kept is not None:
            kept.close()
        self._reader = threading.Thread(target=self._read, args=(replies,), daemon=True)
        self._reader.start()

    def _read(self, replies: "Replies") -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):  # A process that is killed leaves half a line.
                    replies.put((self, json.loads(line)))
            self._process.stdout.close()
        replies.put((self, None))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that the process has had; 0 where the kernel does not say."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    @property
    def death(self) -> str:
        """How the process died."""
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def send(self, request: Message) -> None:
        """Send a request; a process that has died does not read it, and its end is among the replies."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()

    def interrupt(self) -> None:
        """Stop the running stage."""
        self._process.send_signal(signal.SIGINT)

    def kill_unawaited(self) -> None:
        """End the process at once."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, even a stopped one, and wait for it."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process and wait for it."""
        lifetime.close(self._process)
        self._reader.join(READER_SECONDS)  # A grandchild that was forked can hold the pipe open for longer.


# A process (`MemberProcess`, or `PlacedProcess` on another machine) and its message; None is its end.
Replies = SimpleQueue[tuple[Any, Message | None]]

"""The members of a cluster on other machines, and the process here that has an engine start them: the module ``ENGINE``
of the engine, see `engines.Placing`."""

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tasks import config
from tasks.process.child import Child, Message
from tasks.strategies import engines
from tasks.strategies.engines import Member, Placed
from tasks.system import errors, lifetime
from tasks.system.errors import Interrupted, StratagemError

CONNECT_SECONDS = 120.0
POLL_SECONDS = 1.0

_waiting: "set[Allocation]" = set()
"""Of all threads."""


def stop_waiting() -> None:
    """Make every thread that waits for places raise Interrupted."""
    for one in list(_waiting):
        one.stop_waiting()


class Allocation:
    """The places of a cluster's members on other machines; closing it gives them up."""

    def __init__(
        self,
        section: config.Cluster,
        counts: Sequence[int],
        cpus: int | None,
        environment: Mapping[str, str],
        log: Path,
        replies: "SimpleQueue[Any]",
    ) -> None:
        """Reserve the places; it may take as long as others use the machines.

        Args:
            section: the strategy's.
            counts: allowed numbers of workers, the largest first.
            cpus: cores of each process; None leaves that to the engine.
            environment: of every process; a member adds its own.
            log: for the engine's messages; a file in its folder shows whether the machines share that folder.
            replies: receives the messages of each member, and None at its end.

        Raises:
            UserError: the engine is not installed, has too few machines, or these have other folders, packages or code.
            StratagemError: the engine does not answer.
        """
        engine = engines.find_placing(section)
        if engine is None:
            raise ValueError(f"{section.launcher} places nothing")
        self._replies = replies
        self._environment = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._at: dict[int, PlacedProcess] = {}
        self._writing = threading.Lock()
        token, token_file = secrets.token_hex(16), log.with_suffix(".token")
        token_file.write_text(token, encoding="ascii")
        ray = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = Child([sys.executable, "-m", engine.ENGINE], ray, log=log)
        self._process.listen(self._take)
        try:
            folder = str(config.project_root().resolve())
            where = {"project": folder, "token": token, "token_file": str(token_file.resolve())}
            self._write({**engine.request(section, counts, cpus), **where})
            _waiting.add(self)
            self._answer("connected", CONNECT_SECONDS)
            places = [Placed(**place) for place in self._answer("placed", None)["placed"]]
            self.cpus = places[0].cores
            """Cores of each process."""
            self.members: list[Member] = engine.members_at(section, places)
            """The chief first."""
        except BaseException:
            self.close()
            raise
        finally:
            _waiting.discard(self)
            token_file.unlink()

    def stop_waiting(self) -> None:
        """Interrupt the thread that waits for the places."""
        self._answers.put(errors.to_json(Interrupted("it waited for its places")))

    def open(self, member: Member, entry: str, log: Path | None) -> "PlacedProcess":
        """Start a member at its place: `python -m tasks ENTRY`."""
        place = self.members.index(member)
        environment = {**self._environment, **member.environment}
        # The chief writes to the terminal; only its libraries write to the log.
        kept = str(log) if log is not None and entry != "serve" else None
        if log is not None:
            environment["STRATAGEM_LOG"] = str(log)
        process = PlacedProcess(member, entry, lambda do, *given: self._tell(place, do, *given), self._replies)
        self._at[place] = process
        folder = str(config.project_root().resolve())
        self._tell(place, "start", ["-m", "tasks", entry], folder, environment, kept)
        return process

    def close(self) -> None:
        """End all members, and give their places up."""
        self._process.close()

    def _tell(self, place: int, do: str, *arguments: Any) -> None:
        self._write({"member": place, "do": do, "arguments": arguments})

    def _write(self, message: Message) -> None:
        with self._writing, contextlib.suppress(ValueError):  # It is closed already; its end is among the answers.
            self._process.send(message)

    def _answer(self, name: str, seconds: float | None) -> Message:
        """Wait for an answer of that name."""
        waited = 0.0
        while True:
            try:
                answer = self._answers.get(timeout=POLL_SECONDS)
            except Empty:
                waited += POLL_SECONDS
                if seconds is not None and waited > seconds:
                    raise StratagemError(f"the cluster does not answer: nothing came within {seconds:g} s") from None
                continue
            if "error" in answer:
                raise errors.from_json(answer)
            if "waits" in answer:
                print(answer["waits"], file=sys.stderr, flush=True)
            if name in answer:
                return answer

    def _take(self, message: Message | None) -> None:
        if message is None:
            gone = "the process that asks the cluster for its places has ended"
            for process in list(self._at.values()):
                process.take({"ended": gone, "lost": True})
            self._answers.put({"error": gone, "type": StratagemError.__name__})
        elif "member" in message:
            self._at[message["member"]].take(message)
        else:
            self._answers.put(message)


class PlacedProcess:
    """A member of a cluster on another machine; on this one it would be a `MemberProcess`."""

    peak_memory_bytes = 0  # The engine does not report it.

    def __init__(self, member: Member, entry: str, tell: Any, replies: "SimpleQueue[Any]") -> None:
        """Begin to listen to a process; `Allocation.open` starts it."""
        self.member = member
        self.entry = entry
        self.has_begun = False
        self.silent_seconds = 0.0
        self.has_place = True
        """Whether it can be restarted at the same place."""
        self._tell = tell
        self._replies = replies
        self._over = threading.Event()
        self._death = ""

    def take(self, message: Message) -> None:
        """Handle a message about the process."""
        if "stderr" in message:
            sys.stderr.write(message["stderr"])
            sys.stderr.flush()
        elif "line" in message:
            with contextlib.suppress(ValueError):  # A process that is killed leaves half a line.
                self._replies.put((self, json.loads(message["line"])))
        elif "ended" in message and not self._over.is_set():
            self.has_place = not message.get("lost", False)
            self._death = message["ended"]
            self._over.set()
            self._replies.put((self, None))

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    @property
    def death(self) -> str:
        """How the process died."""
        self._over.wait()
        return self._death

    def send(self, request: Message) -> None:
        """Send a request; a process that has died does not read it, and its end is among the replies."""
        self._tell("send", json.dumps(request))

    def interrupt(self) -> None:
        """Stop the running stage."""
        self._tell("signal", signal.SIGINT)

    def kill_unawaited(self) -> None:
        """End the process at once."""
        self._tell("signal", signal.SIGKILL)

    def kill(self) -> None:
        """End the process at once, even a stopped one, and wait for it."""
        self.kill_unawaited()
        self._over.wait(lifetime.GRACE_SECONDS)  # A machine that is gone does not answer.

    def close(self) -> None:
        """End the process and wait for it."""
        self._tell("close")
        if not self._over.wait(lifetime.GRACE_SECONDS):
            self.kill()

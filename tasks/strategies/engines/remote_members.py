"""The members of a cluster on other machines. A process on this machine lets an engine start them: it runs the module
that `engines.find_placing` names."""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tasks import config
from tasks.strategies.engines import OF_A_NODE, Member
from tasks.system import errors, lifetime
from tasks.system.child import Child, Message
from tasks.system.errors import Interrupted, StratagemError

_waiting: "set[Allocation]" = set()
"""The allocations of all threads that wait for places."""


def stop_waiting() -> None:
    """Raise Interrupted in every thread that waits for places."""
    for one in list(_waiting):
        one.take(errors.to_json(Interrupted("interrupted while waiting for places on the cluster")))


class Allocation(Child):
    """The places of a cluster's members on other machines; closing it ends all members and frees the places."""

    def __init__(
        self,
        engine: str,
        section: config.Cluster,
        counts: Sequence[int],
        cpus: int | None,
        log: Path,
        replies: "SimpleQueue[Any]",
    ) -> None:
        """Reserve the places; this waits until other users free enough machines.

        Args:
            engine: the module that talks to the engine.
            section: the strategy's settings.
            counts: allowed numbers of workers, the largest first.
            cpus: cores of each process; None leaves the choice to the engine.
            log: the file for the engine's messages; machines that cannot see it do not share the project's folder.
            replies: receives the messages of each member, and None at its end.

        Raises:
            UserError: the engine is not installed, has too few machines, or they do not share the project's folder.
            StratagemError: the process that talks to the engine has ended.
        """
        self._replies = replies
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._at: dict[int, PlacedProcess] = {}
        with log.open("ab") as stderr:
            environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
            command = [sys.executable, "-m", engine]
            super().__init__(command, environment, cwd=config.project_root(), stderr=stderr)
        self.listen(self.take)
        asked = {"section": section.model_dump(mode="json"), "counts": list(counts), "cpus": cpus}
        self.send({**asked, "log": str(log.resolve())})
        _waiting.add(self)
        try:
            while "members" not in (answer := self._answers.get()):
                if "error" in answer:
                    raise errors.from_json(answer)
                print(answer["waits"], file=sys.stderr, flush=True)
        except BaseException:
            self.close()
            raise
        finally:
            _waiting.discard(self)
        self.cpus: int = answer["cores"]
        """Cores of each process."""
        self.members = [Member(**one) for one in answer["members"]]
        """The chief first."""

    def open(self, member: Member, entry: str, environment: Mapping[str, str], log: Path | None) -> "PlacedProcess":
        """Start a member at its place: `python -m tasks ENTRY`, with this log for its standard error."""
        place = self.members.index(member)
        process = self._at[place] = PlacedProcess(member, entry, partial(self._tell, place, "tell"), self._replies)
        # Omit variables that each node sets itself, unless the engine chose a value for this member.
        of_node = OF_A_NODE - member.environment.keys()
        given = {
            name: value for name, value in environment.items() if name not in of_node and not name.startswith("RAY_")
        }
        log_file = str(log) if log is not None else None
        self._tell(place, "start", ["-m", "tasks", entry], str(config.project_root().resolve()), given, log_file)
        return process

    def _tell(self, place: int, do: str, *arguments: Any) -> None:
        with contextlib.suppress(ValueError):  # It is already closed; the answers include its end.
            self.send({"member": place, "do": do, "arguments": arguments})

    def take(self, message: Message | None) -> None:
        """Handle a message from the engine's process; None is its end."""
        if message is None:
            gone = "the process that reserves places on the cluster has ended"
            for process in list(self._at.values()):
                process.take({"ended": gone, "lost": True})
            self._answers.put(errors.to_json(StratagemError(gone)))
        elif "member" in message:
            self._at[message["member"]].take(message)
        else:
            self._answers.put(message)


class PlacedProcess:
    """A member of a cluster on another machine, the counterpart of `cluster.MemberProcess`."""

    begun = False
    silent_seconds = 0.0
    peak_memory_bytes = 0  # The engine does not report it.

    def __init__(self, member: Member, entry: str, tell: Any, replies: "SimpleQueue[Any]") -> None:
        """Receive the messages of a process that `Allocation.open` starts."""
        self.member = member
        self.entry = entry
        self.has_place = True
        """Whether it can be restarted at the same place."""
        self._tell = tell
        self._replies = replies
        self._death: Future[str] = Future()

    def take(self, message: Message) -> None:
        """Handle a message about the process."""
        if "stderr" in message:
            sys.stderr.write(message["stderr"])
            sys.stderr.flush()
        elif "reply" in message:
            self._replies.put((self, message["reply"]))
        elif self.alive:
            self.has_place = not message.get("lost", False)
            self._death.set_result(message["ended"])
            self._replies.put((self, None))

    @property
    def alive(self) -> bool:
        return not self._death.done()

    @property
    def death(self) -> str:
        """How the process died."""
        return self._death.result()

    def send(self, request: Message) -> None:
        """Send a request. Ignore that the process has died: the replies include its end."""
        self._tell("send", request)

    def send_signal(self, number: int) -> None:
        """Send a signal: SIGINT stops the running stage."""
        self._tell("send_signal", number)

    def kill(self) -> None:
        """Kill the process, even if it is stopped, and wait for it."""
        self.send_signal(signal.SIGKILL)
        wait([self._death], lifetime.GRACE_SECONDS)  # A lost machine does not answer.

    def close(self) -> None:
        """End the process and wait for it."""
        self._tell("close_input")
        if wait([self._death], lifetime.GRACE_SECONDS).not_done:
            self.kill()

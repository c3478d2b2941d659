"""The processes of one strategy: starts them, listens to them and ends them. `cluster` sends them requests.

One of them is the chief, `python -m tasks serve`. In a cluster, the others are workers that train with it (`assist`) or
servers that it gives work to (`tf_server`). Each process ends when its standard input closes, so none outlives the
process that started it.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tasks import config
from tasks.process.child import Child, Message, stage_command
from tasks.process.remote_members import Allocation, PlacedProcess
from tasks.strategies import engines
from tasks.strategies.engines import Member
from tasks.strategies.engines.isolation import Network


class Patience(NamedTuple):
    """How long to wait for a process."""

    start_seconds: float = 300.0
    """From a request until the first heartbeat of a process that builds the strategy for it: imports on a busy machine,
    and waiting for the last of its peers."""
    lost_peer_seconds: float = 5.0
    """When a process fails because another one died, that death is noticed within this time."""
    poll_seconds: float = 1.0


PATIENCE = Patience()


class MemberProcess(Child):
    """A member of a cluster on this machine, or the only process of a strategy without one."""

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
        if log is not None:
            environment["STRATAGEM_LOG"] = str(log)
        command = stage_command(entry)
        super().__init__(
            command if network is None else network.command(command),
            environment,
            log=None if entry == "serve" else log,
            pass_fds=() if network is None else network.descriptors,
        )
        self.listen(lambda message: replies.put((self, message)))


# A process (`MemberProcess`, or `PlacedProcess` on another machine) and its message; None is its end.
Replies = SimpleQueue[tuple[Any, Message | None]]

OneProcess = MemberProcess | PlacedProcess
"""On this machine, or on another one."""


class ProcessGroup:
    """The chief and the other members of a strategy that this command starts."""

    def __init__(
        self,
        section: config.StrategySection,
        environment: Mapping[str, str],
        with_cluster: bool,
        patience: Patience,
        worker_counts: Sequence[int] = (),
    ) -> None:
        """Start the processes; the arguments are those of `cluster.StageProcesses`."""
        self.cluster = section.cluster if with_cluster else None
        self.processes: list[OneProcess] = []
        """The chief first; or the one member that this command starts."""
        self._patience = patience
        self._environment = dict(environment)
        self._logs: Logs | None = None
        self._network: Network | None = None
        self._placement: Allocation | None = None
        self._worker_counts = worker_counts or ([section.cluster.workers] if section.cluster is not None else [])
        self._cpus = section.cluster.cpus if section.cluster is not None else None
        self._members = engines.members(section) if with_cluster else [engines.ALONE]
        if self.cluster is not None:
            seconds = min(5.0, self.cluster.heartbeat_timeout_seconds / 4)
            self._environment["STRATAGEM_HEARTBEAT_SECONDS"] = str(seconds)
            self._logs = Logs()
            self._network = engines.find_network(self.cluster)
        self._replies: Replies = SimpleQueue()
        try:
            self._place()
            self.start()
        except BaseException:
            self.close(went_well=True)  # No run has used these processes, so nobody needs their logs.
            raise

    @property
    def num_members(self) -> int:
        """How many processes the group has when all of them run."""
        return len(self._members)

    @property
    def all_alive(self) -> bool:
        """Whether every member runs."""
        return len(self.processes) == self.num_members and all(process.alive for process in self.processes)

    @property
    def peak_memory_bytes(self) -> int:
        """The sum over the running members of the most memory that each has had."""
        return sum(process.peak_memory_bytes for process in self.processes)

    @property
    def logs(self) -> str:
        """The folder of the members' logs, relative to the project's."""
        return str(self._logs or "")

    def move_logs(self, run_folder: Path) -> None:
        """Keep the logs with a run from now on."""
        if self._logs is not None:
            self._logs.move_to(run_folder)

    def place_again(self, cluster: config.Cluster) -> None:
        """Ask the launcher again which members there are, after all have ended.

        Raises:
            UserError: the cluster no longer has room for them.
        """
        self._members = engines.members(cluster)
        self._place()

    def _place(self) -> None:
        """Reserve places on other machines, where an engine starts the members there."""
        if self.cluster is None or self._logs is None or engines.find_placing(self.cluster) is None:
            return
        if self._placement is not None:
            self._placement.close()
        log, replies = self._logs.of_engine(self.cluster.launcher or ""), SimpleQueue[Any]()
        self._placement = Allocation(self.cluster, self._worker_counts, self._cpus, self._environment, log, replies)
        self._replies = replies
        self._cpus = self._placement.cpus  # Another number of threads would change the last digits of the results.
        self._members = self._placement.members

    def start(self) -> None:
        """Start all members at their places."""
        if self._placement is None:
            self._replies = SimpleQueue()
        self.processes = []
        for member in self._members:
            self.processes.append(self._open(member))

    def start_again(self, process: OneProcess) -> None:
        """Restart one member on its own port."""
        self.processes[self.processes.index(process)] = self._open(process.member)

    def leave_out(self, process: OneProcess) -> None:
        """Continue without a member."""
        self.processes = [one for one in self.processes if one is not process]

    def _open(self, member: Member) -> OneProcess:
        log = self._logs.of(member) if self._logs is not None else None
        entry = "serve"
        if not member.is_chief:
            entry = "tf_server" if self.cluster is not None and self.cluster.chief_gives_work else "assist"
        if self._placement is not None:
            return self._placement.open(member, entry, log)
        return MemberProcess(member, entry, self._environment, log, self._replies, self._network)

    def hear(self) -> tuple[OneProcess | None, Message | None]:
        """Return a process and its message, None for its end; (None, None) if no message comes for a while."""
        began = time.monotonic()
        process: OneProcess | None = None
        reply: Message | None = None
        with contextlib.suppress(Empty):
            process, reply = self._replies.get(timeout=self._patience.poll_seconds)
        # Not the time since the last heartbeat: after this process itself was stopped, all members would look silent.
        waited = min(time.monotonic() - began, self._patience.poll_seconds)
        for one in self.processes:
            one.has_begun = one.has_begun or (one is process and is_heartbeat(reply))
            one.silent_seconds = 0.0 if one is process else one.silent_seconds + waited
        return process, reply

    def too_silent(self) -> Iterator[tuple[OneProcess, float]]:
        """Yield each member of a cluster that has sent no heartbeat for too long, and the limit in seconds."""
        if self.cluster is None:
            return
        begun = self.cluster.heartbeat_timeout_seconds
        # Building a strategy waits for all members, including those that someone else has yet to start.
        starting = math.inf if self.is_foreign else self._patience.start_seconds
        for one in list(self.processes):
            limit = begun if one.has_begun else max(begun, starting)
            if one.silent_seconds > limit:
                yield one, limit

    @property
    def is_foreign(self) -> bool:
        """Whether someone else starts the other members."""
        return self.cluster is not None and not engines.find_launcher(self.cluster).STARTS_ALL

    def kill(self) -> None:
        """End all members at once."""
        for process in self.processes:
            process.kill()

    def close(self, went_well: bool) -> None:
        """End all processes and wait for them.

        Args:
            went_well: nothing failed, so logs that belong to no run are removed.
        """
        for process in self.processes:  # The chief first: TensorFlow would log at length that the others are gone.
            process.close()
        if self._placement is not None:
            self._placement.close()
        if self._network is not None:
            self._network.close()
        if self._logs is not None:
            self._logs.close(went_well)


def is_heartbeat(reply: Message | None) -> bool:
    """Return whether a message is a heartbeat."""
    return reply is not None and "heartbeat" in reply


class Logs:
    """A folder with a log for each member: in mlruns/logs/ until they train for a run, then in the run's folder."""

    def __init__(self) -> None:
        name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}", time.gmtime())
        _without_run().mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):  # The trials of a sweep have a cluster each, in threads of one process.
            self._folder = _without_run() / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
                return

    def __str__(self) -> str:
        """Return their folder, relative to the project's."""
        return str(self._folder.relative_to(config.project_root()))

    def of(self, member: Member) -> Path:
        """Return a member's log."""
        return self._folder / f"{member.name.replace(' ', '-')}.log"

    def of_engine(self, name: str) -> Path:
        """Return the log of the engine that starts members on other machines."""
        return self._folder / f"{name}.log"

    def move_to(self, run_folder: Path) -> None:
        """Keep them with a run from now on."""
        folder = run_folder / "logs"
        if self._folder.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = self._folder.rename(folder / self._folder.name)
            with contextlib.suppress(OSError):  # Other commands may have logs there.
                _without_run().rmdir()

    def close(self, went_well: bool) -> None:
        """Remove empty logs; remove all of them if nothing failed and they belong to no run."""
        unwanted = went_well and self._folder.parent == _without_run()
        with contextlib.suppress(OSError):  # The folder stays as long as it has logs.
            for log in self._folder.iterdir():
                if unwanted or not log.stat().st_size:
                    log.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()


def _without_run() -> Path:
    return config.project_root() / "mlruns" / "logs"

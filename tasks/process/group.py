"""The processes of one strategy: each started at its place, heard, and ended; what is asked of them, `cluster` says.

One of them is the chief, `python -m tasks serve`. Where the strategy is a cluster the others stand beside it: workers
that train with it (`assist`), or servers that it gives work to (`tf_server`). Each process ends when its standard input
closes, so none outlives the process that started it.
"""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tasks import config
from tasks.process.member import MemberProcess, Message, Patience, Replies
from tasks.process.remote_members import Allocation, PlacedProcess
from tasks.strategies import engines
from tasks.strategies.engines import Member
from tasks.strategies.engines.isolation import Network

OneProcess = MemberProcess | PlacedProcess
"""One of this machine, or of another."""


class ProcessGroup:
    """The chief, the members beside it, and all else that this command starts for a strategy."""

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
        """Those that are there, the chief first; or the one member that this command starts."""
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
            self.close(went_well=True)  # The error says all: no run has logs of these processes.
            raise

    @property
    def num_members(self) -> int:
        """How many processes there are when all are there."""
        return len(self._members)

    @property
    def all_alive(self) -> bool:
        """Whether every member is there."""
        return len(self.processes) == self.num_members and all(process.alive for process in self.processes)

    @property
    def peak_memory_bytes(self) -> int:
        """What the members that are there have had of the memory, each at its most, added up."""
        return sum(process.peak_memory_bytes for process in self.processes)

    @property
    def logs(self) -> str:
        """Where the members' logs lie, from the project's folder."""
        return str(self._logs or "")

    def move_logs(self, run_folder: Path) -> None:
        """Keep the logs with a run from now on."""
        if self._logs is not None:
            self._logs.move_to(run_folder)

    def place_again(self, cluster: config.Cluster) -> None:
        """Ask the launcher once more which members there are, after all have ended.

        Raises:
            UserError: the cluster as it is now has no place for them.
        """
        self._members = engines.members(cluster)
        self._place()

    def _place(self) -> None:
        """Have the members placed, where an engine gives them places on other machines."""
        if self.cluster is None or self._logs is None or engines.find_placing(self.cluster) is None:
            return
        if self._placement is not None:
            self._placement.close()
        log, replies = self._logs.of_engine(self.cluster.launcher or ""), SimpleQueue[Any]()
        self._placement = Allocation(self.cluster, self._worker_counts, self._cpus, self._environment, log, replies)
        self._replies = replies
        self._cpus = self._placement.cpus  # Another number of threads would change the last digits.
        self._members = self._placement.members

    def start(self) -> None:
        """Start all members at their places."""
        if self._placement is None:
            self._replies = SimpleQueue()
        self.processes = []
        for member in self._members:
            self.processes.append(self._open(member))

    def start_again(self, process: OneProcess) -> None:
        """Start one member again, on its own port."""
        self.processes[self.processes.index(process)] = self._open(process.member)

    def leave_out(self, process: OneProcess) -> None:
        """Go on without a member."""
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
        """Return what a process says, with None for its end; (None, None) where nobody says anything for a while."""
        began = time.monotonic()
        process: OneProcess | None = None
        reply: Message | None = None
        with contextlib.suppress(Empty):
            process, reply = self._replies.get(timeout=self._patience.poll_seconds)
        # Not the time since its last sign: after this process itself was stopped, that would be long for everyone.
        waited = min(time.monotonic() - began, self._patience.poll_seconds)
        for one in self.processes:
            one.has_begun = one.has_begun or (one is process and is_heartbeat(reply))
            one.silent_seconds = 0.0 if one is process else one.silent_seconds + waited
        return process, reply

    def too_silent(self) -> Iterator[tuple[OneProcess, float]]:
        """Yield each member of a cluster that gave no sign of life for too long, and how long that is."""
        if self.cluster is None:
            return
        begun = self.cluster.heartbeat_timeout_seconds
        # To build a strategy is to wait for all members, also for those that someone else has still to start.
        starting = math.inf if self.is_foreign else self._patience.start_seconds
        for one in list(self.processes):
            limit = begun if one.has_begun else max(begun, starting)
            if one.silent_seconds > limit:
                yield one, limit

    @property
    def is_foreign(self) -> bool:
        """Whether someone else starts the other members."""
        return self.cluster is not None and not engines.find(self.cluster).STARTS_ALL

    def kill(self) -> None:
        """End all members at once."""
        for process in self.processes:
            process.kill()

    def close(self, went_well: bool) -> None:
        """End all processes and wait for them.

        Args:
            went_well: nobody will ask the logs why something failed.
        """
        for process in self.processes:  # The chief first: it would tell at length that the others have gone.
            process.close()
        if self._placement is not None:
            self._placement.close()
        if self._network is not None:
            self._network.close()
        if self._logs is not None:
            self._logs.close(went_well)


def is_heartbeat(reply: Message | None) -> bool:
    """Return whether a message is a sign of life and nothing else."""
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
        """Return where they lie, from the project's folder."""
        return str(self._folder.relative_to(config.project_root()))

    def of(self, member: Member) -> Path:
        """Return the file of a member."""
        return self._folder / f"{member.name.replace(' ', '-')}.log"

    def of_engine(self, name: str) -> Path:
        """Return the file of what places the members on other machines."""
        return self._folder / f"{name}.log"

    def move_to(self, run_folder: Path) -> None:
        """Keep them with a run from now on."""
        folder = run_folder / "logs"
        if self._folder.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = self._folder.rename(folder / self._folder.name)
            with contextlib.suppress(OSError):  # Those of others lie there, too.
                _without_run().rmdir()

    def close(self, went_well: bool) -> None:
        """Remove the empty ones; all of them where no run has them and nobody will ask why something failed."""
        unwanted = went_well and self._folder.parent == _without_run()
        with contextlib.suppress(OSError):  # A log that says something stays, and so does its folder.
            for log in self._folder.iterdir():
                if unwanted or not log.stat().st_size:
                    log.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()


def _without_run() -> Path:
    return config.project_root() / "mlruns" / "logs"

"""The processes of a strategy: starts them, sends requests, collects the answers, and restarts them when one is lost.

One of them is the chief, `python -m tasks serve`. In a cluster, the others are workers that train with the chief
(`assist`) or servers that receive work from it (`tf_server`). Requests and answers are JSON lines. Each process ends
when its standard input closes, so none outlives its parent.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from tasks import config
from tasks.process.stages import STAGES, Stage
from tasks.strategies import engines
from tasks.strategies.engines import Member
from tasks.strategies.environment import stage_command
from tasks.system import errors, lifetime, network
from tasks.system.child import Child, Message
from tasks.system.errors import Interrupted, Preempted, ProcessDied, StratagemError, Terminated, UserError

if TYPE_CHECKING:  # A process without a cluster does not need them.
    from tasks.strategies.engines.isolation import Network
    from tasks.strategies.engines.remote_members import Allocation, PlacedProcess

START_SECONDS = 300.0
"""The maximum time from a request to the first heartbeat of a process that builds the strategy: it includes imports on
a busy machine, and waiting for the last peer."""
LOST_PEER_SECONDS = 5.0
"""When a process fails because another one died, this process notices that death within this time."""
POLL_SECONDS = 1.0


class MemberProcess(Child):
    """A member of a cluster on this machine, or the only process of a strategy without a cluster."""

    member: Member
    entry: str
    """Its command is `python -m tasks ENTRY`."""
    has_place = True
    """Whether it can be restarted at the same place."""
    begun = False
    """Whether it has sent a heartbeat."""
    silent_seconds = 0.0
    """The time since its last message or the current request."""


OneProcess: TypeAlias = "MemberProcess | PlacedProcess"
"""A member on this machine, or on another one."""


class _Lost(Exception):
    """A member of a cluster died, hangs, or can no longer reach the others."""


class StageProcesses:
    """The process that runs the stages, and the other members of its cluster.

    If a member is lost during a stage in which all workers take part, all members restart, and the training continues
    from its latest checkpoint. A lost worker of parameter servers restarts alone.
    """

    def __init__(
        self, cluster: config.Cluster | None, environment: Mapping[str, str], worker_counts: Sequence[int] = ()
    ) -> None:
        """Start the processes.

        Args:
            cluster: the strategy, if several processes train together; None starts a single process.
            environment: the environment of every process; a member adds its own variables.
            worker_counts: allowed numbers of workers on other machines, the largest first; ``workers`` if empty.
        """
        self.cluster = cluster
        self.restarts: list[str] = []
        """The reasons for restarts since the run was started or resumed."""
        self.processes: list[OneProcess] = []
        """The chief first; or the only member that this command starts."""
        self._members = [engines.ALONE] if cluster is None else engines.members(cluster)
        self._environment = dict(environment)
        self._worker_counts = worker_counts
        self._replies: SimpleQueue[tuple[Any, Message | None]] = SimpleQueue()
        """Processes with their messages; None is the end of a process."""
        self.logs = Logs()
        self._network: Network | None = None
        self._placement: Allocation | None = None
        self._num_requests = 0
        self._failed = False
        if cluster is not None:
            self._cpus = cluster.cpus
            self._environment["STRATAGEM_HEARTBEAT_SECONDS"] = str(min(5.0, cluster.heartbeat_timeout_seconds / 4))
            self._network = engines.find_network(cluster)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def first(self) -> OneProcess:
        """The chief; or the only member that this command starts."""
        return self.processes[0]

    @property
    def usable(self) -> bool:
        """Whether a training can begin."""
        all_alive = len(self.processes) == len(self._members) and all(process.alive for process in self.processes)
        return not self._failed and all_alive

    def _start(self) -> None:
        """Start all members, at new places if an engine places them on other machines."""
        self._replies = SimpleQueue()
        engine = engines.find_placing(self.cluster) if self.cluster is not None else None
        if self.cluster is not None and engine is not None:
            from tasks.strategies.engines.remote_members import Allocation

            if self._placement is not None:
                self._placement.close()
            counts, log = self._worker_counts or [self.cluster.workers], self.logs.of(self.cluster.launcher or "")
            self._placement = Allocation(engine, self.cluster, counts, self._cpus, log, self._replies)
            # Later places have the same: a different number of threads would change the last digits of the results.
            self._cpus = self._placement.cpus
            self._members = self._placement.members
        self.processes = []
        for member in self._members:
            self.processes.append(self._open(member))  # One by one, so that `close` ends those that have started.

    def _open(self, member: Member) -> OneProcess:
        entry, environment, log = "serve", {**self._environment, **member.environment}, None
        if self.cluster is not None:
            log = self.logs.of(member.name)
            environment["STRATAGEM_LOG"] = str(log)
            if member.is_chief:
                log = None  # The chief writes to the terminal; only its libraries write to the log.
            else:
                entry = "tf_server" if self.cluster.chief_gives_work else "assist"
        if self._placement is not None:
            return self._placement.open(member, entry, environment, log)
        command, replies = stage_command(entry), self._replies
        descriptors: tuple[int, ...] = ()
        if self._network is not None:
            command, descriptors = self._network.command(command), self._network.descriptors
        with log.open("ab") if log is not None else contextlib.nullcontext() as stderr:
            root = config.project_root()
            process = MemberProcess(command, environment, cwd=root, stderr=stderr, pass_fds=descriptors)
        process.member, process.entry = member, entry
        process.listen(lambda message: replies.put((process, message)))
        return process

    def call(self, stage: str, arguments: dict[str, Any]) -> Any:
        """Run a stage and return its record as JSON values.

        Raises:
            UserError: the stage refused its input.
            StratagemError: the stage failed, or processes died more often than restarts are allowed.
            ProcessDied: the only process, or the chief during a stage of its own, died.
            Interrupted: Ctrl-C or SIGTERM stopped the stage.
        """
        row = STAGES[stage]
        if row.starts_run:
            self.restarts = []
            if self.cluster is not None:
                # Before the run starts, because a member that is lost meanwhile would leave a run that nobody ends.
                self.call("check", {name: arguments[name] for name in ("settings", "prepared")})
        folder = config.project_root() / arguments["run"]["folder"] if row.is_shared and "run" in arguments else None
        # A training follows a check, so the logs are open. An evaluation may be the first request.
        if stage == "train":
            self.logs.move_to(folder)
        try:
            while True:
                try:
                    answer = self._exchange(row, arguments)
                    self.logs.move_to(folder)
                    return answer
                except _Lost as lost:
                    self._restart(stage, str(lost))
        except StratagemError as error:
            self._failed = self._failed or not isinstance(error, UserError)
            raise
        except BaseException as stop:  # Ctrl-C, SIGTERM, or Prefect's exception when it cancels a run.
            self._failed, said = True, self._interrupt()
            by_hand = isinstance(stop, KeyboardInterrupt) and not isinstance(stop, Terminated)
            if row.is_shared and engines.is_foreign(self.cluster) and not by_hand:
                said = said or "the next start continues from the latest checkpoint"
                raise Preempted(f"{stage} stopped on a signal: {said}") from None
            if isinstance(stop, KeyboardInterrupt):
                raise Interrupted(said or f"{stage} was interrupted", getattr(stop, "exit_code", 130)) from None
            if not isinstance(stop, Exception):  # Prefect's exception gives no reason, but the run's status needs one.
                stop.args = (said or f"{stage} was interrupted",)
            raise

    def stand_by(self) -> None:
        """Keep the only local member alive until the chief, which runs elsewhere, has ended.

        The chief listens on its address in TF_CONFIG as soon as it knows the cluster. A worker that has done its part
        stays, because the chief may still be receiving its results. It may die: JAX ends a process that loses its
        chief.

        Raises:
            StratagemError: the member died and may not be restarted.
        """
        cluster = json.loads(self.first.member.environment["TF_CONFIG"])["cluster"]
        host, _, port = cluster["chief" if "chief" in cluster else "worker"][0].rpartition(":")
        limit = self.cluster.heartbeat_timeout_seconds if self.cluster is not None else 0.0
        # A worker has already met the chief; a server may be waiting for a chief that has not started yet.
        seen_at = time.monotonic() if self.first.entry == "assist" else math.inf
        try:
            while True:
                error, now = network.connection_error(host, int(port), limit), time.monotonic()
                # A refused connection means that the chief no longer listens; other errors may be the network's.
                if error is None:
                    seen_at = now
                elif now - seen_at > (0.0 if isinstance(error, ConnectionRefusedError) else limit):
                    return
                process, reply = self._listen()
                if process is not None and reply is None:
                    if process.entry == "assist":
                        return
                    self._lose(process, f"died ({process.death})")
        except _Lost as lost:
            self._failed = True
            raise StratagemError(f"{lost}; its log: {self.logs}") from None

    def close(self) -> None:
        """End all processes and wait for them."""
        for process in self.processes:  # The chief first: it would log at length that the others ended.
            process.close()
        if self._placement is not None:
            self._placement.close()
        if self._network is not None:
            self._network.close()
        self.logs.close(went_well=not self._failed and not self.restarts)

    def _exchange(self, row: Stage[..., Any], arguments: dict[str, Any]) -> Any:
        """Send a request to all processes that take part in it, and return the chief's record when all have
        answered."""
        self._num_requests += 1
        asked = [one for one in self.processes if one is self.first or (row.is_shared and one.entry == "assist")]
        for one in self.processes:
            one.silent_seconds = 0.0
        for one in asked:
            given = arguments
            if one.entry == "assist":
                given = {name: arguments[name] for name in ("settings", "prepared")}
            one.send({"id": self._num_requests, "stage": row.name, "arguments": given})
        answers: dict[OneProcess, Message] = {}
        deadline = math.inf
        while len(answers) < len(asked) and time.monotonic() < deadline:
            process, reply = self._listen(watch=row.is_shared)
            if process is None:
                continue
            if reply is None:  # The process died.
                missed = process is self.first or process not in answers
                if missed and row.is_shared and self.cluster is not None:
                    self._lose(process, f"died ({process.death})")
                elif process is self.first:
                    death = process.death
                    why = ". The machine may have run out of memory" if death == signal.SIGKILL.name else ""
                    raise ProcessDied(
                        f"the process that ran {row.name} died ({death}){why}. The same command continues"
                    )
            elif reply.get("id") == self._num_requests:
                answers[process] = reply
                # An interrupted training ends on all members, on the chief after its checkpoint is written.
                if "error" in reply and deadline == math.inf and reply["type"] != Interrupted.__name__:
                    patience = LOST_PEER_SECONDS if reply.get("lost_peer") else lifetime.GRACE_SECONDS
                    deadline = time.monotonic() + patience
        if not any("error" in reply for reply in answers.values()):
            return answers[self.first]["record"]
        silent = [one for one in asked if one not in answers]
        for one in silent:  # They wait for members that have failed, and would not read another request.
            one.kill()
        raise self._failure(row, answers, silent)

    def _listen(self, watch: bool = True) -> "tuple[OneProcess | None, Message | None]":
        """Return a process and its message, None for its end; (None, None) if no message arrives for a while.

        Args:
            watch: look for members of a cluster that have sent no heartbeat for too long.

        Raises:
            _Lost: such a member was found.
        """
        began = time.monotonic()
        process: OneProcess | None = None
        reply: Message | None = None
        with contextlib.suppress(Empty):
            process, reply = self._replies.get(timeout=POLL_SECONDS)
        # Not the time since the last heartbeat: if this process itself was stopped, all members would seem silent.
        waited = min(time.monotonic() - began, POLL_SECONDS)
        for one in self.processes:
            one.silent_seconds = 0.0 if one is process else one.silent_seconds + waited
        is_heartbeat = reply is not None and "heartbeat" in reply
        if process is not None and is_heartbeat:
            process.begun = True
        if watch and self.cluster is not None:
            begun = self.cluster.heartbeat_timeout_seconds
            # Building a strategy waits for all members, including those that someone else starts later.
            starting = math.inf if engines.is_foreign(self.cluster) else max(begun, START_SECONDS)
            for one in list(self.processes):
                limit = begun if one.begun else starting
                if one.silent_seconds > limit:
                    self._lose(one, f"sent no heartbeat for {limit:g} s")
        if is_heartbeat or process not in self.processes:
            return None, None
        return process, reply

    def _lose(self, process: OneProcess, what: str) -> None:
        """Restart a worker of parameter servers on its own port; for any other member, raise ``_Lost``."""
        reason = f"{process.member.name} {what}"
        if self.cluster is None or (process.entry, process.member.job) != ("tf_server", "worker"):
            raise _Lost(reason)
        process.kill()
        place, most = self.processes.index(process), self.cluster.max_restarts
        if len(self.restarts) < most and process.has_place:
            self.restarts.append(reason)
            _print(f"{reason}; restarting it ({len(self.restarts)} of {most}); its log: {self.logs}")
            self.processes[place] = self._open(process.member)
            return
        del self.processes[place]
        if any(one.member.job == "worker" for one in self.processes):
            why = f"strategy.max_restarts = {most}, so the" if process.has_place else "the"
            _print(f"{reason}; {why} training continues without it; its log: {self.logs}")
            return
        raise _Lost(f"{reason}; no workers are left")

    def _failure(self, row: Stage[..., Any], answers: dict[OneProcess, Message], silent: list[OneProcess]) -> Exception:
        """Return one error for all answers: a user's mistake if there is one, else a lost member, else a failure."""
        failed = [(process, reply) for process, reply in answers.items() if "error" in reply]
        failed.sort(key=lambda pair: (pair[1]["type"] == "StratagemError", pair[0] is not self.first))
        process, reply = failed[0]
        lost = [one for one, answer in failed if answer.get("lost_peer")]
        if reply["type"] == "StratagemError" and lost and self.cluster is not None and row.is_shared:
            return _Lost(
                f"{silent[0].member.name} no longer answers" if silent else f"{lost[0].member.name} lost its peers"
            )
        error = errors.from_json(reply)
        if isinstance(error, Interrupted):  # That process received the signal, not this command.
            stopped = ", ".join(one.member.name for one, answer in failed if answer.get("told_to_stop"))
            if self.cluster is None:
                return Interrupted(str(error), Terminated.exit_code)
            if engines.is_foreign(self.cluster):
                return Preempted(f"{row.name} ended: {error}")
            return _Lost(f"{stopped or 'another member'} received a signal to stop")
        if process is not self.first and not isinstance(error, errors.UserError):
            return StratagemError(f"{process.member.name}: {error}; its log: {self.logs}")
        return error

    def _restart(self, stage: str, reason: str) -> None:
        """End all processes, and restart them if another restart is allowed."""
        for process in self.processes:
            process.kill()
        if self.cluster is None or engines.is_foreign(self.cluster):
            raise StratagemError(
                f"{stage} ended: {reason}. Start all members again: the same command for each continues from the "
                f"latest checkpoint. The log: {self.logs}"
            )
        most = self.cluster.max_restarts
        again = f"The same command continues from the latest checkpoint; the logs: {self.logs}"
        if len(self.restarts) >= most:
            raise StratagemError(
                f"{stage} failed: {reason}, and strategy.max_restarts = {most} allows no further restart. {again}"
            )
        self.restarts.append(reason)
        before = len(self._members)
        try:
            self._members = engines.members(self.cluster)
            self._start()
        except UserError as error:  # The cluster has changed since the start; the settings have not.
            raise StratagemError(f"{stage} failed: {reason}; {error}. {again}") from None
        count = len(self._members)
        left = f", {before - count} fewer" if before > count else ""
        _print(f"{reason}; all {count} processes restart{left} ({len(self.restarts)} of {most}); logs: {self.logs}")

    def _interrupt(self) -> str | None:
        """Stop the running stage, and return its message; a training first saves a checkpoint.

        The chief continues to serve, so that it can end the run properly. A second signal kills all processes.
        """

        def stop_at_once(number: int, frame: object) -> None:
            for process in self.processes:
                process.send_signal(signal.SIGKILL)
            os.write(2, b"stopped at once; the next run, or `stratagem reconcile`, ends the run\n")
            os._exit(128 + number)

        heard = [one for one in lifetime.STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN]  # See nohup.
        before = {number: signal.signal(number, stop_at_once) for number in heard}
        said = None
        try:
            self.first.send_signal(signal.SIGINT)
            end = time.monotonic() + lifetime.GRACE_SECONDS
            while time.monotonic() < end:
                process, reply = self._listen(watch=False)
                if process is not self.first:
                    continue
                if reply is None:
                    process.close()  # Wait for its end: otherwise the next request would be sent to it.
                    break
                if reply.get("id") == self._num_requests:
                    said = reply.get("error")
                    break
            else:
                self.first.kill()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return said


class Logs:
    """A folder with a log for each member: in mlruns/logs/ until they train for a run, then in the run's folder."""

    def __init__(self) -> None:
        # Each trial of a sweep has its own cluster, in a thread of one process.
        name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}-{uuid.uuid4().hex[:4]}", time.gmtime())
        self._without_run = config.project_root() / "mlruns" / "logs"
        self._folder = self._without_run / name

    def __str__(self) -> str:
        """Return their folder, relative to the project's."""
        return str(self._folder.relative_to(config.project_root()))

    def of(self, name: str) -> Path:
        """Return the log of a member, or of the engine that starts members on other machines."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{name.replace(' ', '-')}.log"

    def move_to(self, run_folder: Path | None) -> None:
        """Move the logs, if there are any, to a run's folder, including future messages."""
        if run_folder is not None and self._folder.is_dir() and self._folder.parent != (folder := run_folder / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = self._folder.rename(folder / self._folder.name)
            with contextlib.suppress(OSError):  # Other commands may have logs there.
                self._without_run.rmdir()

    def close(self, went_well: bool) -> None:
        """Remove empty logs; remove all of them if nothing failed and they belong to no run."""
        unwanted = went_well and self._folder.parent == self._without_run
        with contextlib.suppress(OSError):  # The folder stays as long as it has logs.
            for log in self._folder.iterdir():
                if unwanted or not log.stat().st_size:
                    log.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

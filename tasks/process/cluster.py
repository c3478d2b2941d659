"""Sends requests to the processes of one strategy, collects their answers, and restarts processes when one is lost.

Requests and answers are JSON lines. `group` has the processes.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tasks import config
from tasks.process.child import Message
from tasks.process.group import PATIENCE, OneProcess, Patience, ProcessGroup, is_heartbeat
from tasks.process.stages import STAGES
from tasks.system import errors, lifetime, network
from tasks.system.errors import Interrupted, Preempted, StratagemError, Terminated, UserError

# The message for a stage that was interrupted and did not answer in time, died, or had just ended.
NOT_SAID = "the next start goes on from the latest checkpoint"


class _Lost(Exception):
    """A member of a cluster died, hangs, or can no longer reach the others."""


class StageProcesses:
    """The process that runs the stages, and the other members of its cluster.

    When a member is lost during a request, all of them are ended and started again, and the training continues from its
    latest checkpoint. A lost worker of parameter servers is restarted alone.
    """

    def __init__(
        self,
        section: config.StrategySection,
        environment: Mapping[str, str],
        fixed: str,
        with_cluster: bool,
        patience: Patience = PATIENCE,
        worker_counts: Sequence[int] = (),
    ) -> None:
        """Start the processes.

        Args:
            section: the strategy.
            environment: of every process; a member adds its own.
            fixed: what cannot change in a running process, see ``client.fixed_at_start``; the client compares it.
            with_cluster: False starts one process alone, which can do everything but train.
            patience: how long to wait for the processes.
            worker_counts: allowed numbers of workers on other machines, the largest first; ``workers`` if empty.
        """
        self.fixed = fixed
        self.with_cluster = with_cluster or section.cluster is None
        self.restarts: list[str] = []
        """Why members were restarted since the run was started or resumed."""
        self._patience = patience
        self._num_requests = 0
        self._broken = False
        self._failed = False
        self.group = ProcessGroup(section, environment, with_cluster, patience, worker_counts)
        self._cluster = self.group.cluster

    @property
    def first(self) -> OneProcess:
        """The chief; or the one member that this command starts."""
        return self.group.processes[0]

    @property
    def usable(self) -> bool:
        """Whether a training can begin."""
        return not self._broken and self.group.all_alive

    def call(self, stage: str, arguments: dict[str, Any]) -> Any:
        """Run a stage and return its record as JSON values.

        Raises:
            UserError: the stage refused its input.
            StratagemError: the stage failed, or processes died more often than they may be restarted.
            Interrupted: the stage was stopped by Ctrl-C or SIGTERM.
        """
        starts_run = STAGES[stage].starts_run
        if starts_run:
            self.restarts = []
        try:
            if starts_run and self._cluster is not None:
                # First: a member that is lost meanwhile must not leave a run that nobody ends.
                self._call("check", {name: arguments[name] for name in ("settings", "prepared")})
            return self._call(stage, arguments)
        except errors.UserError:
            raise
        except BaseException:
            self._failed = True
            raise

    def _call(self, stage: str, arguments: dict[str, Any]) -> Any:
        is_shared = STAGES[stage].is_shared
        folder = config.project_root() / arguments["run"]["folder"] if is_shared and "run" in arguments else None
        # A training follows a check. An evaluation may be the first request: the logs are not open yet.
        if folder is not None and stage == "train":
            self.group.move_logs(folder)
        try:
            while True:
                try:
                    answer = self._exchange(stage, arguments)
                    if folder is not None:
                        self.group.move_logs(folder)
                    return answer
                except _Lost as lost:
                    self._restart(stage, str(lost))
        except KeyboardInterrupt as interrupt:
            said = self._interrupt()
            code = getattr(interrupt, "exit_code", 130)
            if code == Terminated.exit_code and is_shared and self.group.is_foreign:
                raise Preempted(f"{stage} was told to stop: {said or NOT_SAID}") from None
            raise Interrupted(said or f"{stage} was interrupted", code) from None
        except StratagemError:
            raise
        except BaseException:  # Such as Prefect's, when it cancels a run.
            said = self._interrupt()
            if is_shared and self.group.is_foreign:
                raise Preempted(f"{stage} was told to stop: {said or NOT_SAID}") from None
            raise

    def stand_by(self) -> None:
        """Keep the one member that runs here alive until the chief, which runs elsewhere, has ended.

        The chief listens on its address in TF_CONFIG as soon as it knows the cluster. JAX ends a process that loses its
        chief, so a worker that has done its part may die.

        Raises:
            StratagemError: the member died and may not be restarted.
        """
        cluster = json.loads(self.first.member.environment["TF_CONFIG"])["cluster"]
        host, _, port = cluster["chief" if "chief" in cluster else "worker"][0].rpartition(":")
        limit = self._cluster.heartbeat_timeout_seconds if self._cluster is not None else 0.0
        tried_at, seen_at = 0.0, math.inf
        try:
            while True:
                if time.monotonic() - tried_at > self._patience.poll_seconds:
                    tried_at = time.monotonic()
                    error = network.connection_error(host, int(port), limit)
                    # A refusal comes from the machine itself: nobody listens there. Other errors may be the network's.
                    silent = 0.0 if isinstance(error, ConnectionRefusedError) else limit
                    if error is None:
                        seen_at = tried_at
                    elif seen_at < tried_at - silent:
                        return
                process, reply = self._listen()
                if process is not None and reply is None:
                    if process.entry == "assist":
                        return
                    self._lose(process, f"died ({process.death})")
        except _Lost as lost:
            self._failed = True
            raise StratagemError(f"{lost}; its log: {self.group.logs}") from None

    def close(self) -> None:
        """End all processes and wait for them."""
        self.group.close(went_well=not self._failed and not self.restarts)

    def _exchange(self, stage: str, arguments: dict[str, Any]) -> Any:
        """Send a request to all processes that take part in it; return the chief's record when all have answered."""
        self._num_requests += 1
        asked = [self.first]
        if STAGES[stage].is_shared:
            asked = [process for process in self.group.processes if process.entry != "tf_server"]
        for one in self.group.processes:
            one.silent_seconds = 0.0
        for one in asked:
            given = arguments
            if one.entry == "assist":
                given = {name: arguments[name] for name in ("settings", "prepared")}
            one.send({"id": self._num_requests, "stage": stage, "arguments": given})
        answers: dict[OneProcess, Message] = {}
        deadline = math.inf
        while len(answers) < len(asked) and time.monotonic() < deadline:
            process, reply = self._listen(watch=STAGES[stage].is_shared)
            if process is None:
                continue
            if reply is None:
                if process is not self.first and process in answers:
                    self._broken = True  # It died after its answer.
                else:
                    self._handle_death(process, stage)
            elif reply.get("id") == self._num_requests:
                answers[process] = reply
                # An interrupted training ends on all members, on the chief after its checkpoint is written.
                if "error" in reply and deadline == math.inf and reply["type"] != Interrupted.__name__:
                    patience = self._patience.lost_peer_seconds if reply.get("lost_peer") else lifetime.GRACE_SECONDS
                    deadline = time.monotonic() + patience
        if not any("error" in reply for reply in answers.values()):
            return answers[self.first]["record"]
        silent = [one for one in asked if one not in answers]
        error = self._failure(stage, answers, silent)
        for one in silent:  # They wait for members that have failed, and would never read another request.
            one.kill()
        self._broken = self._broken or bool(silent)
        raise error

    def _listen(self, watch: bool = True) -> tuple[OneProcess | None, Message | None]:
        """Return a process and its message, None for its end; (None, None) if no message comes for a while.

        Raises:
            _Lost: a process has sent no heartbeat for too long.
        """
        process, reply = self.group.hear()
        if watch:
            for one, limit in self.group.too_silent():
                self._lose(one, f"sent no heartbeat for {limit:g} s")
        if is_heartbeat(reply) or process not in self.group.processes:
            return None, None
        return process, reply

    def _handle_death(self, process: OneProcess, stage: str) -> None:
        if self._cluster is not None and STAGES[stage].is_shared:
            self._lose(process, f"died ({process.death})")
            return
        self._broken = True
        if process is self.first:
            death = process.death
            why = ". The machine may have run out of memory" if death == signal.SIGKILL.name else ""
            raise StratagemError(f"the process that ran {stage} died ({death}){why}. The same command goes on")

    def _lose(self, process: OneProcess, what: str) -> None:
        """Restart a worker of parameter servers on its own port; the loss of any other member ends all of them."""
        reason = f"{process.member.name} {what}"
        if self._cluster is None or (process.entry, process.member.job) != ("tf_server", "worker"):
            raise _Lost(reason)
        process.kill()
        most = self._cluster.max_restarts
        if len(self.restarts) < most and process.has_place:
            self.restarts.append(reason)
            _print(f"{reason}; restarting it ({len(self.restarts)} of {most}); its log: {self.group.logs}")
            self.group.start_again(process)
            return
        self.group.leave_out(process)
        if any(one.member.job == "worker" for one in self.group.processes):
            why = f"strategy.max_restarts = {most}, so the" if process.has_place else "the"
            _print(f"{reason}; {why} training goes on without it; its log: {self.group.logs}")
            return
        raise _Lost(f"{reason}, as all workers")

    def _failure(self, stage: str, answers: dict[OneProcess, Message], silent: list[OneProcess]) -> Exception:
        """Return one error for all answers: a user's mistake comes first, then a lost member, then a failure."""
        failed = [(process, reply) for process, reply in answers.items() if "error" in reply]
        failed.sort(key=lambda pair: (pair[1]["type"] == "StratagemError", pair[0] is not self.first))
        process, reply = failed[0]
        lost = [one for one, answer in failed if answer.get("lost_peer")]
        if reply["type"] == "StratagemError" and lost and self._cluster is not None and STAGES[stage].is_shared:
            return _Lost(
                f"{silent[0].member.name} no longer answers" if silent else f"{lost[0].member.name} lost its peers"
            )
        error = errors.from_json(reply)
        if isinstance(error, Interrupted):  # The signal went to that process, not to this command.
            stopped = ", ".join(one.member.name for one, answer in failed if answer.get("told_to_stop"))
            if self._cluster is None:
                return Interrupted(str(error), Terminated.exit_code)
            if self.group.is_foreign:
                return Preempted(f"{stage} ended: {error}")
            return _Lost(f"{stopped or 'another member'} was told to stop")
        if process is not self.first and not isinstance(error, errors.UserError):
            return StratagemError(f"{process.member.name}: {error}; its log: {self.group.logs}")
        return error

    def _restart(self, stage: str, reason: str) -> None:
        """End all processes, and restart them if that is allowed."""
        self.group.kill()
        self._broken = True
        if self._cluster is None:
            return
        if self.group.is_foreign:
            raise StratagemError(
                f"{stage} ended: {reason}. Have all members started again: the same command for each goes on from the "
                f"latest checkpoint. The log: {self.group.logs}"
            )
        most = self._cluster.max_restarts
        if len(self.restarts) >= most:
            raise StratagemError(
                f"{stage} failed: {reason}, and strategy.max_restarts = {most} allows no further start. The same "
                f"command goes on from the latest checkpoint; the logs: {self.group.logs}"
            )
        self.restarts.append(reason)
        before = self.group.num_members
        try:
            self.group.place_again(self._cluster)
        except UserError as error:  # The cluster has changed since the start; the settings have not.
            raise StratagemError(
                f"{stage} failed: {reason}; {error}. The same command goes on from the latest checkpoint; the logs: "
                f"{self.group.logs}"
            ) from None
        count = self.group.num_members
        fewer = before - count
        left = f", {fewer} fewer" if fewer > 0 else ""
        _print(
            f"{reason}; all {count} processes start again{left}, restart {len(self.restarts)} of {most}; "
            f"logs: {self.group.logs}"
        )
        self.group.start()
        self._broken = False

    def _interrupt(self) -> str | None:
        """Stop the running stage, a training after a checkpoint, and return its message.

        The chief keeps serving, so that the run can be ended properly. A second signal ends everything at once.
        """

        def stop_at_once(number: int, frame: object) -> None:
            for process in self.group.processes:
                process.kill_unawaited()
            os.write(2, b"stopped at once; the next run, or `stratagem reconcile`, ends the run\n")
            os._exit(128 + number)

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]  # As under nohup.
        before = {number: signal.signal(number, stop_at_once) for number in heard}
        said = None
        try:
            self.first.interrupt()
            end = time.monotonic() + lifetime.GRACE_SECONDS
            while time.monotonic() < end:
                process, reply = self._listen(watch=False)
                if process is not self.first:
                    continue
                if reply is None:
                    process.close()  # Wait for its end: otherwise it would be sent the next request.
                    break
                if reply.get("id") == self._num_requests:
                    said = reply.get("error")
                    break
            else:
                self.first.kill()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._broken = self._broken or len(self.group.processes) > 1  # The others wait for the chief's step.
        return said


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

"""The stage process of this command (`serve`), to which a row of `stages` is a request, and the stages that take more
than a request.

The stage process imports its framework once and then serves train, evaluate and register. It starts as early as
possible, so that its imports overlap with the start of Prefect and DVC. In a cluster it is the chief.
"""

import atexit
import json
import sys
import threading
from typing import Any, Literal

from pydantic import TypeAdapter

from tasks import config
from tasks.process import remote_members, stages
from tasks.process.cluster import StageProcesses
from tasks.process.environment import stage_environment
from tasks.process.stages import Output, P, Stage
from tasks.records import EvaluationResult, Pace, PreparedDataset, Record, Run, TrainingResult, Trial
from tasks.runs import remote
from tasks.strategies import engines
from tasks.system.errors import Interrupted, StratagemError, UserError

STEPS_OF_PACE = 10
"""Steps in one call when the time of a step is measured, so that the call itself hardly counts."""


class _ThreadState(threading.local):
    """The stage process of a thread: trials of a sweep that train in parallel have one each."""

    processes: StageProcesses | None = None
    restarts: tuple[str, ...] = ()


_own = _ThreadState()
_running: set[StageProcesses] = set()
"""Of all threads."""


def fixed_at_start(settings: config.Settings) -> str:
    """Return what is fixed when a process starts: environment, devices, and whether kernels are deterministic."""
    given = settings.strategy.model_dump(), settings.train.deterministic
    return json.dumps([stage_environment(settings), *given])


def start_processes(settings: config.Settings, with_cluster: bool = True) -> StageProcesses:
    """Return the stage process for these settings, with its cluster; the running one, if it suits them.

    Args:
        settings: determine the environment.
        with_cluster: False starts one process alone, which is enough for a trained model.
    """
    running, fixed = _own.processes, fixed_at_start(settings)
    if running is not None and running.fixed == fixed:
        # After a failed training the chief can still run the stages that need no other member.
        enough = running.usable and running.with_cluster if with_cluster else running.first.alive
        if enough:
            return running
    stop_processes()
    _own.processes = StageProcesses(
        settings.strategy,
        stage_environment(settings),
        fixed,
        with_cluster,
        worker_counts=settings.worker_counts,
    )
    _running.add(_own.processes)
    return _own.processes


def stop_processes() -> None:
    """End the stage process of this thread, if there is one."""
    if _own.processes is not None:
        _running.discard(_own.processes)
        _own.processes.close()
        _own.processes = None


def give_places_up(settings: config.Settings) -> None:
    """End the stage process of this thread if it holds places on a cluster that others may wait for."""
    if settings.strategy.cluster is not None and engines.find_placing(settings.strategy.cluster) is not None:
        stop_processes()


def interrupt_other_threads() -> None:
    """Interrupt the stage processes of other threads as Ctrl-C does; those that wait for places stop waiting."""
    remote_members.stop_waiting()
    for processes in _running - {_own.processes}:
        processes.first.interrupt()


def stop_other_threads() -> None:
    """End the stage processes of other threads, which are idle."""
    for processes in _running - {_own.processes}:
        _running.discard(processes)
        processes.close()


@atexit.register
def _stop_all() -> None:
    stop_other_threads()
    stop_processes()


def peak_memory_bytes() -> int | None:
    """Return the sum of the most memory that the stage process and the other members have each had; None if unknown."""
    return (_own.processes.group.peak_memory_bytes or None) if _own.processes is not None else None


def call(stage: Stage[P, Output], settings: config.Settings, *unnamed: P.args, **given: P.kwargs) -> Output:
    """Have the stage process run a stage, and return its result.

    Args:
        stage: a row of `stages`. This module has functions for those that take more than a request.
        settings: determine the process.
        unnamed: none; the stage process knows arguments by their names.
        given: records and JSON values.

    Raises:
        UserError: the stage refused its input, or according to TF_CONFIG this process is not the chief.
        StratagemError: the stage failed.
        Interrupted: the stage was stopped by Ctrl-C or SIGTERM.
    """
    place = settings
    if stage.on_cpu:
        on_cpu = config.OneDevice(kind="one_device", device="cpu")
        train = settings.train.model_copy(update={"deterministic": False})
        place = settings.model_copy(update={"strategy": on_cpu, "train": train})
    processes = start_processes(place, with_cluster=stage.is_shared or stage.starts_run)
    if not processes.first.member.is_chief:
        name = processes.first.member.name
        stop_processes()
        raise UserError(
            f"TF_CONFIG makes this process {name}, and only the chief runs a pipeline: start the members with "
            "`stratagem run` or `stratagem train`, or unset TF_CONFIG"
        )
    answer = processes.call(stage.name, _arguments(settings, *unnamed, **given))
    return TypeAdapter(stage.output).validate_python(answer)


def _arguments(settings: config.Settings, **given: Any) -> dict[str, Any]:
    values = {name: v.model_dump(mode="json") if isinstance(v, Record) else v for name, v in given.items()}
    return {"settings": settings.to_json(), **values}


def measure_pace(settings: config.Settings, prepared: PreparedDataset, examples: int) -> Pace:
    """Return the seconds of a step of so many examples on one device of this machine, whatever the strategy."""
    train = {"per_replica_batch_size": examples, "global_batch_size": None, "steps_per_execution": STEPS_OF_PACE}
    alone = settings.model_copy(
        update={
            "strategy": config.OneDevice(kind="one_device"),
            "train": settings.train.model_copy(update=train),
        }
    )
    return stages.measure_pace(alone, prepared=prepared)


def end_trial(settings: config.Settings, run: Run, trial: Trial) -> None:
    """Record in MLflow how a trial ended, and end its run."""
    stages.end_trial(settings, run=run, trial=trial)
    remote.finish(run)


def train(settings: config.Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train; the result and MLflow say why members of the cluster were restarted meanwhile."""
    _own.restarts = ()
    try:
        with remote.copied_meanwhile(run, settings.checkpoint.remote):
            result = stages.train(settings, prepared=prepared, run=run)
    finally:
        _own.restarts = tuple(_own.processes.restarts) if _own.processes is not None else ()
        if _own.restarts:
            stages.report_restarts(settings, run=run, restarts=_own.restarts)
    return result.model_copy(update={"restarts": _own.restarts})


def restarts() -> tuple[str, ...]:
    """Return why members of the cluster were restarted in the last training of this thread, even if it failed."""
    return _own.restarts


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate, on the devices of the run's strategy or on one."""
    settings = _evaluable(settings)
    stage = stages.evaluate if settings.evaluate.has_runs_devices else stages.evaluate_on_one_device
    return stage(settings, prepared=prepared, training=training, run=run)


def write_report(settings: config.Settings, run: Run, seconds: dict[str, float] | None = None) -> None:
    """Write a run's page from its records, with the seconds of its stages so far.

    A failure is printed, not raised: the run has its result without the page.
    """
    try:
        stages.write_report(settings, run=run, seconds=seconds)
    except Interrupted:
        raise
    except StratagemError as error:
        print(f"the report could not be written: {error}; `stratagem report {run.run_id}` tries again", file=sys.stderr)


def assist(settings: config.Settings, prepared: PreparedDataset, evaluates: bool) -> None:
    """Run the part of a worker that someone else started: the requests that a chief sends to its own workers."""
    processes = start_processes(settings)
    # Building a model waits until all others build it, so each member runs all stages in the chief's order.
    for stage in ("check", "train", *(["evaluate"] if evaluates else [])):
        processes.call(stage, _arguments(settings, prepared=prepared))


def end_run(
    settings: config.Settings, run: Run, status: Literal["FINISHED", "FAILED", "KILLED"], reason: str | None = None
) -> None:
    """End the MLflow run as FINISHED, FAILED or KILLED."""
    try:
        stages.end_run(settings, run=run, status=status, reason=reason)
    finally:
        remote.finish(run)


def _evaluable(settings: config.Settings) -> config.Settings:
    """Return the settings, changed to one device where the run's cluster is not available: a run of eight machines can
    be evaluated on a laptop."""
    cluster, evaluate = settings.strategy.cluster, settings.evaluate
    if not evaluate.has_runs_devices or cluster is None:
        return settings
    running = _own.processes
    if running is not None and running.fixed == fixed_at_start(settings) and running.with_cluster and running.usable:
        return settings
    try:
        if not engines.find_launcher(cluster).STARTS_ALL:
            raise UserError("someone else starts the members of the run's cluster, and none waits for this")
        engines.members(settings.strategy)
    except UserError as error:
        print(f"evaluated on one device: {error}", file=sys.stderr)
        return settings.model_copy(update={"evaluate": evaluate.model_copy(update={"strategy": "one_device"})})
    return settings

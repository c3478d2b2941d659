"""Sends the requests of `stages` to the stage process (`serve`), and has functions for stages that need further steps.

The stage process imports its framework once and then runs one stage after another. It starts as early as
possible, so that its imports overlap with the start of Prefect and DVC. In a cluster, it is the chief.
"""

import atexit
import json
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from tasks import config
from tasks.process import stages
from tasks.process.child import to_json
from tasks.process.cluster import StageProcesses
from tasks.process.stages import Output, Stage
from tasks.records import EvaluationResult, Pace, PreparedDataset, Run, TrainingResult
from tasks.runs import remote
from tasks.strategies import engines
from tasks.strategies.environment import stage_environment
from tasks.system.errors import Interrupted, StratagemError, UserError

STEPS_OF_PACE = 10
"""Steps per call for measuring the time of a step; with many steps, the call itself hardly counts."""


_running: dict[int, tuple[str, StageProcesses]] = {}
"""The stage process of each thread, with what is fixed in it: each parallel trial of a sweep has its own."""


def fixed_at_start(settings: config.Settings) -> str:
    """Return what is fixed when a process starts: environment, devices, and whether kernels are deterministic."""
    given = settings.strategy.model_dump(), settings.train.deterministic
    return json.dumps([stage_environment(settings), *given])


def start_processes(settings: config.Settings, with_cluster: bool = True) -> StageProcesses:
    """Return the stage process for these settings, with its cluster; reuse the running one if it fits.

    Args:
        settings: determine the environment.
        with_cluster: False starts a single process, which is enough for a trained model.
    """
    cluster = settings.strategy.cluster if with_cluster else None
    if (running := _find_running(settings, cluster)) is not None:
        return running
    stop_processes()
    started = StageProcesses(cluster, stage_environment(settings), settings.worker_counts)
    _running[threading.get_ident()] = fixed_at_start(settings), started
    return started


def _find_running(settings: config.Settings, cluster: config.Cluster | None) -> StageProcesses | None:
    """Return the stage process of this thread if it fits the settings, with the cluster if they need one."""
    fixed, running = _running.get(threading.get_ident(), ("", None))
    if running is None or fixed != fixed_at_start(settings):
        return None
    # After a failed training, the chief can still run the stages that need no other member.
    enough = running.first.alive if cluster is None else running.usable and running.cluster is not None
    return running if enough else None


@atexit.register
def stop_processes() -> None:
    """End the stage process of this thread, if there is one."""
    _, running = _running.pop(threading.get_ident(), ("", None))
    if running is not None:
        running.close()


def give_places_up(settings: config.Settings) -> None:
    """End the stage process of this thread if it occupies places on a cluster that other runs may wait for."""
    if settings.strategy.cluster is not None and engines.find_placing(settings.strategy.cluster) is not None:
        stop_processes()


def interrupt_other_threads() -> None:
    """Interrupt the stage processes of other threads as Ctrl-C does, and their waits for places."""
    from tasks.strategies.engines import remote_members

    remote_members.stop_waiting()
    for thread, (_, processes) in [*_running.items()]:
        if thread != threading.get_ident():
            processes.first.send_signal(signal.SIGINT)


@atexit.register  # It runs before `stop_processes`: atexit calls the last function first.
def stop_other_threads() -> None:
    """End the stage processes of other threads, which are idle."""
    for thread in _running.keys() - {threading.get_ident()}:
        _running.pop(thread)[1].close()


def peak_memory_bytes() -> int | None:
    """Return the sum of the peak memory of the stage process and the other members; None if unknown."""
    _, running = _running.get(threading.get_ident(), ("", None))
    members = running.processes if running is not None else []
    return sum(member.peak_memory_bytes for member in members) or None


def call(stage: Stage[..., Output], settings: config.Settings, /, **given: Any) -> Output:
    """Run a stage in the stage process, and return its result.

    Args:
        stage: a row of `stages`. This module has functions for stages that need further steps.
        settings: determine the process.
        given: records and JSON values.

    Raises:
        UserError: the stage refused its input, or TF_CONFIG does not make this process the chief.
        StratagemError: the stage failed.
        Interrupted: Ctrl-C or SIGTERM stopped the stage.
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
    try:
        answer = processes.call(stage.name, {"settings": settings.to_json(), **to_json(given)})
    finally:
        if stage.ends_run:
            remote.finish(given["run"])
    return TypeAdapter(stage.output).validate_python(answer)


def measure_pace(settings: config.Settings, prepared: PreparedDataset, examples: int) -> Pace:
    """Return the duration of a step with this number of examples on one device of this machine."""
    train = {"per_replica_batch_size": examples, "global_batch_size": None, "steps_per_execution": STEPS_OF_PACE}
    alone = settings.model_copy(
        update={
            "strategy": config.OneDevice(kind="one_device"),
            "train": settings.train.model_copy(update=train),
        }
    )
    return stages.measure_pace(alone, prepared=prepared)


def train(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    tell: Callable[[str], object] = lambda reason: None,
) -> TrainingResult:
    """Train, and record in the result and in MLflow why members of the cluster were restarted.

    ``tell`` is called with each of these reasons, also if the training fails.
    """
    processes = start_processes(settings)
    try:
        with remote.copied_meanwhile(run, settings.checkpoint.remote):
            result = stages.train(settings, prepared=prepared, run=run)
    finally:
        if restarts := tuple(processes.restarts):
            stages.report_restarts(settings, run=run, restarts=restarts)
            for reason in restarts:
                tell(reason)
    return result.model_copy(update={"restarts": restarts})


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate on the devices of the run's strategy or on one device."""
    settings = _evaluable(settings)
    stage = stages.evaluate if settings.evaluates_on_all_devices else stages.evaluate_on_one_device
    return stage(settings, prepared=prepared, training=training, run=run)


def write_report(settings: config.Settings, run: Run, seconds: dict[str, float] | None = None) -> None:
    """Write a run's page from its records, with the seconds of its stages so far.

    Print a failure instead of raising it: the run has its result without the page.
    """
    try:
        stages.write_report(settings, run=run, seconds=seconds)
    except Interrupted:
        raise
    except StratagemError as error:
        print(f"the report could not be written: {error}; `stratagem report {run.run_id}` tries again", file=sys.stderr)


def _evaluable(settings: config.Settings) -> config.Settings:
    """Return the settings, with one device if the run's cluster is not available: a laptop can evaluate a run of eight
    machines."""
    cluster, evaluate = settings.strategy.cluster, settings.evaluate
    if not settings.evaluates_on_all_devices or cluster is None or _find_running(settings, cluster) is not None:
        return settings
    try:
        if engines.is_foreign(cluster):
            raise UserError(
                "someone else starts the members of the run's cluster, and they do not wait for an evaluation"
            )
        engines.members(settings.strategy)
    except UserError as error:
        print(f"evaluating on one device: {error}", file=sys.stderr)
        return settings.model_copy(update={"evaluate": evaluate.model_copy(update={"strategy": "one_device"})})
    return settings

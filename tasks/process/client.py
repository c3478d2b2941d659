"""The stages, run in the stage process of this command; the other half of the protocol is `serve`.

The stage process imports its framework once and then serves train, evaluate and register. It is started as early as
possible, so that its imports overlap with Prefect's and DVC's start. Where the strategy is a cluster, the other members
stand beside it.
"""

import atexit
import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks import config
from tasks.process import remote_members
from tasks.process.cluster import StageProcesses
from tasks.process.environment import stage_environment
from tasks.records import (
    Comparison,
    EvaluationResult,
    ExportedModel,
    Limits,
    LoggedModel,
    Pace,
    PreparedDataset,
    Record,
    RegisteredModel,
    Run,
    Sweep,
    TrainingResult,
    Trial,
)
from tasks.runs import remote
from tasks.strategies import engines
from tasks.system.errors import Interrupted, StratagemError, UserError

STEPS_OF_PACE = 10
"""In a call, when a step's time is measured: the call itself then counts for little."""


class _ThreadState(threading.local):
    """What each thread has of its own: the trials of a sweep that train side by side have a stage process each."""

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
    """Return the stage process for these settings, with its cluster; the one that runs already, if it will do.

    Args:
        settings: decide the environment.
        with_cluster: False is enough for what is done with a trained model: one process.
    """
    running, fixed = _own.processes, fixed_at_start(settings)
    if running is not None and running.fixed == fixed:
        # After a training that failed its chief can still do what needs no other member.
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
    """End the stage process of this thread, if it holds places of a cluster that others may wait for."""
    if settings.strategy.cluster is not None and engines.find_placing(settings.strategy.cluster) is not None:
        stop_processes()


def interrupt_other_threads() -> None:
    """Let the stage processes of other threads save and end what they do, as on Ctrl-C; none waits for places."""
    remote_members.stop_waiting()
    for processes in _running - {_own.processes}:
        processes.first.interrupt()


def stop_other_threads() -> None:
    """End the stage processes of other threads, which do nothing any more."""
    for processes in _running - {_own.processes}:
        _running.discard(processes)
        processes.close()


@atexit.register
def _stop_all() -> None:
    stop_other_threads()
    stop_processes()


def peak_memory_bytes() -> int | None:
    """Return what the stage process and the members beside it have had of the memory, each at its most, added up; None
    where nobody can say."""
    return (_own.processes.peak_memory_bytes or None) if _own.processes is not None else None


def start_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
) -> Run:
    """Start the MLflow run of a pipeline, unless its training would be refused."""
    ids = {"flow_run_id": flow_run_id, "parent_run_id": parent_run_id}
    return Run.model_validate(_call("start_run", settings, with_cluster=True, prepared=prepared, **ids))


def resume_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    run_id: str,
    flow_run_id: str | None = None,
    allow_changes: bool = False,
) -> Run:
    """Resume a run, unless that would be another training."""
    given = {"run_id": run_id, "flow_run_id": flow_run_id, "allow_changes": allow_changes}
    return Run.model_validate(_call("resume_run", settings, with_cluster=True, prepared=prepared, **given))


def measure_pace(settings: config.Settings, prepared: PreparedDataset, examples: int) -> Pace:
    """Return what a step of so many examples takes on one device of this machine, whatever the settings' strategy."""
    train = {"per_replica_batch_size": examples, "global_batch_size": None, "steps_per_execution": STEPS_OF_PACE}
    alone = settings.model_copy(
        update={
            "strategy": config.OneDevice(kind="one_device"),
            "train": settings.train.model_copy(update=train),
        }
    )
    return Pace.model_validate(_call("measure_pace", alone, prepared=prepared))


def start_comparison(
    settings: config.Settings, prepared: PreparedDataset, key: str, flow_run_id: str | None = None
) -> Run:
    """Start the MLflow run that is the parent of a comparison's runs."""
    return Run.model_validate(_call("start_comparison", settings, prepared=prepared, key=key, flow_run_id=flow_run_id))


def start_sweep(
    settings: config.Settings,
    prepared: PreparedDataset,
    key: str,
    name: str,
    swept: list[str],
    flow_run_id: str | None = None,
) -> Run:
    """Start the MLflow run that is the parent of a sweep's trials."""
    given: dict[str, Any] = {"key": key, "name": name, "swept": swept, "flow_run_id": flow_run_id}
    return Run.model_validate(_call("start_sweep", settings, prepared=prepared, **given))


def start_trial(settings: config.Settings, prepared: PreparedDataset, run: Run, number: int, limits: Limits) -> Run:
    """Start the MLflow run of a trial, unless its training would be refused; ``run`` is the sweep's."""
    given: dict[str, Any] = {"run": run, "number": number, "limits": limits}
    return Run.model_validate(_call("start_trial", settings, with_cluster=True, prepared=prepared, **given))


def resume_trial(
    settings: config.Settings, prepared: PreparedDataset, run: Run, limits: Limits, flow_run_id: str | None = None
) -> Run:
    """Resume a trial."""
    given: dict[str, Any] = {"run": run, "limits": limits, "flow_run_id": flow_run_id}
    return Run.model_validate(_call("resume_trial", settings, with_cluster=True, prepared=prepared, **given))


def end_trial(settings: config.Settings, run: Run, trial: Trial) -> None:
    """Tell MLflow how a trial ended, and end its run."""
    _call("end_trial", settings, run=run, trial=trial)
    remote.finish(run)


def report_sweep(settings: config.Settings, run: Run, sweep: Sweep) -> None:
    """Write a sweep's record, table and page into its folder and into MLflow."""
    _call("report_sweep", settings, run=run, sweep=sweep)


def train(settings: config.Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train; why members of the cluster were started again meanwhile is in the result, and in MLflow."""
    _own.restarts = ()
    processes = _processes_of_chief(settings, with_cluster=True)
    try:
        with remote.copied_meanwhile(run, settings.checkpoint.remote):
            answer = processes.call("train", _arguments(settings, prepared=prepared, run=run))
    except BaseException:
        if processes.restarts:
            _call("report_restarts", settings, run=run, restarts=processes.restarts)
        raise
    finally:
        _own.restarts = tuple(processes.restarts)
    if processes.restarts:
        answer = _call("report_restarts", settings, run=run, restarts=processes.restarts, training=answer)
    return TrainingResult.model_validate(answer)


def restarts() -> tuple[str, ...]:
    """Return why members of the cluster were started again in the last training of this thread, also in one that
    failed."""
    return _own.restarts


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate, on the devices of the run's strategy or on one."""
    settings = _evaluable(settings)
    everywhere = settings.evaluate.has_runs_devices
    stage = "evaluate" if everywhere else "evaluate on one device"
    return EvaluationResult.model_validate(
        _call(stage, settings, with_cluster=everywhere, prepared=prepared, training=training, run=run)
    )


def register(
    settings: config.Settings,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
    run: Run,
    force: bool = False,
) -> RegisteredModel:
    """Register the evaluated model; with ``force`` it becomes the champion, whatever the evidence."""
    given: dict[str, Any] = {"training": training, "evaluation": evaluation, "run": run, "force": force}
    return RegisteredModel.model_validate(_call("register", settings, prepared=prepared, **given))


def write_report(settings: config.Settings, run: Run, seconds: Mapping[str, float] | None = None) -> None:
    """Write a run's page from its records, with the seconds of its stages so far; a run has its result without it, so
    a failure is told, not raised."""
    try:
        _call("write_report", settings, run=run, seconds=dict(seconds) if seconds is not None else None)
    except Interrupted:
        raise
    except StratagemError as error:
        print(f"the report could not be written: {error}; `stratagem report {run.run_id}` tries again", file=sys.stderr)


def find_model(settings: config.Settings, uri: str) -> LoggedModel:
    """Return which run's model it is that MLflow has at an address such as ``models:/NAME@ALIAS``."""
    return LoggedModel.model_validate(_call_on_tensorflow("find_model", settings, uri=uri))


def export(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    format: str,
    checkpoint: str,
    folder: Path | None = None,
) -> ExportedModel:
    """Write a trained model into a folder, or one of its run's, as files of a format, and compare these with Keras."""
    given = {"run": run, "format": format, "checkpoint": checkpoint, "folder": folder and str(folder)}
    return ExportedModel.model_validate(_call_on_tensorflow("export", settings, prepared=prepared, **given))


def resume_parent(settings: config.Settings, prepared: PreparedDataset, run: Run, flow_run_id: str | None) -> Run:
    """Let a comparison or a sweep that did not come to its end be at work again."""
    return Run.model_validate(_call("resume_parent", settings, prepared=prepared, run=run, flow_run_id=flow_run_id))


def report_comparison(settings: config.Settings, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table and pages into its folder and into MLflow; return it with the intervals of what was
    measured, and with what follows from its figures."""
    return Comparison.model_validate(_call("report_comparison", settings, run=run, comparison=comparison))


def assist(settings: config.Settings, prepared: PreparedDataset, evaluates: bool) -> None:
    """Do the part of a member that is not the chief: what the chief asks of the workers on its own machine."""
    processes = start_processes(settings)
    # To build a model is to wait until all others build it: each does all stages, in the chief's order.
    for stage in ("check", "train", *(["evaluate"] if evaluates else [])):
        processes.call(stage, _arguments(settings, prepared=prepared))


def end_run(settings: config.Settings, run: Run, status: str, reason: str | None = None) -> None:
    """End the MLflow run as FINISHED, FAILED or KILLED."""
    try:
        _call("end_run", settings, run=run, status=status, reason=reason)
    finally:
        remote.finish(run)


def _call(stage: str, settings: config.Settings, with_cluster: bool = False, **arguments: Any) -> Any:
    """Run a stage in the stage process; return its record as JSON values."""
    return _processes_of_chief(settings, with_cluster).call(stage, _arguments(settings, **arguments))


def _call_on_tensorflow(stage: str, settings: config.Settings, **arguments: Any) -> Any:
    """Run a stage in a process that computes on the CPU with TensorFlow, whatever the run was trained on: a GPU rounds
    float32 to TF32, and what is compared there differs by more than a model that was written wrongly."""
    on_cpu = config.OneDevice(kind="one_device", device="cpu")
    train = settings.train.model_copy(update={"deterministic": False})
    process = start_processes(settings.model_copy(update={"strategy": on_cpu, "train": train}), with_cluster=False)
    return process.call(stage, _arguments(settings, **arguments))


def _arguments(settings: config.Settings, **arguments: Any) -> dict[str, Any]:
    values = {name: v.model_dump(mode="json") if isinstance(v, Record) else v for name, v in arguments.items()}
    return {"settings": settings.to_json(), **values}


def _processes_of_chief(settings: config.Settings, with_cluster: bool) -> StageProcesses:
    """Return the stage process.

    Raises:
        UserError: TF_CONFIG makes this process another member than the chief.
    """
    processes = start_processes(settings, with_cluster)
    if not processes.first.member.is_chief:
        name = processes.first.member.name
        stop_processes()
        raise UserError(
            f"TF_CONFIG makes this process {name}, and only the chief runs a pipeline: start the members with "
            "`stratagem run` or `stratagem train`, or unset TF_CONFIG"
        )
    return processes


def _evaluable(settings: config.Settings) -> config.Settings:
    """Return the settings as they are, or for one device where the members of the run's cluster are not to be had: a
    run of eight machines can be evaluated on a laptop."""
    cluster, evaluate = settings.strategy.cluster, settings.evaluate
    if not evaluate.has_runs_devices or cluster is None:
        return settings
    running = _own.processes
    if running is not None and running.fixed == fixed_at_start(settings) and running.with_cluster and running.usable:
        return settings
    try:
        if not engines.find(cluster).STARTS_ALL:
            raise UserError("someone else starts the members of the run's cluster, and none waits for this")
        engines.members(settings.strategy)
    except UserError as error:
        print(f"evaluated on one device: {error}", file=sys.stderr)
        return settings.model_copy(update={"evaluate": evaluate.model_copy(update={"strategy": "one_device"})})
    return settings

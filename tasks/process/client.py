"""The stages, as the rest of the program calls them: each runs in the stage process of this command (`serve`).

The stage process imports its framework once and then serves train, evaluate and register. It starts as early as
possible, so that its imports overlap with the start of Prefect and DVC. In a cluster it is the chief.
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


def start_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
) -> Run:
    """Start the MLflow run of a pipeline; refuse settings that cannot be trained."""
    ids = {"flow_run_id": flow_run_id, "parent_run_id": parent_run_id}
    return Run.model_validate(_call("start_run", settings, with_cluster=True, prepared=prepared, **ids))


def resume_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    run_id: str,
    flow_run_id: str | None = None,
    allow_changes: bool = False,
) -> Run:
    """Resume a run; refuse it if it would become another training."""
    given = {"run_id": run_id, "flow_run_id": flow_run_id, "allow_changes": allow_changes}
    return Run.model_validate(_call("resume_run", settings, with_cluster=True, prepared=prepared, **given))


def measure_pace(settings: config.Settings, prepared: PreparedDataset, examples: int) -> Pace:
    """Return the seconds of a step of so many examples on one device of this machine, whatever the strategy."""
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
    """Start the MLflow run of a trial of the sweep ``run``; refuse settings that cannot be trained."""
    given: dict[str, Any] = {"run": run, "number": number, "limits": limits}
    return Run.model_validate(_call("start_trial", settings, with_cluster=True, prepared=prepared, **given))


def resume_trial(
    settings: config.Settings, prepared: PreparedDataset, run: Run, limits: Limits, flow_run_id: str | None = None
) -> Run:
    """Resume a trial."""
    given: dict[str, Any] = {"run": run, "limits": limits, "flow_run_id": flow_run_id}
    return Run.model_validate(_call("resume_trial", settings, with_cluster=True, prepared=prepared, **given))


def end_trial(settings: config.Settings, run: Run, trial: Trial) -> None:
    """Record in MLflow how a trial ended, and end its run."""
    _call("end_trial", settings, run=run, trial=trial)
    remote.finish(run)


def report_sweep(settings: config.Settings, run: Run, sweep: Sweep) -> None:
    """Write a sweep's record, table and page into its folder and into MLflow."""
    _call("report_sweep", settings, run=run, sweep=sweep)


def train(settings: config.Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train; the result and MLflow say why members of the cluster were restarted meanwhile."""
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
    """Return why members of the cluster were restarted in the last training of this thread, even if it failed."""
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
    """Register the evaluated model; with ``force`` it becomes the champion regardless of the evidence."""
    given: dict[str, Any] = {"training": training, "evaluation": evaluation, "run": run, "force": force}
    return RegisteredModel.model_validate(_call("register", settings, prepared=prepared, **given))


def write_report(settings: config.Settings, run: Run, seconds: Mapping[str, float] | None = None) -> None:
    """Write a run's page from its records, with the seconds of its stages so far.

    A failure is printed, not raised: the run has its result without the page.
    """
    try:
        _call("write_report", settings, run=run, seconds=dict(seconds) if seconds is not None else None)
    except Interrupted:
        raise
    except StratagemError as error:
        print(f"the report could not be written: {error}; `stratagem report {run.run_id}` tries again", file=sys.stderr)


def find_model(settings: config.Settings, uri: str) -> LoggedModel:
    """Return the run and the digest of the model at an MLflow address such as ``models:/NAME@ALIAS``."""
    return LoggedModel.model_validate(_call_on_tensorflow("find_model", settings, uri=uri))


def export(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    format: str,
    checkpoint: str,
    folder: Path | None = None,
) -> ExportedModel:
    """Export a trained model into a folder, by default one of its run's, and compare the files' outputs with Keras'."""
    given = {"run": run, "format": format, "checkpoint": checkpoint, "folder": folder and str(folder)}
    return ExportedModel.model_validate(_call_on_tensorflow("export", settings, prepared=prepared, **given))


def resume_parent(settings: config.Settings, prepared: PreparedDataset, run: Run, flow_run_id: str | None) -> Run:
    """Resume an unfinished comparison or sweep."""
    return Run.model_validate(_call("resume_parent", settings, prepared=prepared, run=run, flow_run_id=flow_run_id))


def report_comparison(settings: config.Settings, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table and pages into its folder and into MLflow; return it with the intervals of its
    measurements and the conclusions from them."""
    return Comparison.model_validate(_call("report_comparison", settings, run=run, comparison=comparison))


def assist(settings: config.Settings, prepared: PreparedDataset, evaluates: bool) -> None:
    """Run the part of a worker that someone else started: the requests that a chief sends to its own workers."""
    processes = start_processes(settings)
    # Building a model waits until all others build it, so each member runs all stages in the chief's order.
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
    """Run a stage in a process that computes with TensorFlow on the CPU, whatever the run was trained on.

    A GPU rounds float32 to TF32, which would hide the error of a wrongly exported model.
    """
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
        UserError: according to TF_CONFIG this process is not the chief.
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

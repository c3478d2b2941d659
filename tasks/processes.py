"""Child processes: their start and their end, and what a run is from its beginning to its end.

The stage process imports its framework once and then serves train, evaluate and register. It is started as early as
possible, so that its imports overlap with Prefect's and DVC's start. Where the strategy is a cluster, the other members
stand beside it.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TypeVar

from tasks import config, dvc_data, errors, launchers, lineage, records, runs
from tasks.errors import StratagemError, UserError
from tasks.launchers.cluster import GRACE_SECONDS, Cluster
from tasks.process import scratch
from tasks.process.environment import stage_environment
from tasks.process.guard import held_open
from tasks.records import EvaluationResult, PreparedDataset, Record, Run, RunSummary, TrainingResult

R = TypeVar("R", bound=Record)

_stage_process: Cluster | None = None


def show_tracebacks() -> None:
    """Let the processes that are started from now on show tracebacks of their own."""
    os.environ["STRATAGEM_DEBUG"] = "1"


def kind_of_process(settings: config.Settings) -> str:
    """Return what is decided once in a process: environment, devices, and whether kernels are deterministic."""
    return json.dumps([stage_environment(settings), settings.strategy.model_dump(), settings.train.deterministic])


def check_devices(settings: config.Settings) -> None:
    """Refuse what can be known without a framework, before anything is started for a run.

    Raises:
        UserError: no TPU, not enough GPUs, a TF_CONFIG that cannot be used, its port is taken, JAX is not installed, or
            KERAS_BACKEND is another one than the strategy's.
    """
    section = settings.strategy
    present = os.environ.get("KERAS_BACKEND")
    if present and present != section.backend:
        others = [kind for kind, other in config.strategy_kinds().items() if other.backend == present]
        why = ": keras.distribution does nothing on another one" if section.backend == "jax" else ""
        raise UserError(
            f"KERAS_BACKEND = '{present}' contradicts strategy.kind = '{section.kind}', which trains on "
            f"{section.backend}{why}. Unset KERAS_BACKEND"
            + (f", or give strategy.kind={' or '.join(others)}" if others else "")
        )
    if section.backend == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError(
            f"strategy.kind = '{section.kind}' trains on JAX, which is not installed: install requirements.lock, or "
            "give strategy.kind=mirrored"
        )
    if isinstance(section, config.Tpu):
        importlib.import_module("tasks.launchers.tpu").check(section)
    launchers.members(section)


def start(settings: config.Settings, whole: bool = True) -> Cluster:
    """Return the stage process for these settings, with its cluster; the one that runs already, if it will do.

    Args:
        settings: decide the environment.
        whole: False is enough for what is done with a trained model: one process, and no cluster.
    """
    global _stage_process
    running, kind = _stage_process, kind_of_process(settings)
    if running is not None and running.kind == kind:
        # After a training that failed its chief can still do what needs no other member.
        enough = running.usable and running.whole if whole else running.first.alive
        if enough:
            return running
    stop()
    _stage_process = Cluster(settings.strategy, stage_environment(settings), kind, whole)
    return _stage_process


def stop() -> None:
    """End the stage process, if there is one."""
    global _stage_process
    if _stage_process is not None:
        _stage_process.close()
        _stage_process = None


atexit.register(stop)


def run(stage: str, returns: type[R], settings: config.Settings, **arguments: Any) -> R:
    """Run a stage in the stage process.

    Args:
        stage: ``start``, ``resume``, ``train``, ``evaluate``, ``register`` or ``finish``.
        returns: the class of the record that the stage returns.
        settings: decide the process's environment, and are the stage's first argument.
        **arguments: records and plain values.
    """
    values = {name: v.model_dump(mode="json") if isinstance(v, Record) else v for name, v in arguments.items()}
    if stage == "evaluate":
        settings = _evaluable(settings)
        stage = "evaluate" if settings.evaluate.strategy == "run" else "evaluate on one device"
    values["settings"] = settings.to_json()
    process = start(settings, whole=stage in ("start", "resume", "train", "evaluate"))
    if not process.first.member.is_chief:
        name = process.first.member.name
        stop()
        raise UserError(
            f"TF_CONFIG makes this process {name}, and only the chief leads a pipeline: start the members with "
            "`stratagem run` or `stratagem train`, or unset TF_CONFIG"
        )
    if stage != "train":
        return returns.model_validate(process.call(stage, values))
    told: dict[str, Any] = {"settings": values["settings"], "run": values["run"]}
    try:
        answer = process.call(stage, values)
    except BaseException:
        if process.restarts:
            start(settings, whole=False).call("report_restarts", told | {"restarts": process.restarts})
        raise
    if process.restarts:
        answer = process.call("report_restarts", told | {"restarts": process.restarts, "training": answer})
    return returns.model_validate(answer)


def _evaluable(settings: config.Settings) -> config.Settings:
    """Return the settings as they are, or for one device where the members of the run's cluster are not to be had: a
    run of eight machines can be evaluated on a laptop."""
    section, evaluate = settings.strategy, settings.evaluate
    if evaluate.strategy == "one_device" or not isinstance(section, config.Cluster):
        return settings
    running = _stage_process
    if running is not None and running.kind == kind_of_process(settings) and running.whole and running.usable:
        return settings
    try:
        if in_foreign_cluster(settings):
            raise UserError("someone else starts the members of the run's cluster, and none waits for this")
        launchers.members(section)
    except UserError as error:
        print(f"evaluated on one device: {error}", file=sys.stderr)
        return settings.model_copy(update={"evaluate": evaluate.model_copy(update={"strategy": "one_device"})})
    return settings


def begin(
    settings: config.Settings,
    prepared: PreparedDataset,
    held: runs.Hold,
    *,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
    flow_run_id: str | None = None,
) -> Run:
    """Begin a run, or take up one that did not come to its end.

    Args:
        settings: of the run.
        prepared: its data.
        held: this process's hold on runs with these settings and on ``resume``.
        resume: the id of the run to take up, or ``latest`` on this dataset; None is the newest one with these settings,
            data and code, if it did not come to its end.
        allow_changes: take up ``resume`` even where settings or data make it another training.
        fresh: take up none.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: the training is refused, or what ``resume`` names cannot be carried on.
    """
    runs.remove_leftovers(held.holder.key)
    unfinished = None
    if resume is None and not fresh:
        traced = lineage.trace(settings, prepared.data_version)
        unfinished = runs.find_unfinished(settings, traced)
        if unfinished is None and (why := runs.why_not_taken_up(settings, traced)):
            print(why, file=sys.stderr)
    taken = unfinished or runs.find_named(settings, resume)
    if taken is None:
        run_of = run("start", Run, settings, prepared=prepared, flow_run_id=flow_run_id)
    else:
        run_id = taken.run_id
        if unfinished is not None:
            changed = runs.changes_without_result(settings, unfinished)
            print(f"going on with run {run_id}, which did not end{changed}; --fresh begins a new one", file=sys.stderr)
        options = {"flow_run_id": flow_run_id, "allow_changes": allow_changes}
        run_of = run("resume", Run, settings, prepared=prepared, run_id=run_id, **options)
    held.note(run_id=run_of.run_id)
    return run_of


def end_failed(settings: config.Settings, run_of: Run, error: BaseException) -> None:
    """End the MLflow run as failed, or as killed when somebody stopped it.

    A failure of that is told, not raised, because ``error`` is what the user has to know.
    """
    killed = isinstance(error, errors.Interrupted) or not isinstance(error, Exception)
    status, reason = "KILLED" if killed else "FAILED", str(error) or type(error).__name__
    try:
        run("finish", Run, settings, run=run_of, status=status, reason=reason)
    except StratagemError as other:
        print(f"run {run_of.run_id} could not be ended as {status}: {other}", file=sys.stderr)


def trained_before(settings: config.Settings, run_of: Run) -> TrainingResult | None:
    """Return what the training of a run left that was taken up after its end, else None.

    Members of a cluster that someone else started wait for a training: there the chief does one, of no steps.
    """
    return None if in_foreign_cluster(settings) else runs.left_by(run_of, TrainingResult)


def evaluated_before(settings: config.Settings, run_of: Run) -> EvaluationResult | None:
    """Return what the evaluation of a run left that was taken up after it, else None.

    Members of a cluster that someone else started wait for an evaluation too.
    """
    return None if in_foreign_cluster(settings) else runs.left_by(run_of, EvaluationResult)


def train_alone(
    settings: config.Settings,
    prepared: PreparedDataset,
    *,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
) -> TrainingResult:
    """Train as a run of its own, without Prefect; see ``begin``.

    Raises:
        UserError: another process does the same, or the training is refused.
        Interrupted: the training was told to stop.
        StratagemError: it failed.
    """
    with runs.hold_run(settings, resume) as held:
        run_of = begin(settings, prepared, held, resume=resume, allow_changes=allow_changes, fresh=fresh)
        try:
            result = trained_before(settings, run_of)
            if result is None:
                result = run("train", TrainingResult, settings, prepared=prepared, run=run_of)
        except BaseException as error:
            end_failed(settings, run_of, error)
            raise
        run("finish", Run, settings, run=run_of, status="FINISHED")
    return result


def reconcile() -> list[records.Ended]:
    """End what killed processes left open in MLflow and in mlruns/, in a process that imports MLflow; remove what they
    left half-written.

    Raises:
        StratagemError: the store cannot be used, or does not answer.
    """
    removed = [path.relative_to(config.project_root()) for path in runs.remove_leftovers()]
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
        problem = Path(folder) / "error"
        environment = {**stage_environment(None), "STRATAGEM_ERROR": str(problem)}
        command = [sys.executable, "-m", "tasks", "reconcile"]
        root = config.project_root()
        with held_open() as stdin:
            done = subprocess.run(
                command, check=False, cwd=root, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True
            )
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        done.check_returncode()
    return [
        *(records.Ended(what=str(path), status="removed", reason="it was half-written") for path in removed),
        *(records.Ended.model_validate_json(line) for line in done.stdout.splitlines()),
    ]


def in_foreign_cluster(settings: config.Settings) -> bool:
    """Return whether this command is to join a cluster that someone else starts."""
    return isinstance(settings.strategy, config.Cluster) and not launchers.find(settings.strategy).WHOLE


def member_name(settings: config.Settings) -> str | None:
    """Return what this process is in a cluster that someone else started, such as ``worker 1``; None where it is the
    chief or there is no such cluster: then it runs the pipeline."""
    member = launchers.members(settings.strategy)[0]
    return None if member.is_chief else member.name


def join(settings: config.Settings, pipeline: bool = False) -> None:
    """Do the part of a member that is not the chief, until the chief has trained, or evaluated too.

    Args:
        settings: those of the chief.
        pipeline: bring the data up to date first and evaluate after the training, as the chief does in `stratagem run`;
            without it the data must be prepared.

    Raises:
        UserError: the settings, the data or TF_CONFIG are refused.
        StratagemError: the training failed, or another member was lost.
    """
    if pipeline:
        dvc_data.prepare_data(settings)
    prepared = dvc_data.load_prepared(settings.dataset.name)
    cluster = start(settings)
    name = cluster.first.member.name
    print(f"{name} joins the cluster of TF_CONFIG; its log: {cluster.logs}", file=sys.stderr)
    if isinstance(settings.strategy, config.ParameterServer):
        cluster.stand_by()
    else:
        arguments = {"settings": settings.to_json(), "prepared": prepared.model_dump(mode="json")}
        # What the chief asks of the workers on its own machine: who builds a model waits until all others build it.
        evaluates = pipeline and settings.evaluate.strategy == "run"
        for stage in ("check", "train", *(["evaluate"] if evaluates else [])):
            cluster.call(stage, arguments)
    stop()
    chief = "has ended" if isinstance(settings.strategy, config.ParameterServer) else "tells the result"
    print(f"{name} has done its part; the chief {chief}", file=sys.stderr)


def load_training(
    settings: config.Settings, run_id: str | None
) -> tuple[config.Settings, PreparedDataset, Run, TrainingResult]:
    """Return the settings, the data and the records of a run that was trained, for a stage that comes after.

    The settings are those that the run was started with, with ``evaluate`` and ``register`` as they are now.

    Args:
        settings: name the dataset when ``run_id`` is None.
        run_id: the run; None is the newest on that dataset.

    Raises:
        UserError: no such run, or it was not trained to its end.
    """
    run = runs.newest(settings.dataset.name) if run_id is None else runs.find(run_id)
    training = runs.load_training(run)
    now = settings.to_json()
    trained = config.restore({**run.settings, "evaluate": now["evaluate"], "register": now["register"]})
    return trained, dvc_data.load_prepared(trained.dataset.name), run, training


def check_writable() -> None:
    """Refuse a project folder that a run could not write to, before anything starts.

    Raises:
        UserError: names the folder.
    """
    root = config.project_root()
    for folder in (root / "data", root / "mlruns", root / ".dvc"):
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}): make the project's folder writable"
            ) from None


def find_unchanged(settings: config.Settings) -> RunSummary | None:
    """Return what ``unchanged`` does, where DVC finds the data up to date as they are; nothing is made, and neither
    Prefect nor a framework is imported for it."""
    name = settings.dataset.name
    try:
        same = unchanged(settings, dvc_data.load_prepared(name))
    except UserError:  # The data are not there, or damaged: a run makes them.
        return None
    if same is None:
        return None
    return same if dvc_data.is_up_to_date(name) else None


def unchanged(settings: config.Settings, prepared: PreparedDataset) -> RunSummary | None:
    """Return the newest finished run on this data with these settings and this code, or None."""
    same = lineage.finished_run(prepared.name, lineage.trace(settings, prepared.data_version))
    if same is not None:
        with contextlib.suppress(UserError):  # Its record is gone, and its summary is enough.
            if changed := runs.changes_without_result(settings, runs.find(same.run_id)):
                print(f"run {same.run_id} has that result already, with other settings{changed}", file=sys.stderr)
    return same


def guard(command: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code. What it started ends with it."""
    guarded = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def end_with_input() -> None:
        sys.stdin.read()
        guarded.terminate()
        try:
            guarded.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            guarded.kill()

    threading.Thread(target=end_with_input, daemon=True).start()
    code = guarded.wait()
    with contextlib.suppress(ProcessLookupError):  # What is left of its group.
        os.killpg(guarded.pid, signal.SIGKILL)
    return code

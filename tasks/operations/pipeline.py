"""The steps of a run: plan, start or resume, train, join a cluster; and commands that need MLflow."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tasks import config, records
from tasks.operations import dvc_data, preconditions
from tasks.process import client, stages
from tasks.records import PreparedDataset, Record, RegisteredModel, Run, RunSummary, TrainingResult
from tasks.runs import entries, lineage, locks, outcome, remote, resume
from tasks.strategies import engines
from tasks.system import errors, files, network, temporary
from tasks.system.errors import StratagemError, UserError

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Resumption:
    """Which run to resume, if any; by default the newest unfinished one that matches."""

    run: str | None = None
    """An id, or ``latest`` on the dataset; None is the newest run with the same settings, data and code, if it is
    unfinished."""
    allow_changes: bool = False
    """Resume ``run`` even if settings or data have changed so that it is another training."""
    fresh: bool = False
    """Start a new run."""


@dataclass(frozen=True)
class RunPlan:
    """What a run does on prepared data; `--dry-run` prints it."""

    settings: config.Settings
    prepared: PreparedDataset
    resumption: Resumption
    resumed: Run | None = None
    """The run to resume; None starts a new one."""
    note: str | None = None
    """A remark for the user about that choice."""
    unchanged: RunSummary | None = None
    """With `--if-changed`: a finished run with the same data, settings and code, so that nothing is trained."""


def plan(
    settings: config.Settings, prepared: PreparedDataset, resumption: Resumption, if_changed: bool = False
) -> RunPlan:
    """Return the plan of a run on prepared data: whether it trains, and which run it resumes.

    Raises:
        UserError: the run to resume does not exist.
    """
    if if_changed and (same := unchanged(settings, prepared)):
        return RunPlan(settings, prepared, resumption, unchanged=same)
    if resumption.run is not None:
        named = entries.resolve(resumption.run, settings.dataset.name)
        return RunPlan(settings, prepared, resumption, named)
    if resumption.fresh:
        return RunPlan(settings, prepared, resumption)
    traced = lineage.collect(settings, prepared.data_version)
    if (unfinished := entries.find_unfinished(settings, traced)) is None:
        return RunPlan(settings, prepared, resumption, note=resume.why_not_resumed(settings, traced))
    changed = resume.changes_without_result(settings, unfinished)
    note = f"resuming run {unfinished.run_id}, which is unfinished{changed}; --fresh starts a new one"
    return RunPlan(settings, prepared, resumption, unfinished, note)


def plan_ahead(
    recipe: config.Recipe, overrides: Sequence[str], resumption: Resumption, if_changed: bool = False
) -> RunPlan | None:
    """Return the plan of a run without starting anything; None if its data must be prepared first."""
    prepared = dvc_data.load_up_to_date(config.load(recipe, overrides).dataset.name)
    if prepared is None:
        return None
    return plan(config.load(recipe, overrides, prepared=prepared), prepared, resumption, if_changed)


def start_or_resume(planned: RunPlan, run_lock: locks.RunLock, flow_run_id: str | None = None) -> Run:
    """Start or resume the run of a plan.

    Args:
        planned: the plan.
        run_lock: this process's lock on runs with these settings, and on the run to resume.
        flow_run_id: the id of Prefect's flow run.

    Raises:
        UserError: the settings cannot be trained, or the run cannot be resumed.
    """
    locks.remove_leftovers(run_lock.holder.key)
    settings, prepared, resumed = planned.settings, planned.prepared, planned.resumed
    if resumed is not None:
        remote.check_still_ours(resumed, settings.checkpoint.remote)
    if planned.note is not None:
        print(planned.note, file=sys.stderr)
    if resumed is None:
        run = stages.start_run(settings, prepared=prepared, flow_run_id=flow_run_id)
    else:
        allowed = planned.resumption.allow_changes
        run = stages.resume_run(
            settings, prepared=prepared, run_id=resumed.run_id, flow_run_id=flow_run_id, allow_changes=allowed
        )
    run_lock.note(run_id=run.run_id)
    return run


@contextlib.contextmanager
def finishing(settings: config.Settings, run: Run) -> Iterator[None]:
    """End the MLflow run when the block ends."""
    try:
        yield
    except BaseException as error:
        end_failed(settings, run, error)
        raise
    stages.end_run(settings, run=run, status="FINISHED")


def end_failed(settings: config.Settings, run: Run, error: BaseException) -> None:
    """End the MLflow run as failed, or as killed after an interruption; print if that fails, because ``error`` matters
    more."""
    killed = isinstance(error, errors.Interrupted) or not isinstance(error, Exception)
    status: Literal["KILLED", "FAILED"] = "KILLED" if killed else "FAILED"
    try:
        stages.end_run(settings, run=run, status=status, reason=str(error) or type(error).__name__)
    except errors.Interrupted:
        pass  # A second signal. The stage has ended the run; if that took too long, the next run does.
    except StratagemError as other:
        print(f"run {run.run_id} could not be ended as {status}: {other}", file=sys.stderr)


def earlier_result(settings: config.Settings, run: Run, record_type: type[R]) -> R | None:
    """Return the record of a stage that a resumed run has already completed, such as its ``TrainingResult``.

    None if there is none, or if someone else started the cluster: its other members wait for a training and an
    evaluation, so the chief trains for no steps and evaluates again.
    """
    return None if engines.is_foreign(settings.strategy.cluster) else outcome.load(run, record_type)


def train_alone(settings: config.Settings, prepared: PreparedDataset, resumption: Resumption) -> TrainingResult:
    """Start or resume a run without Prefect, and train; see ``start_or_resume``.

    Raises:
        UserError: another process trains with these settings, or the settings cannot be trained.
        Interrupted: Ctrl-C or SIGTERM stopped the training.
        StratagemError: the training failed.
    """
    preconditions.check_remote(settings, resumption.run)
    with locks.lock_run(settings, resumption.run) as run_lock:
        run = start_or_resume(plan(settings, prepared, resumption), run_lock)
        with finishing(settings, run):
            result = earlier_result(settings, run, TrainingResult)
            return result if result is not None else client.train(settings, prepared, run)


def reconcile() -> list[records.Ended]:
    """End the runs of processes that died, in MLflow and in mlruns/, and remove their half-written files.

    Raises:
        StratagemError: the store cannot be used, or does not answer.
    """
    root, left = config.project_root(), [*temporary.remove_leftovers(), *locks.remove_leftovers()]
    removed = [path.relative_to(root) if path.is_relative_to(root) else path for path in left]
    ended = stages.reconcile()
    return [
        *(records.Ended(what=str(path), status="removed", reason="it was half-written") for path in removed),
        *ended,
        *remote.deliver_kept(),
    ]


def register(
    settings: config.Settings, prepared: PreparedDataset, run: Run, training: TrainingResult, force: bool = False
) -> RegisteredModel:
    """Register the model of an evaluated run, and write the run's report again.

    Raises:
        UserError: the run was not evaluated, or another process uses it.
        StratagemError: the model cannot be registered.
    """
    evaluation = outcome.load_evaluation(run)
    with locks.lock(run.key, f"run {run.run_id}"):
        registered = stages.register(
            settings, prepared=prepared, training=training, evaluation=evaluation, run=run, force=force
        )
        client.write_report(settings, run)
    return registered


def sync(to: str | None) -> records.Sync:
    """Copy the runs of this project to an MLflow store; register models that waited for it.

    Args:
        to: its address; None is MLFLOW_TRACKING_URI.

    Raises:
        UserError: the store does not exist.
        StratagemError: the store cannot be used, or stopped answering.
    """
    uri = _check_store(to)
    done = stages.sync(to=uri)
    os.environ["MLFLOW_TRACKING_URI"] = uri  # For the stage process.
    return done.model_copy(update={"runs": tuple(map(_with_version, done.runs))})


def _with_version(synced: records.Synced) -> records.Synced:
    """Register a run's model if it waited for the store; return the run's delivery with its version."""
    run = entries.look_up(synced.run_id)
    before = None if run is None or synced.outcome == "left out" else outcome.load(run, RegisteredModel)
    if run is None or before is None or not before.waits:
        return synced
    try:
        settings, prepared, training = _load_trained(run)
        registered = register(settings, prepared, run, training)
        version, reason = registered.model_version, registered.reason
    except StratagemError as error:
        version, reason = None, str(error)
    made = () if version is None else (f"{before.model_name}/{version}",)
    told = f"registered as {made[0]}" if made else f"not registered: {reason}"
    print(f"run {synced.run_id[:8]}, {synced.name}: {told}", file=sys.stderr, flush=True)
    return synced.model_copy(update={"versions": made, "reason": reason})


def _check_store(to: str | None) -> str:
    """Return the address of the other store; refuse one that cannot be used or does not answer."""
    uri = to if to is not None else os.environ.get("MLFLOW_TRACKING_URI", "")
    what = f"--to {uri}" if to is not None else f"MLFLOW_TRACKING_URI = {uri}"
    if not uri:
        raise UserError("--to is missing: use --to http://HOST:PORT, or set MLFLOW_TRACKING_URI")
    if not uri.startswith(("http://", "https://", "sqlite:///")):
        raise UserError(f"{what}: runs cannot be copied to such a store. Use http://HOST:PORT or sqlite:///FILE")
    if network.without_userinfo(uri) != uri:
        raise UserError(
            "--to: every user of this machine can read a password in a command. Leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    health = f"{uri.rstrip('/')}/health"
    if uri.startswith("http") and (reason := network.unreachable_reason(health, (5, 30))) is not None:
        raise UserError(f"{what}: no MLflow server answers ({reason}): start it, or choose another address")
    if uri.startswith("sqlite:///"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def write_report(name: str) -> Path:
    """Write the report of a run again; return its path.

    Args:
        name: see ``entries.resolve``.

    Raises:
        UserError: the run does not exist, or one of its records cannot be read.
    """
    run = entries.resolve(name)
    stages.write_page(run=run)
    return config.project_root() / run.folder / "report" / "report.html"


def join(recipe: config.Recipe, overrides: Sequence[str], as_run: bool = False) -> bool:
    """Do a worker's part of a run: train, evaluate with ``as_run``, and wait until the chief ends.

    Return False at once if this process runs the pipeline itself, as the chief or without a cluster.

    Args:
        recipe: the same as the chief's.
        overrides: the same as the chief's.
        as_run: prepare the data first, and evaluate after the training, as `stratagem run` does.

    Raises:
        UserError: the settings, the data or TF_CONFIG are wrong.
        StratagemError: the training failed, or the cluster lost a member.
    """
    asked = config.load(recipe, overrides)
    if engines.members(asked.strategy)[0].is_chief:
        return False
    if as_run:
        dvc_data.prepare_data(asked)
    settings, prepared = dvc_data.load(recipe, overrides)
    processes = client.start_processes(settings)
    name = processes.first.member.name
    print(f"{name} joins the cluster; its log: {processes.logs}", file=sys.stderr)
    cluster = settings.strategy.cluster
    if cluster is None or not cluster.chief_gives_work:
        # Building a model waits for all members, so each member runs all stages in the same order as the chief.
        evaluates = as_run and settings.evaluates_on_all_devices
        for stage in ("check", "train", *(["evaluate"] if evaluates else [])):
            processes.call(stage, {"settings": settings.to_json(), "prepared": prepared.model_dump(mode="json")})
    processes.stand_by()
    client.stop_processes()
    print(f"{name} has finished, and so has the chief", file=sys.stderr)
    return True


def load_training(
    recipe: config.Recipe, overrides: Sequence[str], run_id: str | None
) -> tuple[config.Settings, PreparedDataset, Run, TrainingResult]:
    """Return the settings, the data and the records of a trained run, for a later stage.

    The settings are those of the run, except that ``evaluate`` and ``register`` are today's.

    Args:
        recipe: today's recipe.
        overrides: today's overrides; they name the dataset if ``run_id`` is None.
        run_id: the run; None is the newest on that dataset.

    Raises:
        UserError: the run does not exist, did not finish its training, or was pruned.
    """
    asked = config.load(recipe, overrides)
    run = entries.newest(asked.dataset.name) if run_id is None else entries.resolve(run_id)
    _, prepared, training = _load_trained(run)
    now = config.load(recipe, overrides, prepared=prepared).to_json()
    trained = config.parse({**run.settings, "evaluate": now["evaluate"], "register": now["register"]})
    return trained, prepared, run, training


def _load_trained(run: Run) -> tuple[config.Settings, PreparedDataset, TrainingResult]:
    outcome.refuse_pruned(run)
    training, settings = outcome.load_training(run), config.parse(run.settings)
    return settings, dvc_data.load_prepared(settings.dataset.name), training


def find_model(name: str, checkpoint: str | None) -> tuple[config.Settings, PreparedDataset, Run, str]:
    """Return the settings, the data and the record of a trained run, and the model's checkpoint: ``latest`` or
    ``best``.

    Args:
        name: the run's id, ``latest`` for the newest on any dataset, or the address of a registered model.
        checkpoint: ``latest`` or ``best``; None is the latest, or the one of MLflow's model.

    Raises:
        UserError: the run or model does not exist, the run did not finish its training, or its models have changed.
    """
    if checkpoint not in (None, "latest", "best"):
        raise UserError(errors.one_of("--checkpoint", checkpoint, ("latest", "best")))
    if not name.startswith("models:"):
        run = entries.resolve(name)
        settings, prepared, _ = _load_trained(run)
        return settings, prepared, run, "best" if checkpoint == "best" else "latest"
    if checkpoint is not None:
        raise UserError(f"{name} is a single model: leave --checkpoint out, or name the run")
    found = stages.find_version(config.load(), address=name)
    if (logged := entries.look_up(found.run_id or "")) is None:
        raise UserError(f"{name} belongs to run {found.run_id}, which is not in mlruns/: use the project of that run")
    settings, prepared, training = _load_trained(logged)
    root = config.project_root()
    for which, file in (("latest", root / training.final_model), ("best", root / training.best_model)):
        if file.is_file() and files.digest(file) == found.tags.get("keras_file_sha256"):
            return settings, prepared, logged, which
    raise UserError(
        f"{name} is a model of run {logged.run_id} that the run's folder no longer contains: its file was damaged, or "
        "the run was resumed. Name the run instead of the model to export its current model"
    )


def unchanged(settings: config.Settings, prepared: PreparedDataset) -> RunSummary | None:
    """Return the newest finished run with these data, these settings and this code; None if there is none."""
    if re.match("models:.*@", settings.model.initial or ""):
        return None  # Because the alias may have moved.
    found = entries.find_finished(prepared.name, lineage.collect(settings, prepared.data_version))
    if found is None:
        return None
    run, same = found
    if changed := resume.changes_without_result(settings, run):
        print(f"run {same.run_id} already has the same result with other settings{changed}", file=sys.stderr)
    return same

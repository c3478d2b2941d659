"""A run from its start to its end: start or resume, train, join a cluster, register; and what a command asks of MLflow,
which a child process imports."""

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tasks import config, records, runs
from tasks.operations import dvc_data, preconditions
from tasks.process import client, stages
from tasks.process.child import run_stage
from tasks.records import PreparedDataset, Record, Run, RunSummary, TrainingResult
from tasks.runs import lineage, remote
from tasks.strategies import engines
from tasks.system import errors, files, network
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Resumption:
    """Which run to resume, if any."""

    run: str | None = None
    """An id, or ``latest`` on the dataset; None is the newest unfinished run with the same settings, data and code."""
    allow_changes: bool = False
    """Resume ``run`` even where settings or data make it another training."""
    fresh: bool = False
    """Resume none."""


def start_or_resume(
    settings: config.Settings,
    prepared: PreparedDataset,
    run_lock: runs.RunLock,
    resumption: Resumption,
    flow_run_id: str | None = None,
) -> Run:
    """Start a run, or resume an unfinished one.

    Args:
        settings: of the run.
        prepared: its data.
        run_lock: this process's lock on runs with these settings, and on the one that is named.
        resumption: which run to resume.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: the training is refused, or the named run cannot be resumed.
    """
    runs.remove_leftovers(run_lock.holder.key)
    unfinished = None
    if resumption.run is None and not resumption.fresh:
        traced = lineage.collect(settings, prepared.data_version)
        unfinished = runs.find_unfinished(settings, traced)
        if unfinished is None and (why := runs.why_not_resumed(settings, traced)):
            print(why, file=sys.stderr)
    resumed = unfinished or runs.find_named(settings, resumption.run)
    if resumed is None:
        run = stages.start_run(settings, prepared=prepared, flow_run_id=flow_run_id)
    else:
        run_id = resumed.run_id
        remote.check_still_ours(resumed, settings.checkpoint.remote)
        if unfinished is not None:
            changed = runs.changes_without_result(settings, unfinished)
            print(f"resuming run {run_id}, which is unfinished{changed}; --fresh starts a new one", file=sys.stderr)
        run = stages.resume_run(
            settings, prepared=prepared, run_id=run_id, flow_run_id=flow_run_id, allow_changes=resumption.allow_changes
        )
    run_lock.note(run_id=run.run_id)
    return run


def start_or_resume_comparison(
    settings: config.Settings, prepared: PreparedDataset, run_lock: runs.RunLock, fresh: bool, flow_run_id: str | None
) -> tuple[Run, records.ComparisonProgress]:
    """Start the run of a comparison, or resume an unfinished one of the same rows, data and code; also return what that
    one has measured.

    Args:
        settings: of the first row that can be trained.
        prepared: its data.
        run_lock: this process's lock on the comparison.
        fresh: always start a new one.
        flow_run_id: the run of Prefect's flow.
    """
    key, unfinished, why = run_lock.holder.key, None, None
    if not fresh:
        wanted = lineage.collect(settings, prepared.data_version)
        unfinished, why = runs.find_unfinished_comparison(key, prepared.name, wanted)
    if unfinished is None:
        if why is not None:
            print(why, file=sys.stderr)
        run = stages.start_comparison(settings, prepared=prepared, key=key, flow_run_id=flow_run_id)
        progress = records.ComparisonProgress(sitting=1, rows=())
    else:
        run = stages.resume_parent(settings, prepared=prepared, run=unfinished, flow_run_id=flow_run_id)
        progress = runs.load_progress(run)
        progress = progress.model_copy(update={"sitting": progress.sitting + 1})
        kept = len(progress.rows)
        print(
            f"comparison {run.run_id} is unfinished and goes on: {kept} training{'s' * (kept > 1)} that it has "
            f"measured {'are' if kept > 1 else 'is'} kept; --fresh starts a new one",
            file=sys.stderr,
        )
    run_lock.note(run_id=run.run_id)
    return run, progress


def end_failed(settings: config.Settings, run: Run, error: BaseException) -> None:
    """End the MLflow run as failed, or as killed if it was interrupted.

    A failure to do so is printed, not raised: the user needs to see ``error``.
    """
    killed = isinstance(error, errors.Interrupted) or not isinstance(error, Exception)
    status: Literal["KILLED", "FAILED"] = "KILLED" if killed else "FAILED"
    try:
        client.end_run(settings, run, status, str(error) or type(error).__name__)
    except StratagemError as other:
        print(f"run {run.run_id} could not be ended as {status}: {other}", file=sys.stderr)


def earlier_result(settings: config.Settings, run: Run, record_type: type[R]) -> R | None:
    """Return the record of a stage that a resumed run has already done, such as its ``TrainingResult``, else None.

    In a cluster that someone else started, the other members wait for a training and an evaluation: the chief trains
    for no steps and evaluates again, so this returns None.
    """
    return None if in_foreign_cluster(settings) else runs.load_result(run, record_type)


def train_alone(settings: config.Settings, prepared: PreparedDataset, resumption: Resumption) -> TrainingResult:
    """Train as a run of its own, without Prefect; see ``start_or_resume``.

    Raises:
        UserError: another process does the same, or the training is refused.
        Interrupted: the training was told to stop.
        StratagemError: it failed.
    """
    preconditions.check_remote(settings, resumption.run)
    with runs.lock_run(settings, resumption.run) as run_lock:
        run = start_or_resume(settings, prepared, run_lock, resumption)
        try:
            result = earlier_result(settings, run, TrainingResult)
            if result is None:
                result = client.train(settings, prepared, run)
        except BaseException as error:
            end_failed(settings, run, error)
            raise
        client.end_run(settings, run, "FINISHED")
    return result


def reconcile() -> list[records.Ended]:
    """End the runs of processes that died, in MLflow and in mlruns/, and remove half-written files that they left.

    Raises:
        StratagemError: the store cannot be used, or does not answer.
    """
    removed = [path.relative_to(config.project_root()) for path in runs.remove_leftovers()]
    ended = run_stage("reconcile")
    copied, kept = remote.deliver_kept()
    for line in kept:
        print(line, file=sys.stderr)
    return [
        *(records.Ended(what=str(path), status="removed", reason="it was half-written") for path in removed),
        *(records.Ended.model_validate_json(line) for line in ended.splitlines()),
        *copied,
    ]


def registered_versions() -> list[records.ModelVersion]:
    """Return all versions in MLflow's registry.

    Raises:
        StratagemError: the store cannot be used, or does not answer.
    """
    return [records.ModelVersion.model_validate_json(line) for line in run_stage("versions").splitlines()]


def sync(to: str | None, folder: Path | None) -> records.Sync:
    """Copy the runs of this project, or of another machine's mlruns/, to an MLflow store.

    Args:
        to: its address; None is MLFLOW_TRACKING_URI.
        folder: the mlruns/ of another machine.

    Raises:
        UserError: there is no such store or folder.
        StratagemError: the store cannot be used, or stopped answering.
    """
    uri = _check_store(to)
    given = [str(folder.absolute())] if folder is not None else []
    out = run_stage("sync", *given, environment={"MLFLOW_TRACKING_URI": uri})
    return records.Sync.model_validate_json(out.splitlines()[-1])


def _check_store(to: str | None) -> str:
    """Return the address of the other store, unless it is none or does not answer."""
    uri = to if to is not None else os.environ.get("MLFLOW_TRACKING_URI", "")
    what = f"--to {uri}" if to is not None else f"MLFLOW_TRACKING_URI = {uri}"
    if not uri:
        raise UserError("where to? Give --to http://HOST:PORT, or set MLFLOW_TRACKING_URI")
    if not uri.startswith(("http://", "https://", "sqlite:///")):
        raise UserError(f"{what}: is not a store that runs can be brought to. Give http://HOST:PORT or sqlite:///FILE")
    if network.without_userinfo(uri) != uri:
        raise UserError(
            "--to: a password in a command can be read by every user of this machine. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, and leave it out"
        )
    health = f"{uri.rstrip('/')}/health"
    if uri.startswith("http") and (reason := network.unreachable_reason(health, (5, 30))) is not None:
        raise UserError(f"{what}: no MLflow server answers ({reason}): start it, or give another address")
    if uri.startswith("sqlite:///"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric such as ``test/loss`` are better; False if it is not a metric.

    For a metric of the user's own the records of runs say it, because only stage processes import the user's code.
    """
    if ":" in metric:
        return runs.lower_is_better(metric)
    name = metric.rpartition("/")[2]
    if name not in ("loss", *config.names_of("modeling/metrics")) and config.top_k_of(name) is None:
        return False
    from tasks.modeling import metrics  # NumPy takes 0.2 s to import.

    return metrics.better(metric) == "lower"


def write_report(name: str | None) -> Path:
    """Write the report of a run again; return its path.

    Args:
        name: the run's id; None or ``latest`` is the newest on any dataset.

    Raises:
        UserError: no such run, or one of its records cannot be read.
    """
    run = runs.newest(None) if name in (None, "latest") else runs.find_run(str(name))
    run_stage("report", run.run_id)
    return config.project_root() / run.folder / "report" / "report.html"


def rollback(model: str) -> records.RolledBack:
    """Move the alias `champion` of a registered model back to its previous version, after loading that version.

    Raises:
        UserError: there is no such model or no previous champion, or that version cannot be loaded or no longer gives
            the outputs that it gave when it was evaluated.
        StratagemError: the store cannot be used, or does not answer.
    """
    trained_models.check_registered(model)  # Refused before a framework is imported.
    return records.RolledBack.model_validate_json(run_stage("rollback", model).splitlines()[-1])


def in_foreign_cluster(settings: config.Settings) -> bool:
    """Return whether someone else starts the cluster and this command only joins it."""
    cluster = settings.strategy.cluster
    return cluster is not None and not engines.find_launcher(cluster).STARTS_ALL


def member_name(settings: config.Settings) -> str | None:
    """Return this process's name in a cluster that someone else started, such as ``worker 1``; None if it is the chief
    or there is no such cluster, so that it runs the pipeline."""
    member = engines.members(settings.strategy)[0]
    return None if member.is_chief else member.name


def join(recipe: str | None, overrides: Sequence[str], as_run: bool = False) -> bool:
    """Run the part of a worker until the chief has trained, and with ``as_run`` evaluated.

    Return False, without doing anything, if this process runs the pipeline: see ``member_name``.

    Args:
        recipe: the same as the chief's.
        overrides: the same as the chief's.
        as_run: prepare the data first and evaluate after the training, as the chief does in `stratagem run`; without
            it the data must be prepared.

    Raises:
        UserError: the settings, the data or TF_CONFIG cannot be used.
        StratagemError: the training failed, or another member was lost.
    """
    asked = config.load(recipe, overrides)
    if member_name(asked) is None:
        return False
    if as_run:
        dvc_data.prepare_data(asked)
    settings, prepared = dvc_data.load(recipe, overrides)
    processes = client.start_processes(settings)
    name = processes.first.member.name
    print(f"{name} joins the cluster; its log: {processes.group.logs}", file=sys.stderr)
    cluster = settings.strategy.cluster
    if cluster is None or not cluster.chief_gives_work:
        client.assist(settings, prepared, evaluates=as_run and settings.evaluate.has_runs_devices)
    stays = cluster is not None and cluster.members_stay
    if stays:
        processes.stand_by()
    client.stop_processes()
    chief = "has ended" if stays else "tells the result"
    print(f"{name} has done its part; the chief {chief}", file=sys.stderr)
    return True


def load_training(
    recipe: str | None, overrides: Sequence[str], run_id: str | None
) -> tuple[config.Settings, PreparedDataset, Run, TrainingResult]:
    """Return the settings, the data and the records of a trained run, for a later stage.

    The settings are those of the run, except that ``evaluate`` and ``register`` are today's.

    Args:
        recipe: of today's settings.
        overrides: of today's settings; these name the dataset when ``run_id`` is None.
        run_id: the run; None is the newest on that dataset.

    Raises:
        UserError: no such run, or it was not trained to its end, or was pruned.
    """
    asked = config.load(recipe, overrides)
    run = runs.newest(asked.dataset.name) if run_id is None else runs.resolve(run_id)
    _, prepared, training = _load_trained(run)
    now = config.load(recipe, overrides, prepared=prepared).to_json()
    trained = config.parse({**run.settings, "evaluate": now["evaluate"], "register": now["register"]})
    return trained, prepared, run, training


def _load_trained(run: Run) -> tuple[config.Settings, PreparedDataset, TrainingResult]:
    runs.refuse_pruned(run)
    training, settings = runs.load_training(run), config.parse(run.settings)
    return settings, dvc_data.load_prepared(settings.dataset.name), training


def find_model(name: str, checkpoint: str | None) -> tuple[config.Settings, PreparedDataset, Run, str]:
    """Return the settings, the data and the record of a trained run, and which of its models is meant: ``latest`` or
    ``best``.

    Args:
        name: the run's id, ``latest`` for the newest on any dataset, or the address of a model in MLflow.
        checkpoint: ``latest`` or ``best``; None is the latest, or the one of MLflow's model.

    Raises:
        UserError: no such run or model, the run was not trained to its end, or its models have changed since.
    """
    if checkpoint not in (None, "latest", "best"):
        raise UserError(errors.one_of("--checkpoint", checkpoint, ("latest", "best")))
    if not name.startswith("models:"):
        run = runs.resolve(name)
        settings, prepared, _ = _load_trained(run)
        return settings, prepared, run, "best" if checkpoint == "best" else "latest"
    if checkpoint is not None:
        raise UserError(f"{name} is one model of its run: leave --checkpoint out, or name the run")
    found = stages.find_model(config.load(), uri=name)
    if (logged := runs.look_up(found.run_id)) is None:
        raise UserError(f"{name} is of run {found.run_id}, which is not in mlruns/ here: give the command where it is")
    settings, prepared, training = _load_trained(logged)
    root = config.project_root()
    for which, file in (("latest", root / training.final_model), ("best", root / training.best_model)):
        if file.is_file() and files.digest(file) == found.keras_file_sha256:
            return settings, prepared, logged, which
    raise UserError(
        f"{name} is a model of run {logged.run_id} that is not in the run's folder: it is damaged there, or the run "
        "was resumed since then. Give the run in place of the model, to export what it has now"
    )


def find_unchanged(recipe: str | None, overrides: Sequence[str]) -> RunSummary | None:
    """Return what ``unchanged`` returns, if DVC finds the data up to date; imports neither Prefect nor a framework."""
    prepared = dvc_data.load_up_to_date(config.load(recipe, overrides).dataset.name)
    if prepared is None:
        return None
    return unchanged(config.load(recipe, overrides, prepared=prepared), prepared)


def unchanged(settings: config.Settings, prepared: PreparedDataset) -> RunSummary | None:
    """Return the newest finished run on this data with these settings and this code, or None."""
    if re.match("models:.*@", settings.model.initial or ""):
        return None  # The alias may have moved.
    same = lineage.finished_run(prepared.name, lineage.collect(settings, prepared.data_version))
    if same is not None:
        with contextlib.suppress(UserError):  # Its record is gone, but its summary is enough.
            if changed := runs.changes_without_result(settings, runs.find_run(same.run_id)):
                print(f"run {same.run_id} has that result already, with other settings{changed}", file=sys.stderr)
    return same

"""The stages as Prefect tasks: when, again, and under which name. What they do is in tasks/.

None has a time-out: how long one may take grows with the dataset and the epochs, and what waits for another program
(a download, DVC's lock, MLflow's store) has a limit of its own. Only the download is tried again. None has a tag: for
a task with tags Prefect asks its server before it lets it begin, and a run must not need that server to go on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import TaskRun

from flows.training_log import epochs_logged
from tasks import dvc_data, pipeline, runs
from tasks.config import Settings
from tasks.errors import DownloadError
from tasks.process import client
from tasks.records import Comparison, EvaluationResult, PreparedDataset, RegisteredModel, Run, TrainingResult

R = TypeVar("R")


async def _download_broke_off(task: Task[..., object], task_run: TaskRun, state: State[object]) -> bool:
    """Only the network is worth another try: a wrong name or a damaged archive stays what it is."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, DownloadError)


@task(
    name="data",
    task_run_name="data {settings.dataset.name}",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[5, 20, 60],
    retry_condition_fn=_download_broke_off,
)
def data(settings: Settings) -> PreparedDataset:
    """Download and prepare through DVC; a no-op when nothing changed."""
    dvc_data.prepare_data(settings)
    return dvc_data.load_prepared(settings.dataset.name)


@task(
    name="start",
    task_run_name="start run on {settings.dataset.name}, {settings.strategy.kind} {settings.train.loop}",
    cache_policy=NO_CACHE,
)
def start(
    settings: Settings, prepared: PreparedDataset, flow_run_id: str | None, parent_run_id: str | None = None
) -> Run:
    """Begin the MLflow run of a comparison's row, under ``parent_run_id``."""
    return client.start_run(settings, prepared, flow_run_id, parent_run_id)


@task(
    name="begin",
    task_run_name="begin run on {settings.dataset.name}, {settings.strategy.kind} {settings.train.loop}",
    cache_policy=NO_CACHE,
)
def begin(
    settings: Settings,
    prepared: PreparedDataset,
    held: runs.Hold,
    flow_run_id: str | None,
    resume: str | None,
    allow_changes: bool,
    fresh: bool,
) -> Run:
    """Begin the MLflow run, or take up one that did not come to its end."""
    return pipeline.begin(
        settings,
        prepared,
        held,
        resume=resume,
        allow_changes=allow_changes,
        fresh=fresh,
        flow_run_id=flow_run_id,
    )


@task(name="start_comparison", task_run_name="start comparison on {settings.dataset.name}", cache_policy=NO_CACHE)
def start_comparison(settings: Settings, prepared: PreparedDataset, key: str, flow_run_id: str | None) -> Run:
    """Begin the MLflow run that is the parent of a comparison's."""
    return client.start_comparison(settings, prepared, key, flow_run_id)


@task(
    name="train",
    task_run_name="train {settings.model.name} on {settings.dataset.name}, {settings.strategy.kind} "
    "{settings.train.loop}",
    cache_policy=NO_CACHE,
)
def train(settings: Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train under the strategy."""
    with epochs_logged(run):
        return client.train(settings, prepared, run)


@task(
    name="evaluate",
    task_run_name="evaluate {settings.evaluate.checkpoint} on {settings.dataset.name}, {settings.strategy.kind} "
    "{settings.train.loop}",
    cache_policy=NO_CACHE,
)
def evaluate(settings: Settings, prepared: PreparedDataset, training: TrainingResult, run: Run) -> EvaluationResult:
    """Evaluate the checkpoint."""
    return client.evaluate(settings, prepared, training, run)


@task(
    name="register",
    task_run_name="register {settings.model.name} on {settings.dataset.name}, {settings.strategy.kind}",
    cache_policy=NO_CACHE,
)
def register(
    settings: Settings, prepared: PreparedDataset, training: TrainingResult, evaluation: EvaluationResult, run: Run
) -> RegisteredModel:
    """Register the model that was evaluated."""
    return client.register(settings, prepared, training, evaluation, run)


@task(name="report", task_run_name="report {run.name}", cache_policy=NO_CACHE)
def report_comparison(settings: Settings, run: Run, comparison: Comparison) -> None:
    """Write a comparison's table into its folder and into MLflow."""
    client.report_comparison(settings, run, comparison)


@task(name="finish", task_run_name="finish run {run.name}, {status}", cache_policy=NO_CACHE)
def finish(settings: Settings, run: Run, status: str, reason: str | None = None) -> None:
    """End the MLflow run: the one place that does."""
    client.finish_run(settings, run, status, reason)


@task(name="fail", task_run_name="end run {run.name}", cache_policy=NO_CACHE)
def fail(settings: Settings, run: Run, error: BaseException) -> None:
    """End the MLflow run as failed, or as killed when somebody stopped it."""
    pipeline.end_failed(settings, run, error)


@contextmanager
def finishing(settings: Settings, run: Run) -> Iterator[None]:
    """End the MLflow run as the block ends."""
    try:
        yield
    except BaseException as error:
        fail(settings, run, error)
        raise
    finish(settings, run, "FINISHED")

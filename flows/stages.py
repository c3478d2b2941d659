"""The stages as Prefect tasks: when, again, and under which name. What they do is in tasks/.

None has a time-out: how long one may take grows with the dataset and the epochs, and what waits for another program
(a download, DVC's lock, MLflow's store) has a limit of its own. Only the download is tried again.
"""

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import TaskRun

from tasks import processes
from tasks.config import Settings
from tasks.errors import DownloadError
from tasks.records import EvaluationResult, PreparedDataset, RegisteredModel, Run, TrainingResult


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
    processes.prepare_data(settings)
    return processes.load_prepared(settings.dataset.name)


@task(
    name="start", task_run_name="start run on {settings.dataset.name}, {settings.strategy.kind}", cache_policy=NO_CACHE
)
def start(settings: Settings, prepared: PreparedDataset, flow_run_id: str | None) -> Run:
    """Begin the MLflow run."""
    return processes.run("start", Run, settings, prepared=prepared, flow_run_id=flow_run_id)


@task(
    name="train",
    task_run_name="train {settings.model.name} on {settings.dataset.name}, {settings.strategy.kind}",
    cache_policy=NO_CACHE,
    tags=["training"],
)
def train(settings: Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train under the strategy."""
    return processes.run("train", TrainingResult, settings, prepared=prepared, run=run)


@task(
    name="evaluate",
    task_run_name="evaluate {settings.evaluate.checkpoint} on {settings.dataset.name}, {settings.strategy.kind}",
    cache_policy=NO_CACHE,
)
def evaluate(settings: Settings, prepared: PreparedDataset, training: TrainingResult, run: Run) -> EvaluationResult:
    """Evaluate the checkpoint."""
    return processes.run("evaluate", EvaluationResult, settings, prepared=prepared, training=training, run=run)


@task(
    name="register",
    task_run_name="register {settings.model.name} on {settings.dataset.name}, {settings.strategy.kind}",
    cache_policy=NO_CACHE,
)
def register(
    settings: Settings, prepared: PreparedDataset, training: TrainingResult, evaluation: EvaluationResult, run: Run
) -> RegisteredModel:
    """Register the model that was evaluated."""
    return processes.run(
        "register", RegisteredModel, settings, prepared=prepared, training=training, evaluation=evaluation, run=run
    )


@task(name="finish", task_run_name="finish run {run.name}, {status}", cache_policy=NO_CACHE)
def finish(settings: Settings, run: Run, status: str, reason: str | None = None) -> None:
    """End the MLflow run: the one place that does."""
    processes.run("finish", Run, settings, run=run, status=status, reason=reason)

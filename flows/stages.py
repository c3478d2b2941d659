"""The stages as Prefect tasks, with their names and retries; tasks/ implements the stages.

No task has a timeout: its duration grows with the dataset and the epochs, and each wait for another program (a
download, DVC's lock, MLflow's store) has its own limit. Only the download is retried. No task has a tag: Prefect asks
its server before it starts a task with tags, and a run must be able to continue without that server.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import TaskRun
from prefect.logging import get_run_logger

from flows.operate import notifications
from tasks import config
from tasks.config import Settings
from tasks.operations import dvc_data
from tasks.process import client, stages
from tasks.records import EvaluationResult, PreparedDataset, RegisteredModel, Run, TrainingResult
from tasks.runs.listing import describe
from tasks.system.errors import DownloadError

DATASET = "on {settings.dataset.name}"
STRATEGY = DATASET + ", {settings.strategy.kind}"
LOOP = STRATEGY + " {settings.train.loop}"
LOOK_SECONDS = 1.0


async def _download_broke_off(task: Task[..., object], task_run: TaskRun, state: State[object]) -> bool:
    """Return whether the download broke off; after a wrong name or a damaged archive, a retry would fail again."""
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


@task(name="train", task_run_name="train {settings.model.name} " + LOOP, cache_policy=NO_CACHE)
def train(settings: Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train under the strategy."""
    with epochs_logged(run):
        what = f"{run.name}: its workers restarted"
        return client.train(settings, prepared, run, lambda reason: notifications.tell("restart", what, reason))


@task(name="evaluate", task_run_name="evaluate {settings.evaluate.checkpoint} " + LOOP, cache_policy=NO_CACHE)
def evaluate(settings: Settings, prepared: PreparedDataset, training: TrainingResult, run: Run) -> EvaluationResult:
    """Evaluate a checkpoint on the test split."""
    return client.evaluate(settings, prepared, training, run)


@task(name="register", task_run_name="register {settings.model.name} " + STRATEGY, cache_policy=NO_CACHE)
def register(
    settings: Settings, prepared: PreparedDataset, training: TrainingResult, evaluation: EvaluationResult, run: Run
) -> RegisteredModel:
    """Apply the gate, and register the model."""
    return stages.register(settings, prepared=prepared, training=training, evaluation=evaluation, run=run)


@contextlib.contextmanager
def epochs_logged(run: Run, look_seconds: float = LOOK_SECONDS) -> Iterator[None]:
    """Within the block, write a line for each epoch of a run's training to Prefect's log of this task.

    The lines come from the metrics file of the stage process, so the log is the same wherever the stage runs.
    """
    path = config.project_root() / run.folder / "metrics.jsonl"
    logger = get_run_logger()
    ended = threading.Event()
    begin = len(_lines(path))  # Earlier epochs are in the log of an earlier flow run.

    def follow() -> None:
        seen, has_ended = begin, False
        while not has_ended:
            has_ended = ended.wait(look_seconds)
            for line in _lines(path)[seen:]:
                seen += 1
                if epoch := describe(line):
                    logger.info(epoch)

    thread = threading.Thread(target=follow, name="training-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file; none if it does not exist."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

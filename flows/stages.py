"""The stages as Prefect tasks: when, again, and under which name. What they do is in tasks/.

None has a time-out: how long one may take grows with the dataset and the epochs, and what waits for another program
(a download, DVC's lock, MLflow's store) has a limit of its own. Only the download is tried again. None has a tag: for
a task with tags Prefect asks its server before it lets it begin, and a run must not need that server to go on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas import TaskRun

from flows.operate import notifications
from flows.training_log import epochs_logged
from tasks.config import Settings
from tasks.operations import dvc_data, pipeline
from tasks.process import client, stages
from tasks.process.stages import Stage
from tasks.records import PreparedDataset, Run, TrainingResult
from tasks.system.errors import DownloadError

P = ParamSpec("P")
R = TypeVar("R")

DATASET = "on {settings.dataset.name}"
STRATEGY = DATASET + ", {settings.strategy.kind}"
LOOP = STRATEGY + " {settings.train.loop}"


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


@task(name="train", task_run_name="train {settings.model.name} " + LOOP, cache_policy=NO_CACHE)
def train(settings: Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train under the strategy."""
    with epochs_logged(run, settings.train.epochs):
        try:
            return client.train(settings, prepared, run)
        finally:  # Also of one that fails in the end.
            notifications.tell_restarts(run, client.restarts())


def _as_task(function: Callable[P, R], name: str, run_name: str) -> Task[P, R]:
    return Task(function, name=name, task_run_name=run_name, cache_policy=NO_CACHE)


def _of_stage(stage: Stage[P, R], name: str, run_name: str) -> Task[Concatenate[Settings, P], R]:
    """Return a task that has the stage process run a stage; a name finds the arguments of the stage in ``given``."""

    def call(settings: Settings, *unnamed: P.args, **given: P.kwargs) -> R:
        return stage(settings, *unnamed, **given)

    return _as_task(call, name, run_name)


start_or_resume = _as_task(pipeline.start_or_resume, "start_or_resume", "start or resume run " + LOOP)
start_run = _of_stage(stages.start_run, "start_run", "start run " + LOOP)
start_or_resume_comparison = _as_task(
    pipeline.start_or_resume_comparison, "start_comparison", "start or resume comparison " + DATASET
)
evaluate = _as_task(client.evaluate, "evaluate", "evaluate {settings.evaluate.checkpoint} " + LOOP)
register = _of_stage(stages.register, "register", "register {settings.model.name} " + STRATEGY)
start_sweep = _of_stage(stages.start_sweep, "start_sweep", "start sweep {given[name]} " + DATASET)
resume_sweep = _of_stage(stages.resume_parent, "resume_sweep", "resume sweep {given[run].name}")
report_comparison = _of_stage(stages.report_comparison, "report", "report {given[run].name}")
report_sweep = _of_stage(stages.report_sweep, "report", "report {given[run].name}")
end_run = _as_task(client.end_run, "end_run", "end run {run.name}, {status}")
end_failed = _as_task(pipeline.end_failed, "end_failed", "end failed run {run.name}")


@contextmanager
def finishing(settings: Settings, run: Run) -> Iterator[None]:
    """End the MLflow run as the block ends: the one place that does."""
    try:
        yield
    except BaseException as error:
        end_failed(settings, run, error)
        raise
    end_run(settings, run, "FINISHED")

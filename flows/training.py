"""The training flow: data -> train -> evaluate -> register."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import WithJsonSchema

from flows import reporting, stages
from flows.operate import deployed, notifications, reconciliation
from tasks import config, records, runs
from tasks.operations import data_folders, dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.process.environment import keep_private
from tasks.records import EvaluationResult, PreparedDataset, RegisteredModel, Run, RunSummary, TrainingResult
from tasks.system.clock import now, span
from tasks.system.errors import UserError

NO_OVERRIDES = config.Overrides({})
# What a summary has of the training's record.
TRAINING_FIELDS = {"strategy", "loop", "num_replicas", "epochs", "steps", "examples_per_second", "weights_digest"}
Recipe = Annotated[str | None, WithJsonSchema(config.recipe_schema())]


def _given(overrides: Any) -> dict[str, Any]:
    return config.Overrides.model_validate(overrides).given()


def _flow_run_name() -> str:
    try:
        settings = config.load(flow_run.parameters["recipe"], _given(flow_run.parameters["overrides"]))
    except UserError:
        return "refused"  # By the flow itself, which then fails with the message. An error here would be a crash.
    return f"{settings.dataset.name}-{settings.strategy.kind}-{settings.train.loop}"


@flow(name="training", flow_run_name=_flow_run_name)
def training(
    recipe: Recipe = None,
    overrides: config.Overrides = NO_OVERRIDES,
    if_changed: bool = False,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
) -> RunSummary:
    """Train, evaluate and register one model. An unfinished run of the same is resumed.

    Args:
        recipe: a name in recipes/, laid over params.yaml.
        overrides: single settings, laid over both: {"train.epochs": 3} or {"train": {"epochs": 3}}.
        if_changed: train nothing when the last finished run had the same data, settings and code; return that run.
        resume: the id of the run to resume, or "latest".
        allow_changes: resume it even where settings or data make it another training.
        fresh: start a new run in any case.
    """
    keep_private()
    deployed.check_recipe(recipe)
    given = _given(overrides)
    deployed.check_named(config.load(recipe, given), recipe)
    reconciliation.end_crashed_flow_runs()
    resumption = pipeline.Resumption(resume, allow_changes, fresh)
    return reporting.reported(lambda: run_pipeline(recipe, given, if_changed, resumption))


def run_pipeline(
    recipe: str | None, overrides: Mapping[str, Any], if_changed: bool, resumption: pipeline.Resumption
) -> RunSummary:
    """Do what the flow does, inside it or another one."""
    asked = config.load(recipe, overrides)
    preconditions.check_remote(asked, resumption.run)
    with ExitStack() as locks:
        clock = Clock()
        with runs.lock(runs.key_of_asked(asked), runs.describe(asked), flow_run.id):
            if not if_changed:
                client.start_processes(asked)  # Imports its framework while DVC looks at the data.
            with clock.measure("data"):
                prepared = stages.data(asked)
            settings = dvc_data.choose_settings(recipe, overrides, prepared)
            run_lock = locks.enter_context(runs.lock_run(settings, resumption.run, flow_run.id))
        if notifications.addresses() and (quality := data_folders.quality(prepared.name)):
            notifications.tell_drift(prepared, quality)
        if if_changed and (same := pipeline.unchanged(settings, prepared)):
            return same
        run = stages.start_or_resume(settings, prepared, run_lock, resumption, flow_run.id)
        with stages.finishing(settings, run):
            with clock.measure("train"):
                trained = pipeline.earlier_result(settings, run, TrainingResult)
                trained = trained or stages.train(settings, prepared, run)
            with clock.measure("evaluate"):
                evaluated = pipeline.earlier_result(settings, run, EvaluationResult)
                evaluated = evaluated or stages.evaluate(settings, prepared, trained, run)
            with clock.measure("register"):
                registered = runs.load_result(run, RegisteredModel)
                registered = registered or stages.register(
                    settings, prepared=prepared, training=trained, evaluation=evaluated, run=run
                )
            with clock.measure("report"):
                client.write_report(settings, run, clock.read())
            summary = summarise(prepared, run, trained, evaluated, registered, clock)
            records.save(summary, config.project_root() / run.folder / "summary.json")
        notifications.tell_result(summary, run.name)
        reporting.publish_report(config.project_root() / run.folder, run.run_id)
        reporting.publish(result_page(summary, run, trained), key="result", description=f"{run.name}: the result")
    return summary


class Clock:
    """Seconds by stage, and in all."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        with span("flow", stage):
            yield
        self._seconds[stage] = round(time.perf_counter() - began, 3)

    def read(self) -> dict[str, float]:
        return {**self._seconds, "total": round(time.perf_counter() - self._began, 3)}


def summarise(
    prepared: PreparedDataset,
    run: Run,
    trained: TrainingResult,
    evaluated: EvaluationResult,
    registered: RegisteredModel,
    clock: Clock,
) -> RunSummary:
    """Return the whole run as one record."""
    return RunSummary(
        run_id=run.run_id,
        flow_run_id=run.flow_run_id,
        **run.lineage.model_dump(),
        dataset=prepared.name,
        **trained.model_dump(include=TRAINING_FIELDS),
        metrics=evaluated.metrics,
        checkpoint=evaluated.checkpoint,
        **registered.model_dump(include={"model_uri", "aliases", "reason", "notes", "judgement"}),
        model_version=registered.model_version and f"{registered.model_name}/{registered.model_version}",
        seconds=clock.read(),
        finished_at=now(),
    )


def result_page(summary: RunSummary, run: Run, trained: TrainingResult) -> str:
    """Return the result as Markdown, for Prefect's page of the flow run."""
    rows = {
        "Dataset": f"{summary.dataset}, data version `{summary.data_version}`",
        "Strategy": f"{summary.strategy}, loop {summary.loop}, {summary.num_replicas} replica(s)",
        "Training": f"{summary.epochs} epochs, {summary.steps} steps",
        **{f"Restart {number}": reason for number, reason in enumerate(trained.restarts, start=1)},
        **{name: f"{value:.4f}" for name, value in summary.metrics.items()},
        "Checkpoint": f"`{summary.checkpoint}`",
        "Model": f"`{summary.model_version or summary.model_uri}` {' '.join(f'@{alias}' for alias in summary.aliases)}",
        **({"Champion": summary.judgement.told} if summary.judgement else {}),
        "MLflow run": f"`{summary.run_id}` in experiment `{run.experiment}`",
        "Git commit": f"`{summary.git_commit}`{' with changes' if summary.git_dirty else ''}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    pictures = f"The report, and its pictures: `{Path(run.folder) / 'report' / 'report.html'}`"
    return f"# {run.name}\n\n| | |\n|---|---|\n{table}\n\n{pictures}\n"

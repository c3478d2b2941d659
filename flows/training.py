"""The training flow: data -> train -> evaluate -> register."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
from prefect import flow
from prefect.runtime import flow_run
from pydantic import WithJsonSchema

from flows import reporting, stages
from flows.operate import deployed, notifications
from tasks import config, records
from tasks.data import prepared_data
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.records import EvaluationResult, PreparedDataset, RegisteredModel, Run, RunSummary, TrainingResult
from tasks.reports.blocks import ReportSection, as_markdown, facts
from tasks.reports.tables import summary_rows
from tasks.runs import outcome
from tasks.runs.locks import describe, key_of_asked, lock, lock_run
from tasks.system import files
from tasks.system.errors import UserError

NO_OVERRIDES = config.Overrides({})
# The fields that a summary copies from the training's record.
TRAINING_FIELDS = {"strategy", "loop", "num_replicas", "epochs", "steps", "examples_per_second", "weights_digest"}
Recipe = Annotated[str | list[str] | None, WithJsonSchema(config.recipe_schema())]


def _given(overrides: Any) -> dict[str, Any]:
    return config.Overrides.model_validate(overrides).given()


def _flow_run_name() -> str:
    try:
        settings = config.load(flow_run.parameters["recipe"], _given(flow_run.parameters["overrides"]))
    except UserError:
        return "refused"  # The flow itself fails with the message; an error here would be a crash.
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
    """Train, evaluate and register one model. An unfinished run with the same settings, data and code continues.

    Args:
        recipe: a name in recipes/, which overrides params.yaml; or several, each overriding those before it.
        overrides: single settings, which override both: {"train.epochs": 3} or {"train": {"epochs": 3}}.
        if_changed: train nothing if a finished run has the same data, settings and code; return the newest such run.
        resume: the id of the run to resume, or "latest".
        allow_changes: resume the run even if settings or data differ.
        fresh: start a new run even if the same one is unfinished.
    """

    def run() -> RunSummary:
        deployed.check_recipe(recipe)
        given = _given(overrides)
        deployed.check_named(config.load(recipe, given), lambda: config.load(recipe))
        start_up = time.time() - psutil.Process().create_time()
        resumption = pipeline.Resumption(resume, allow_changes, fresh)
        return run_pipeline(recipe, given, if_changed, resumption, start_up)

    return reporting.reported(run)


def run_pipeline(
    recipe: config.Recipe,
    overrides: Mapping[str, Any],
    if_changed: bool,
    resumption: pipeline.Resumption,
    start_up: float = 0.0,
) -> RunSummary:
    """Run the stages, inside this flow or another one; ``start_up`` is the age of this process in seconds."""
    asked = config.load(recipe, overrides)
    preconditions.check_remote(asked, resumption.run)
    with ExitStack() as locks:
        clock = Clock(start_up)
        with lock(key_of_asked(asked), describe(asked), flow_run.id):
            if not if_changed:
                client.start_processes(asked)  # Imports its framework while DVC works.
            with clock.measure("data"):
                prepared = stages.data(asked)
            settings = dvc_data.choose_settings(recipe, overrides, prepared)
            run_lock = locks.enter_context(lock_run(settings, resumption.run, flow_run.id))
        if notifications.addresses() and (quality := prepared_data.load_quality(prepared)):
            notifications.tell_drift(prepared, quality)
        planned = pipeline.plan(settings, prepared, resumption, if_changed)
        if planned.unchanged is not None:
            return planned.unchanged
        run = pipeline.start_or_resume(planned, run_lock, flow_run.id)
        locks.enter_context(clock.kept(config.project_root() / run.folder / "records" / "seconds.json"))
        with pipeline.finishing(settings, run):
            with clock.measure("train"):
                trained = pipeline.earlier_result(settings, run, TrainingResult)
                trained = trained or stages.train(settings, prepared, run)
            with clock.measure("evaluate"):
                evaluated = pipeline.earlier_result(settings, run, EvaluationResult)
                evaluated = evaluated or stages.evaluate(settings, prepared, trained, run)
            with clock.measure("register"):
                registered = outcome.load(run, RegisteredModel)
                registered = registered or stages.register(
                    settings, prepared=prepared, training=trained, evaluation=evaluated, run=run
                )
            with clock.measure("report"):
                client.write_report(settings, run, clock.read())
            summary = summarise(prepared, run, trained, evaluated, registered, clock)
            outcome.save(run, summary)
        notifications.tell_result(summary, run.name)
        rows = summary_rows(summary, trained.restarts) | {
            "git commit": summary.commit,
            "experiment": run.experiment,
            "report": reporting.report_link(run) or f"{run.folder}/report/report.html",
        }
        page = as_markdown(run.name, [ReportSection("Result", [facts(rows)])])
        reporting.publish(page, key="result", description=f"{run.name}: the result")
    return summary


class Clock:
    """Measures the seconds of the start-up, of each stage, of the rest (such as starting processes), and in total.

    A resumed run also counts its earlier parts, unless they were killed before they wrote their seconds.
    """

    def __init__(self, start_up: float = 0.0) -> None:
        self._began = time.perf_counter() - start_up
        self._seconds = defaultdict(float, {"start-up": start_up})

    @contextmanager
    def kept(self, path: Path) -> Iterator[None]:
        """Start with the seconds of a run's earlier parts, and write all seconds when the block ends."""
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            self._began -= earlier.pop("total")
            del earlier["others"]
            for stage, seconds in earlier.items():
                self._seconds[stage] += seconds
        try:
            yield
        finally:
            with files.replacing(path) as temporary:
                temporary.write_text(json.dumps(self.read()), encoding="utf-8")

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - began

    def read(self) -> dict[str, float]:
        total = time.perf_counter() - self._began
        parts = {**self._seconds, "others": total - sum(self._seconds.values()), "total": total}
        return {name: round(seconds, 3) for name, seconds in parts.items()}


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
        finished_at=records.now(),
    )

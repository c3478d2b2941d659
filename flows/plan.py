"""The plans of `run`, `compare`, `sweep` and `data add`, which `--dry-run` prints.

This module imports neither Prefect nor a framework, so errors in a command's arguments appear at once. Planning writes
only caches (mlruns/code.json, .dvc/).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flows.pairs import ComparisonPlan
from tasks import config
from tasks.data import dataset_folder
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.records import (
    EvaluationResult,
    GivenSetting,
    Plan,
    PlannedStage,
    PreparedDataset,
    Record,
    RegisteredModel,
    TrainingResult,
)
from tasks.runs import entries, resume
from tasks.system.errors import printable

if TYPE_CHECKING:
    from tasks.sweeps import Space


def of_run(
    recipe: config.Recipe, overrides: Sequence[str], resumption: pipeline.Resumption, if_changed: bool = False
) -> Plan:
    """Return what `stratagem run` does.

    Raises:
        UserError: the settings are wrong, or this machine cannot train with them.
    """
    settings = config.load(recipe, overrides)
    preconditions.check_settings(settings)
    planned = pipeline.plan_ahead(recipe, overrides, resumption, if_changed)
    prepared = planned.prepared if planned is not None else None
    stages = (*_data_stages(settings.dataset.name, prepared), *_run_stages(settings, planned))
    return Plan(stages=stages, settings=_settings_of_run(recipe, overrides, prepared))


def _settings_of_run(
    recipe: config.Recipe, overrides: Sequence[str] | Mapping[str, Any], prepared: PreparedDataset | None
) -> tuple[GivenSetting, ...]:
    found = config.sources_of(recipe, overrides, prepared)
    return tuple(GivenSetting(key=key, value=value, source=source) for key, (value, source) in found.items())


def _data_stages(name: str, prepared: PreparedDataset | None) -> Iterator[PlannedStage]:
    root = config.project_root()
    if (root / "data" / name).is_dir() and dataset_folder.sources_of(name, root):
        yield PlannedStage(stage="download", does="is skipped", why="its source is a file or folder of yours")
    elif (root / "data" / name / "raw" / "manifest.json").exists():
        yield PlannedStage(stage="download", does="is cached", why=f"data/{name}/raw exists and was verified")
    else:
        yield PlannedStage(stage="download", does="would run", why=f"data/{name}/raw does not exist")
    yield _preparation(name, prepared)


def _preparation(name: str, prepared: PreparedDataset | None) -> PlannedStage:
    if prepared is not None:
        return PlannedStage(stage="prepare", does="is cached", why="DVC finds it up to date")
    place = f"data/{name}/prepared"
    there = (config.project_root() / place / "manifest.json").exists()
    why = f"{place} exists, but its sources have changed since" if there else f"{place} does not exist"
    return PlannedStage(stage="prepare", does="would run", why=why)


def _run_stages(settings: config.Settings, planned: pipeline.RunPlan | None) -> Iterator[PlannedStage]:
    unchanged = planned.unchanged if planned is not None else None
    resumed = planned.resumed if planned is not None else None
    enabled = settings.register_.enabled
    steps: tuple[tuple[str, type[Record], str], ...] = (
        ("train", TrainingResult, _why_train(planned)),
        ("evaluate", EvaluationResult, "each training is evaluated"),
        ("register", RegisteredModel, f"register.enabled = {str(enabled).lower()}"),
    )
    for name, record, why in steps:
        if unchanged is not None:
            why = f"run {unchanged.run_id} has the same data, settings and code"
            yield PlannedStage(stage=name, does="is skipped", why=why)
        elif resumed is not None and pipeline.earlier_result(settings, resumed, record) is not None:
            yield PlannedStage(stage=name, does="is done", why=f"run {resumed.run_id} has completed it")
        elif name == "train" and resumed is not None:
            yield PlannedStage(stage=name, does="would resume", why=why)
        else:
            left_out = name == "register" and not enabled
            yield PlannedStage(stage=name, does="is skipped" if left_out else "would run", why=why)


def _why_train(planned: pipeline.RunPlan | None) -> str:
    if planned is None:
        return "its data must be prepared first"
    if planned.note is not None:
        return planned.note
    if planned.resumption.run is not None:
        return f"--resume {planned.resumption.run}"
    if planned.resumption.fresh:
        return "--fresh"
    if same := pipeline.unchanged(planned.settings, planned.prepared):
        return f"run {same.run_id} already has this result: `stratagem run --if-changed` would not train"
    return "no finished run has these settings, this data version and this code"


def of_comparison(planned: ComparisonPlan, prepared: PreparedDataset | None, fresh: bool) -> Plan:
    """Return what `stratagem compare` does; ``prepared`` is None if the data must be prepared first."""
    planned = planned.on(prepared, fresh) if prepared is not None else planned
    kept = set()
    if planned.unfinished is not None:
        kept = {(row.strategy, row.loop) for row in resume.measured_rows(planned.unfinished)}
    stages = list(_data_stages(planned.shared.dataset.name, prepared))
    for pair in planned.pairs:
        name = ", ".join(part for part in (pair.strategy, pair.loop) if part)
        if pair.reason is not None:
            stages.append(PlannedStage(stage=name, does="is skipped", why=pair.reason))
        elif (pair.strategy, pair.loop) in kept:
            why = "the unfinished comparison has measured it; --fresh starts a new one"
            stages.append(PlannedStage(stage=name, does="would resume", why=why))
        else:
            unmeasured = "--fresh" if fresh else planned.note or "no unfinished comparison has measured it"
            why = "its data must be prepared first" if prepared is None else unmeasured
            stages.append(PlannedStage(stage=name, does="would run", why=why))
    *_, recipe, given = planned.asked
    common = {key: value for key, value in given.items() if not key.startswith("strategy.")}
    # The settings that all rows share.
    settings = [
        one
        for one in _settings_of_run(recipe, common, prepared)
        if not one.key.startswith("strategy.") and one.key != "train.loop"
    ]
    return Plan(stages=tuple(stages), settings=tuple(settings))


def of_sweep(space: "Space", parallel: int, trials: int, prepared: PreparedDataset | None, fresh: bool) -> Plan:
    """Return what `stratagem sweep` does; ``prepared`` is None if the data must be prepared first.

    Raises:
        UserError: an unfinished sweep of this name has another plan.
    """
    from tasks import sweeps  # Optuna imports NumPy, which takes 0.3 s; other commands do without it.

    settings, before = space.example, None
    if prepared is None:
        why = "its data must be prepared first"
    elif fresh:
        why = "--fresh"
    else:
        why = "no sweep of this space is unfinished"
        before = sweeps.find_sweep(sweeps.plan_of(space, parallel), settings, prepared)
    if before is not None:
        done = len(entries.children(before.run_id))
        why = f"sweep {before.run_id} has started {done} of {trials} trials; --fresh starts a new one"
    stages = (
        *_data_stages(settings.dataset.name, prepared),
        PlannedStage(stage="trials", does="would run" if before is None else "would resume", why=why),
        PlannedStage(stage="final", does="would run", why="the best trial again, on all examples, then the gate"),
    )
    given, swept = [], f"{space.path.name}: each trial takes one of these"
    for one in _settings_of_run(space.file.recipe, space.given(next(space.corners())), prepared):
        value, source = one.value, one.source
        if source == "--set" and one.key not in space.overrides:
            source = space.path.name
        if one.key in space.parameters:
            value = str(space.file.model_dump()["space"][one.key])
            source = swept
        given.append(GivenSetting(key=one.key, value=value, source=source))
    return Plan(stages=stages, settings=tuple(given))


def of_addition(source: str, name: str | None, values: Mapping[str, Any]) -> Plan:
    """Return what `stratagem data add` does; reads a table to guess the kinds of its columns.

    Raises:
        UserError: as ``dvc_data.add``.
    """
    described, guessed = dvc_data.describe(source, name, values)
    for line in guessed:
        print(printable(line, keep="\n"), file=sys.stderr)
    if isinstance(described, config.Settings):
        given = described.dataset.model_dump(mode="json")
        texts = [f"dataset.{key}={value}" for key, value in given.items() if value is not None]
        prepared = dvc_data.load_up_to_date(described.dataset.name)
        stages = tuple(_data_stages(described.dataset.name, prepared))
        return Plan(stages=stages, settings=_settings_of_run(None, texts, prepared))
    there = dataset_folder.is_there(described, config.project_root())
    folder = PlannedStage(
        stage="folder",
        does="is done" if there else "would run",
        why=f"data/{described.name} "
        + ("is this dataset" if there else "with params.yaml and dvc.yaml does not exist"),
    )
    preparation = _preparation(described.name, dvc_data.load_up_to_date(described.name) if there else None)
    return Plan(stages=(folder, preparation), settings=tuple(_sources_of_description(described, values)))


def _sources_of_description(described: config.LocalDescription, values: Mapping[str, Any]) -> Iterator[GivenSetting]:
    for key, value in described.model_dump(mode="json").items():
        if key in values:
            source = "--target" if key == "target" and not isinstance(values[key], dict) else "--set"
        elif key in ("kind", "name", "source"):
            source = "SOURCE"
        else:
            usual = type(described).model_fields[key].get_default(call_default_factory=True)
            source = "default rule" if getattr(described, key) == usual else "SOURCE"
        yield GivenSetting(key=f"dataset.{key}", value=value, source=source)

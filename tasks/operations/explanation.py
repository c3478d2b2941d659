"""What `run`, `compare`, `sweep` or `data add` would do: its steps, which of them are done already, and where each
setting comes from. Nothing is started, and only what makes the next look faster (mlruns/code.json) is written. What the
command would refuse is refused.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import config, runs
from tasks.data import data_state, dataset_folder
from tasks.operations import dvc_data, preconditions
from tasks.records import Explanation, GivenSetting, PlannedStage, SweepPlan
from tasks.runs import lineage
from tasks.system.errors import UserError, printable

if TYPE_CHECKING:
    from tasks.sweeps import Space

STAGES = ("download", "prepare", "train", "evaluate", "register")


def explain(recipe: str | None, overrides: Sequence[str], stages: Sequence[str] = STAGES) -> Explanation:
    """Return what a command with these settings would do.

    Args:
        recipe: a name in recipes/ or a path.
        overrides: texts such as ``train.epochs=3``.
        stages: those that the command has.

    Raises:
        UserError: the settings are wrong, or this machine cannot train with them, as the command itself would say.
    """
    settings = config.load(recipe, overrides)
    if "train" in stages:
        preconditions.check_devices(settings)
    planned = [one for one in (*_data(settings), *_training(settings)) if one.stage in stages]
    sources = config.sources_of(recipe, overrides)
    values = settings.flat()
    given = [GivenSetting(key=key, value=value, source=sources[key]) for key, value in values.items()]
    return Explanation(stages=tuple(planned), settings=tuple(given))


def _data(settings: config.Settings) -> Iterator[PlannedStage]:
    root, name = config.project_root(), settings.dataset.name
    if (root / "data" / name).is_dir() and dataset_folder.is_local(name, root):
        yield PlannedStage(stage="download", does="is left out", why="its source is a file or folder of yours")
    elif (root / "data" / name / "raw" / "manifest.json").exists():
        yield PlannedStage(stage="download", does="is cached", why=f"data/{name}/raw is there, and was verified")
    else:
        yield PlannedStage(stage="download", does="would run", why=f"data/{name}/raw is not there")
    yield _preparation(name, root)


def _preparation(name: str, root: Path) -> PlannedStage:
    place = f"data/{name}/prepared"
    if not (root / place / "manifest.json").exists():
        return PlannedStage(stage="prepare", does="would run", why=f"{place} is not there")
    if not dataset_folder.has_pinned_code(name, root):
        why = "the installed package has other code than the one that made it"
        return PlannedStage(stage="prepare", does="would run", why=why)
    if data_state.is_known(root, name):
        why = "DVC found it up to date, and no file that it goes by has changed since"
        return PlannedStage(stage="prepare", does="is cached", why=why)
    why = f"{place} is there; a file that DVC goes by may have changed since it looked"
    return PlannedStage(stage="prepare", does="asks DVC", why=why)


def _training(settings: config.Settings) -> Iterator[PlannedStage]:
    try:
        prepared = dvc_data.load_prepared(settings.dataset.name)
    except UserError:
        yield PlannedStage(stage="train", does="would run", why="its data are not prepared yet")
    else:
        traced = lineage.collect(settings, prepared.data_version)
        same, unfinished = lineage.finished_run(prepared.name, traced), runs.find_unfinished(settings, traced)
        if unfinished is not None:
            why = f"run {unfinished.run_id} is unfinished, of the same settings, data and code; --fresh starts anew"
            yield PlannedStage(stage="train", does="would resume", why=why)
        elif same is not None:
            why = f"run {same.run_id} has that result already: `stratagem run --if-changed` would train nothing"
            yield PlannedStage(stage="train", does="would run", why=why)
        else:
            why = "no finished run has these settings, this data version and this code"
            yield PlannedStage(stage="train", does="would run", why=runs.why_not_resumed(settings, traced) or why)
    yield PlannedStage(stage="evaluate", does="would run", why="each training is evaluated")
    if settings.register_.enabled:
        yield PlannedStage(stage="register", does="would run", why="register.enabled = true")
    else:
        yield PlannedStage(stage="register", does="is left out", why="register.enabled = false")


def comparison(
    rows: Mapping[str, config.Settings | str], key: str, recipe: str | None, given: Mapping[str, Any]
) -> Explanation:
    """Return what `stratagem compare` would do.

    Args:
        rows: the settings of each, or why it is left out, by a name such as ``mirrored, custom``.
        key: identifies comparisons of the same rows.
        recipe: a name in recipes/ or a path.
        given: single settings, for all rows or for one strategy.
    """
    trained = {name: settings for name, settings in rows.items() if isinstance(settings, config.Settings)}
    first = next(iter(trained.values()))
    kept = set()
    planned = [*_data(first)]
    try:
        wanted = lineage.collect(first, dvc_data.load_prepared(first.dataset.name).data_version)
    except UserError:
        pass  # No comparison has begun on data that are not prepared.
    else:
        unfinished, _ = runs.find_unfinished_comparison(key, first.dataset.name, wanted)
        if unfinished is not None:
            kept = {f"{row.strategy}, {row.loop}" for row in runs.load_progress(unfinished).rows}
    for name, row in rows.items():
        if isinstance(row, str):
            planned.append(PlannedStage(stage=name, does="is left out", why=row))
        elif name in kept:
            why = "an unfinished comparison of the same has measured it; --fresh starts anew"
            planned.append(PlannedStage(stage=name, does="would resume", why=why))
        else:
            planned.append(PlannedStage(stage=name, does="would run", why="no unfinished comparison has measured it"))
    plain, sources = config.load(recipe).flat(), config.sources_of(recipe, [])
    flat = {name: settings.flat() for name, settings in trained.items()}
    settings = []
    for one in dict.fromkeys(key for values in flat.values() for key in values):
        values = {name: values[one] for name, values in flat.items() if one in values}
        value = next(iter(values.values()))
        same = len(values) == len(flat) and all(other == value for other in values.values())
        section, _, own = one.partition(".")
        is_given = one in given or any(other.startswith(f"{section}.") and other.endswith(f".{own}") for other in given)
        source = "--set" if is_given else sources[one] if same and plain.get(one) == value else "the comparison"
        settings.append(GivenSetting(key=one, value=value if same else values, source=source))
    return Explanation(stages=tuple(planned), settings=tuple(settings))


def sweep(space: "Space", plan: SweepPlan, trials: int) -> Explanation:
    """Return what `stratagem sweep` would do.

    Args:
        space: where its trials come from.
        plan: what two sweeps have in common where the second continues the first.
        trials: how many are wanted, including those that an unfinished sweep has begun.

    Raises:
        UserError: an unfinished sweep of this name has another plan.
    """
    from tasks import sweeps  # Optuna imports NumPy, which takes 0.3 s; the other commands do without it.

    settings, done = space.example, 0
    why = "no sweep of this space is unfinished"
    before = None
    try:
        prepared = dvc_data.load_prepared(settings.dataset.name)
    except UserError:
        why = "its data are not prepared yet"
    else:
        before = sweeps.find_sweep(plan, settings, prepared)
    if before is not None:
        done = len(runs.children(before.run_id))
        why = f"sweep {before.run_id} has begun {done} of {trials} trials; --fresh begins a new one"
    planned = [
        *_data(settings),
        PlannedStage(stage="trials", does="would run" if before is None else "would resume", why=why),
        PlannedStage(stage="final", does="would run", why="the best trial again, on all examples, then the gate"),
    ]
    flat, plain = settings.flat(), config.load(space.file.recipe).flat()
    sources = config.sources_of(space.file.recipe, [])
    given = []
    for key, value in flat.items():
        if key in space.parameters:
            value, source = str(space.file.space[key]), f"{space.path.name}, of which each trial takes one"
        elif key in space.fixed or plain.get(key) != value:
            source = space.path.name
        else:
            source = sources[key]
        given.append(GivenSetting(key=key, value=value, source=source))
    return Explanation(stages=tuple(planned), settings=tuple(given))


def add(source: str, name: str | None, values: Mapping[str, Any]) -> Explanation:
    """Return what ``dvc_data.add`` would do with the same arguments; a table is read to guess the kinds of its columns.

    Raises:
        UserError: as ``dvc_data.add``.
    """
    described, guessed = dvc_data.describe(source, name, values)
    for line in guessed:
        print(printable(line, keep="\n"), file=sys.stderr)
    if isinstance(described, config.Settings):
        given = described.dataset.model_dump(mode="json")
        texts = [f"dataset.{key}={value}" for key, value in given.items() if value is not None]
        return explain(None, texts, ("download", "prepare"))
    return Explanation(stages=tuple(_adding(described)), settings=tuple(_sources_of_description(described, values)))


def _adding(described: config.LocalDescription) -> Iterator[PlannedStage]:
    root, place = config.project_root(), f"data/{described.name}"
    there = dataset_folder.is_there(described, root)
    what = f"{place} is this dataset" if there else f"{place} with params.yaml and dvc.yaml is not there"
    yield PlannedStage(stage="folder", does="is there already" if there else "would run", why=what)
    yield _preparation(described.name, root)


def _sources_of_description(described: config.LocalDescription, values: Mapping[str, Any]) -> Iterator[GivenSetting]:
    for key, value in described.model_dump(mode="json").items():
        if key in values:
            source = "--target" if key == "target" and not isinstance(values[key], dict) else "--set"
        elif key in ("kind", "name", "source"):
            source = "SOURCE"
        else:
            usual = type(described).model_fields[key].get_default(call_default_factory=True)
            source = "default rule" if getattr(described, key) == usual else "SOURCE, as it was read"
        yield GivenSetting(key=f"dataset.{key}", value=value, source=source)

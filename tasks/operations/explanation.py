"""What `run`, `compare`, `sweep` or `data add` would do: its steps, which of them are done already, and where each
setting comes from. DVC says whether the data are up to date; if they are not, nothing is said that follows from them.
Only what makes the next look faster is written (mlruns/code.json, .dvc/). What the command would refuse is refused.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks import config, runs
from tasks.data import dataset_folder
from tasks.operations import dvc_data, preconditions
from tasks.records import Explanation, GivenSetting, PlannedStage, PreparedDataset, SweepPlan
from tasks.runs import lineage
from tasks.system.errors import printable

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
    prepared = dvc_data.load_up_to_date(settings.dataset.name)
    settings = config.load(recipe, overrides, prepared=prepared)
    planned = [one for one in (*_data(settings, prepared), *_training(settings, prepared)) if one.stage in stages]
    sources = config.sources_of(recipe, overrides, prepared)
    given = [_given(key, value, sources[key]) for key, value in settings.flat().items()]
    return Explanation(stages=tuple(planned), settings=tuple(given))


def _given(key: str, value: Any, source: str) -> GivenSetting:
    return GivenSetting(key=key, value=None if source == config.LATER else value, source=source)


def _data(settings: config.Settings, prepared: PreparedDataset | None) -> Iterator[PlannedStage]:
    root, name = config.project_root(), settings.dataset.name
    if (root / "data" / name).is_dir() and dataset_folder.is_local(name, root):
        yield PlannedStage(stage="download", does="is left out", why="its source is a file or folder of yours")
    elif (root / "data" / name / "raw" / "manifest.json").exists():
        yield PlannedStage(stage="download", does="is cached", why=f"data/{name}/raw is there, and was verified")
    else:
        yield PlannedStage(stage="download", does="would run", why=f"data/{name}/raw is not there")
    yield _preparation(name, prepared)


def _preparation(name: str, prepared: PreparedDataset | None) -> PlannedStage:
    if prepared is not None:
        return PlannedStage(stage="prepare", does="is cached", why="DVC finds it up to date")
    place = f"data/{name}/prepared"
    there = (config.project_root() / place / "manifest.json").exists()
    why = f"{place} is there, and what it is made from has changed since" if there else f"{place} is not there"
    return PlannedStage(stage="prepare", does="would run", why=why)


def _training(settings: config.Settings, prepared: PreparedDataset | None) -> Iterator[PlannedStage]:
    if prepared is None:
        yield PlannedStage(stage="train", does="would run", why="its data are prepared first")
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
    rows: Mapping[str, config.Settings | str],
    key: str,
    recipe: str | None,
    given: Mapping[str, Any],
    prepared: PreparedDataset | None,
) -> Explanation:
    """Return what `stratagem compare` would do.

    Args:
        rows: the settings of each, or why it is left out, by a name such as ``mirrored, custom``.
        key: identifies comparisons of the same rows.
        recipe: a name in recipes/ or a path.
        given: single settings, for all rows or for one strategy.
        prepared: the data; None where they are prepared first.
    """
    trained = {name: settings for name, settings in rows.items() if isinstance(settings, config.Settings)}
    first = next(iter(trained.values()))
    kept = set()
    planned = [*_data(first, prepared)]
    if prepared is not None:
        wanted = lineage.collect(first, prepared.data_version)
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
    plain, sources = _without_own(recipe, given, prepared)
    flat = {name: settings.flat() for name, settings in trained.items()}
    settings = []
    for one in dict.fromkeys(key for values in flat.values() for key in values):
        values = {name: values[one] for name, values in flat.items() if one in values}
        value = next(iter(values.values()))
        same = len(values) == len(flat) and all(other == value for other in values.values())
        section, _, own = one.partition(".")
        is_given = one in given or any(other.startswith(f"{section}.") and other.endswith(f".{own}") for other in given)
        inherited = same and (plain.get(one) == value or sources.get(one) == config.LATER)
        source = "--set" if is_given else sources[one] if inherited else "the comparison"
        settings.append(_given(one, value if same else values, source))
    return Explanation(stages=tuple(planned), settings=tuple(settings))


def _without_own(
    recipe: str | None, given: Mapping[str, Any], prepared: PreparedDataset | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings on the dataset that is given, with nothing else that is, and the source of each."""
    chosen = [f"{key}={given[key]}" for key in ("dataset.name",) if key in given]
    return config.load(recipe, chosen, prepared=prepared).flat(), config.sources_of(recipe, chosen, prepared)


def sweep(space: "Space", plan: SweepPlan, trials: int, prepared: PreparedDataset | None) -> Explanation:
    """Return what `stratagem sweep` would do.

    Args:
        space: where its trials come from.
        plan: what two sweeps have in common where the second continues the first.
        trials: how many are wanted, including those that an unfinished sweep has begun.
        prepared: the data; None where they are prepared first.

    Raises:
        UserError: an unfinished sweep of this name has another plan.
    """
    from tasks import sweeps  # Optuna imports NumPy, which takes 0.3 s; the other commands do without it.

    settings, done = space.example, 0
    why = "no sweep of this space is unfinished"
    before = None
    if prepared is None:
        why = "its data are prepared first"
    else:
        before = sweeps.find_sweep(plan, settings, prepared)
    if before is not None:
        done = len(runs.children(before.run_id))
        why = f"sweep {before.run_id} has begun {done} of {trials} trials; --fresh begins a new one"
    planned = [
        *_data(settings, prepared),
        PlannedStage(stage="trials", does="would run" if before is None else "would resume", why=why),
        PlannedStage(stage="final", does="would run", why="the best trial again, on all examples, then the gate"),
    ]
    plain, sources = _without_own(space.file.recipe, space.fixed, prepared)
    given = []
    for key, value in settings.flat().items():
        if key in space.parameters:
            value, source = str(space.file.space[key]), f"{space.path.name}, of which each trial takes one"
        elif key in space.fixed or plain.get(key) != value:
            source = space.path.name
        else:
            source = sources[key]
        given.append(_given(key, value, source))
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
    yield _preparation(described.name, dvc_data.load_up_to_date(described.name) if there else None)


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

"""What a command would do: its stages, what of them is there already and why or why not, and each setting's source."""

from collections.abc import Iterator, Sequence

from tasks import config, data_state, dataset_folder, dvc_data, lineage, pipeline, runs
from tasks.errors import UserError
from tasks.records import Explanation, GivenSetting, PlannedStage

STAGES = ("download", "prepare", "train", "evaluate", "register")


def explain(recipe: str | None, overrides: Sequence[str], stages: Sequence[str] = STAGES) -> Explanation:
    """Return what a command with these settings would do; nothing is started, and nothing but what makes the next look
    quicker (mlruns/catalogue.db, mlruns/code.json) is written.

    Args:
        recipe: a name in recipes/ or a path.
        overrides: texts such as ``train.epochs=3``.
        stages: those that the command has.

    Raises:
        UserError: the settings are wrong, or this machine cannot train with them, as the command itself would say.
    """
    settings = config.load(recipe, overrides)
    if "train" in stages:
        pipeline.check_devices(settings)
    planned = [one for one in (*_data(settings), *_training(settings)) if one.stage in stages]
    sources = config.sources_of(recipe, overrides)
    values = settings.flat()
    given = [GivenSetting(key=key, value=value, source=sources[key]) for key, value in values.items()]
    return Explanation(stages=tuple(planned), settings=tuple(given))


def _data(settings: config.Settings) -> Iterator[PlannedStage]:
    root, name = config.project_root(), settings.dataset.name
    raw, prepared = (root / "data" / name / part / "manifest.json" for part in ("raw", "prepared"))
    if (root / "data" / name).is_dir() and dataset_folder.is_local(name, root):
        yield PlannedStage(stage="download", does="is left out", why="its source is a file or folder of yours")
    elif raw.exists():
        yield PlannedStage(stage="download", does="is cached", why=f"data/{name}/raw is there, and was verified")
    else:
        yield PlannedStage(stage="download", does="would run", why=f"data/{name}/raw is not there")
    if not prepared.exists():
        yield PlannedStage(stage="prepare", does="would run", why=f"data/{name}/prepared is not there")
    elif data_state.is_known(root, name):
        why = "DVC found it up to date, and no file that it goes by has changed since"
        yield PlannedStage(stage="prepare", does="is cached", why=why)
    else:
        why = f"data/{name}/prepared is there; a file that DVC goes by may have changed since it looked"
        yield PlannedStage(stage="prepare", does="asks DVC", why=why)


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

"""What a command would do that takes a model which was trained: evaluate, register, report, export, predict, serve."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks import config, records, runs
from tasks.operations import model_use, pipeline
from tasks.records import (
    EvaluationResult,
    Explanation,
    ExportedModel,
    GivenSetting,
    LoggedModel,
    PlannedStage,
    RegisteredModel,
    Run,
)
from tasks.serving import formats
from tasks.system import errors, machine
from tasks.system.errors import UserError
from tasks.tracking import trained_models

MANIFEST = "export.json"


def evaluate(recipe: str | None, overrides: Sequence[str], run_id: str | None) -> Explanation:
    """Return what `stratagem evaluate` would do.

    Raises:
        UserError: there is no such run, or it was not trained to its end.
    """
    settings, _, run, training = pipeline.load_training(config.load(recipe, overrides), run_id)
    wanted = settings.evaluate.checkpoint
    named: dict[object, str] = {"latest": training.checkpoint, "best": training.best_checkpoint}
    why = f"{named.get(wanted, f'{training.checkpoints}/{wanted}')} on the test split of data/{training.dataset}"
    if (before := runs.load_result(run, EvaluationResult)) is not None:
        why += f"; the evaluation of {before.checkpoint} is there, and would be replaced"
    planned = PlannedStage(stage="evaluate", does="would run", why=why)
    return Explanation(
        stages=(planned, _report(run)), settings=tuple(_settings(settings, run, recipe, overrides, "evaluate"))
    )


def register(recipe: str | None, overrides: Sequence[str], run_id: str | None, force: bool) -> Explanation:
    """Return what `stratagem register` would do.

    Raises:
        UserError: there is no such run, or it was not evaluated.
    """
    settings, prepared, run, _ = pipeline.load_training(config.load(recipe, overrides), run_id)
    evaluation, section = runs.load_evaluation(run), settings.register_
    name, value = trained_models.name_of(settings, prepared.name), evaluation.metrics.get(section.metric)
    measured = f"{section.metric} is {value}, and register.minimum = {section.minimum}"
    if section.enabled:
        before = runs.load_result(run, RegisteredModel)
        there = before.model_version if before is not None else None
        why = f"run {run.run_id} is version {there} already; " if there else ""
        version = PlannedStage(stage="version", does="would run", why=f"{why}of {name}: {measured}")
        known = trained_models.own_versions()
        champion = [one.version for one in known or () if one.name == name and config.CHAMPION in one.aliases]
        if known is None:
            gate = PlannedStage(stage="gate", does="asks MLflow", why=f"which version of {name} is the champion")
        elif force:
            gate = PlannedStage(stage="gate", does="is left out", why="--force: it would be the champion")
        elif champion:
            why = f"whether it is shown to be better than {name}/{champion[0]}, the champion"
            gate = PlannedStage(stage="gate", does="would run", why=why)
        else:
            gate = PlannedStage(stage="gate", does="would run", why=f"{name} has no champion yet")
    else:
        version = PlannedStage(stage="version", does="is left out", why="register.enabled = false")
        gate = PlannedStage(stage="gate", does="is left out", why="there would be no version")
    return Explanation(
        stages=(version, gate, _report(run)), settings=tuple(_settings(settings, run, recipe, overrides, "register"))
    )


def report(name: str) -> Explanation:
    """Return what `stratagem report` would do.

    Raises:
        UserError: there is no such run.
    """
    return Explanation(stages=(_report(runs.newest(None) if name == "latest" else runs.find(name)),))


def _report(run: Run) -> PlannedStage:
    place = f"{run.folder}/report/report.html"
    there = (config.project_root() / place).exists()
    why = f"{place} is there, and would be replaced" if there else f"{place} is not there"
    return PlannedStage(stage="report", does="would run", why=why)


def _settings(
    settings: config.Settings, run: Run, recipe: str | None, overrides: Sequence[str], section: str
) -> Iterator[GivenSetting]:
    """Yield the settings of a run, of which a section is as it is now."""
    sources = config.sources_of(recipe, overrides)
    for key, value in settings.flat().items():
        now = key.startswith(f"{section}.")
        yield GivenSetting(key=key, value=value, source=sources[key] if now else f"run {run.run_id}")


def export(name: str, format: str, to: Path | None, checkpoint: str | None) -> Explanation:
    """Return what `stratagem export` would do.

    Raises:
        UserError: there is no such run, model or format, or the model has no such format.
    """
    exporter = formats.find(format)
    found = None
    if name.startswith("models:"):
        version = trained_models.find_version(name)
        if version is None:
            return Explanation(stages=(PlannedStage(stage="model", does="asks MLflow", why=f"which run {name} is of"),))
        found = LoggedModel(
            run_id=version.run_id or "", keras_file_sha256=version.tags.get("keras_file_sha256", "not known")
        )
    settings, _, run, which = pipeline.find_model(name, checkpoint, found)
    if reason := exporter.refuses.get(policy := settings.train.dtype_policy):
        raise UserError(
            f"run {run.run_id} cannot be exported as {format}: it was trained with train.dtype_policy = {policy}, and "
            f"{reason}"
        )
    training = runs.load_training(run)
    step = Path(training.best_checkpoint if which == "best" else training.checkpoint).name
    file = training.best_model if which == "best" else training.final_model
    target = to.absolute() if to else config.project_root() / run.folder / "exports" / f"{format}-{step}"
    planned = PlannedStage(stage="export", does="would run", why=f"{file} as {format}: {target} is not there")
    if target.exists():
        made = records.load(ExportedModel, target / MANIFEST)
        why = f"{target} holds run {made.run_id} as {made.format}; of the same model nothing would be written"
        planned = PlannedStage(stage="export", does="is there already", why=why)
    check = PlannedStage(stage="check", does=planned.does, why="the files' outputs beside Keras' on the test split")
    return Explanation(stages=(planned, check))


def predict(
    inputs: Sequence[str], model: str | None, output: Path | None, format: str | None, force: bool, encoding: str
) -> Explanation:
    """Return what `stratagem predict` would do, as ``model_use.check`` takes it.

    Raises:
        UserError: an input, the output or the model is none.
    """
    checked = model_use.check(inputs, model, output, format, force, encoding)
    files = [one for one in checked.inputs if one != "-"]
    given = [errors.listed(files, 3)] if files else []
    given += ["standard input"] if "-" in checked.inputs else []
    if output is None:
        why = f"to standard output, as {checked.format}" if format else "a table of the first ones"
    else:
        there = "is there, and would be replaced" if output.exists() else "is not there"
        why = f"{output} {there}; as {checked.format}"
    return Explanation(
        stages=(
            _model(checked.model),
            PlannedStage(stage="predict", does="would run", why=" and ".join(given)),
            PlannedStage(stage="write", does="would run", why=why),
        )
    )


def serve(model: str | None, port: int) -> Explanation:
    """Return what `stratagem serve-model` would do.

    Raises:
        UserError: there is no such model, or the port is taken.
    """
    reference = model or trained_models.only_champion()
    if port and not machine.is_free(port):
        raise UserError(f"--port {port} is taken. Give another one, or 0 for any")
    alias = "@" in reference
    why = f"each version that {reference} is at" if alias else f"{reference} is no alias"
    return Explanation(
        stages=(
            _model(reference),
            PlannedStage(stage="serve", does="would run", why=f"port {port or 'any'} of 127.0.0.1 is free"),
            PlannedStage(stage="follow", does="would run" if alias else "is left out", why=why),
        )
    )


def _model(reference: str) -> PlannedStage:
    found = trained_models.find(reference)
    if found is None:
        return PlannedStage(stage="load", does="asks MLflow", why=f"for the files of {reference}")
    return PlannedStage(stage="load", does="would run", why=f"{found.name}: {found.keras_file}")

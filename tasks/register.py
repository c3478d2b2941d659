"""Register the evaluated model in MLflow if it passes the gate, and make it the champion if it is better.

A rollback moves the alias `champion` back to the previous champion if that version still loads and reproduces the
outputs of its evaluation.
"""

from collections.abc import Mapping

import numpy as np

from tasks import config, records
from tasks.data import prepared_data
from tasks.evaluation import gate, predictions
from tasks.evaluation.predictions import Predictions
from tasks.modeling import metrics
from tasks.records import EvaluationResult, Judgement, PreparedDataset, RegisteredModel, RolledBack, Run, TrainingResult
from tasks.runs import entries, lineage, outcome
from tasks.serving import loaded_back
from tasks.serving.loaded_back import Loader
from tasks.serving.model_loader import LOADER
from tasks.system import files, units
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models
from tasks.tracking.copier import copy_model
from tasks.tracking.models import log_model
from tasks.tracking.registry import (
    ROLLED_BACK,
    Rollback,
    Versions,
    find_rollback,
    find_versions,
    model_place,
    move_champion_back,
    register_version,
    registering,
)
from tasks.tracking.store import Unavailable, is_own_store


def register(
    settings: config.Settings,
    run: Run,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
    load: Loader,
    force: bool = False,
) -> RegisteredModel:
    """Log the exported model of the evaluated checkpoint. If it passes the gate, register it as a version with the
    alias; if it is measurably better than the current champion (``gate.judge``), make it the champion.

    Before an alias moves, the model is loaded back through MLflow and must reproduce the outputs of its evaluation.
    The version's tags lead to the data, the commit, the checkpoint and the weights; the run's tag ``model_version``
    leads to the version.

    Args:
        settings: uses ``register``, ``evaluate`` and ``model.name``.
        run: the run that trained the model.
        prepared: the data of its evaluation.
        training: the run's training result.
        evaluation: the run's evaluation result.
        load: loads the model and computes its outputs in a separate process that does not know the run.
        force: make it the champion regardless of the comparison.

    Raises:
        UserError: the gate does not cover these data, a file of the model was changed, or the MLflow store cannot
            be used. If a server does not answer, the record contains that reason instead.
        StratagemError: another process has held the lock for an hour.
    """
    gate.check(settings, prepared)
    section, name = settings.register_, trained_models.name_of(settings, prepared.name)

    def none(model_uri: str | None, reason: str) -> RegisteredModel:
        return RegisteredModel(
            run_id=run.run_id, model_uri=model_uri, model_name=name, model_version=None, aliases=(), reason=reason
        )

    exported = {
        training.best_checkpoint: (training.best_model, training.best_weights_digest),
        training.checkpoint: (training.final_model, training.weights_digest),
    }
    if evaluation.checkpoint not in exported:
        reason = f"the evaluated checkpoint {evaluation.checkpoint} has no exported model; these have: "
        return none(None, reason + " and ".join(sorted(exported)))
    keras_file, weights_digest = exported[evaluation.checkpoint]
    model_uri = None
    try:
        model_uri = log_model(run, name.replace(".", "-"), keras_file, prepared, evaluation.step, evaluation.metrics)
        if not is_own_store():  # The team's server creates the version from its copy of the model.
            model_uri = copy_model(run, model_uri)
        given = None
        if evaluation.test_rows == predictions.test_rows(prepared):
            given = predictions.load(config.project_root() / evaluation.outputs, evaluation.outputs_sha256)
        if (refusal := _why_not_registered(section, run, training, evaluation, given)) is not None:
            return none(model_uri, refusal)
        if given is None:
            rows = f"the current test rows of {prepared.folder}"
            return none(model_uri, f"its evaluation has no outputs for {rows}: {_commands_again(run)}")
        tags = _tags(settings, run, prepared, evaluation, keras_file, weights_digest)
        with registering():
            versions = find_versions(name)
            own = versions.find(tags["model_digest"])
            judgement = _judge(settings, prepared, evaluation, given, versions, own, load)
            if force and (versions.champion is None or versions.champion != own):
                judgement = gate.forced(judgement)
            if own is None or versions.aliases.get(section.alias) != own or judgement.promoted:
                other = _load_back(run, prepared, evaluation, given, model_uri, load)
                if other is not None:
                    return none(model_uri, other)
            return register_version(run, model_uri, name, tags, section, judgement)
    except Unavailable as error:
        later = f"`stratagem models register {run.run_id}`" if is_own_store() else records.REGISTER_LATER
        return none(model_uri, f"{error}; then {later}")


def _why_not_registered(
    section: config.Register,
    run: Run,
    training: TrainingResult,
    evaluation: EvaluationResult,
    given: Predictions | None,
) -> str | None:
    if not section.enabled:
        return "register.enabled is false"
    if training.nonfinite_steps:
        steps = ", ".join(map(str, training.nonfinite_steps))
        return f"the loss was not a finite number at step {steps}, and such a run is never registered"
    metric, value = section.metric, evaluation.metrics.get(section.metric)
    if value is None:
        if given is not None:
            of_predictions = metrics.find_metric(metric.partition("/")[2], "register.metric").of_predictions
            if of_predictions(given.labels, given.outputs.astype(np.float64)) is None:
                return f"{metric} is undefined on these test rows"
        return f"the evaluation did not measure {metric}: {_commands_again(run, f'--set register.metric={metric}')}"
    lower = metrics.better(metric) == "lower"
    passed = section.minimum is None or (value <= section.minimum if lower else value >= section.minimum)
    return None if passed else f"{metric} = {units.metric(value)} does not reach register.minimum = {section.minimum}"


def _tags(
    settings: config.Settings,
    run: Run,
    prepared: PreparedDataset,
    evaluation: EvaluationResult,
    keras_file: str,
    weights_digest: str,
) -> dict[str, str]:
    path, metric = config.project_root() / keras_file, settings.register_.metric
    tags = {
        "data_version": run.lineage.data_version,
        "git_commit": run.lineage.git_commit,
        "code_digest": run.lineage.code_digest,
        "settings_digest": run.lineage.settings_digest,
        "checkpoint": evaluation.checkpoint,
        "keras_file_sha256": files.digest(path),
        "weights_digest": weights_digest,
        "model": settings.model.name,
        "model_digest": lineage.model_digest(path, weights_digest, settings.model.name),
        "takes_digest": predictions.takes_digest(prepared),
        "test_rows": evaluation.test_rows,
        "test_outputs": evaluation.outputs,
        "test_outputs_sha256": evaluation.outputs_sha256,
        metric: f"{evaluation.metrics[metric]:.4f}",
    }
    return {key: text for key, text in tags.items() if text is not None}


def _judge(
    settings: config.Settings,
    prepared: PreparedDataset,
    evaluation: EvaluationResult,
    given: Predictions,
    versions: Versions,
    own: str | None,
    load: Loader,
) -> Judgement:
    """Return whether the evaluated model becomes the champion, and why; ``own`` is its version if it is registered."""
    if versions.champion is not None and versions.champion == own:
        return Judgement(promoted=False, reason=f"this model is already @{config.CHAMPION}", against=own)
    if versions.lost is not None:
        reason = (
            f"there is nothing to compare with: version {versions.lost} was @{config.CHAMPION}, and was deleted "
            f"in MLflow or lost the alias. `stratagem models rollback {versions.name}` gives it to the newest champion "
            "that is still there, `stratagem models register --force` to this model"
        )
        return Judgement(promoted=False, reason=reason)
    if when := versions.tags(own).get(ROLLED_BACK):
        reason = f"version {own} was @{config.CHAMPION} and was rolled back at {when}"
        return Judgement(promoted=False, reason=reason, against=versions.champion)
    champion = _champion(prepared, given, versions, load) if versions.champion is not None else None
    return gate.judge(settings, prepared, evaluation, given, champion)


def _champion(prepared: PreparedDataset, given: Predictions, versions: Versions, load: Loader) -> gate.Champion:
    """Return the champion with its outputs for the current test rows; compute them if they are not saved."""
    version, tags = str(versions.champion), versions.tags(versions.champion)
    needed = ("keras_file_sha256", "model_digest", "weights_digest", "model", "takes_digest", "test_rows")
    if not all(tags.get(key) for key in needed):
        why = f"version {version} is @{config.CHAMPION}, and its tags name no test rows: another program made it"
        return gate.Champion(version, None, f"{why}. --force replaces it")
    if tags["test_rows"] == predictions.test_rows(prepared):
        known = _load_outputs(tags)
        if known is not None and np.array_equal(known.labels, given.labels):
            return gate.Champion(version, known)
    try:
        outputs = loaded_back.of_version(versions.name, version, tags, load, prepared)
        loaded_back.check(outputs, prepared)
    except Unavailable:
        raise
    except StratagemError as error:
        why = f"version {version} is @{config.CHAMPION}, has no outputs for these test rows and cannot be scored"
        return gate.Champion(version, None, f"{why}: {error}. --force replaces it")
    return gate.Champion(version, Predictions(given.labels, outputs), scored_again=True)


def _load_back(
    run: Run,
    prepared: PreparedDataset,
    evaluation: EvaluationResult,
    given: Predictions,
    model_uri: str,
    load: Loader,
) -> str | None:
    """Load a logged model back in a separate process; return how it differs from the evaluated one, None if equal."""
    place, rows = model_place(model_uri), loaded_back.sample(len(given.outputs))
    try:
        found = loaded_back.through_mlflow(place, load, prepared, rows)
    except Unavailable:
        raise
    except StratagemError as error:
        return f"it cannot be loaded back through MLflow in a clean process: {error}"
    reason = loaded_back.difference(found, given.outputs, rows, loaded_back.tolerance(run, evaluation))
    return None if reason is None else f"loaded back by MLflow in a clean process, {reason}. {_commands_again(run)}"


def _load_outputs(tags: Mapping[str, str]) -> Predictions | None:
    place = config.project_root() / tags.get("test_outputs", "")
    return predictions.load(place, tags.get("test_outputs_sha256", ""))


def _commands_again(run: Run, *options: str) -> str:
    """Return the commands that evaluate and register a run again, with further options of both."""
    given = " ".join([run.run_id, *options])
    return f"`stratagem evaluate {given}`, then `stratagem models register {given}`"


def rollback(name: str, load: Loader = LOADER.ask) -> RolledBack:
    """Load the previous champion back, as a registration does, and move the alias `champion` to it.

    If the data or the outputs of its evaluation no longer exist here, they are not compared, and the record says so.

    Args:
        name: the name of the registered model.
        load: loads the model and computes its outputs in a separate process that does not know the run.

    Raises:
        UserError: the registered model does not exist or has no previous champion; or that version cannot be loaded,
            its outputs are not finite or have changed, or it was just deleted: the alias does not move.
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: another process has held the lock for an hour.
    """
    with registering():
        back = find_rollback(name)
        try:
            seen = _load_version_back(back, load)
        except Unavailable:
            raise
        except StratagemError as error:
            champion = back.versions.champion
            stays = "no version" if champion is None else f"version {champion}"
            raise UserError(
                f"'{name}' cannot be rolled back to version {back.version}: {error}. @{config.CHAMPION} stays at "
                f"{stays}. Delete version {back.version} in MLflow, and `stratagem models rollback {name}` takes the "
                "one before it; or move the alias on MLflow's page, where nothing is checked"
            ) from None
        move_champion_back(back)
    return RolledBack(
        model_name=name, before=back.versions.champion, now=back.version, missing=back.missing, loaded_back=seen
    )


def _load_version_back(back: Rollback, load: Loader) -> str:
    """Load a version back, and return a sentence about its outputs. They must be finite and equal the evaluation's."""
    run, tags = None if back.run_id is None else entries.look_up(back.run_id), back.versions.tags(back.version)
    prepared, missing = (None, "its run is not in mlruns/") if run is None else _find_data(tags, run)
    rows = None if prepared is None else loaded_back.sample(prepared.splits["test"].num_examples)
    try:
        outputs = loaded_back.of_version(back.versions.name, back.version, tags, load, prepared, rows)
        loaded_back.check(outputs, prepared, rows)
    except Unavailable:
        raise
    except StratagemError as error:
        raise StratagemError(f"it cannot be loaded back in a clean process: {error}") from None
    if run is None or rows is None:
        return f"it was loaded and computed a row of zeros; there is nothing to compare it with: {missing}"
    evaluated = None if missing else _load_outputs(tags)
    if evaluated is None:
        missing = missing or "the outputs of its evaluation are missing"
        return f"it was loaded and computed {len(rows)} test rows; there is nothing to compare them with: {missing}"
    evaluation = outcome.load(run, EvaluationResult)
    tolerance = loaded_back.COARSE_TOLERANCE
    # Otherwise the run was evaluated again since, and the device of the earlier evaluation is unknown.
    if evaluation is not None and evaluation.outputs_sha256 == tags.get("test_outputs_sha256"):
        tolerance = loaded_back.tolerance(run, evaluation)
    if (other := loaded_back.difference(outputs, evaluated.outputs, rows, tolerance)) is not None:
        raise StratagemError(f"loaded back in a clean process, {other}")
    return f"it was loaded, and its outputs for {len(rows)} test rows equal those of its evaluation"


def _find_data(tags: Mapping[str, str], run: Run) -> tuple[PreparedDataset | None, str]:
    """Return the data for a version, and why its outputs for them cannot be compared; empty if they can."""
    folder = f"data/{run.settings['dataset']['name']}/prepared"
    try:
        prepared = records.load(PreparedDataset, config.project_root() / folder / "manifest.json")
        prepared_data.verify(prepared)
    except UserError:
        return None, f"{folder} is missing or damaged"
    if tags.get("takes_digest") != predictions.takes_digest(prepared):
        return None, f"columns, image sizes, vocabularies or classes of {folder} have changed"
    if tags.get("test_rows") != predictions.test_rows(prepared):
        return prepared, f"the test rows of {folder} have changed"
    return prepared, ""

"""Put the evaluated model into MLflow's registry, if it is good enough; and make it the champion, if it is better.

A rollback moves the alias `champion` back to the version that had it before, if that can still be loaded and gives
what it gave when it was evaluated.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks import config, records, runs
from tasks.data import prepared_data
from tasks.evaluation import gate, predictions
from tasks.evaluation.predictions import Predictions
from tasks.modeling import metrics
from tasks.records import EvaluationResult, Judgement, PreparedDataset, RegisteredModel, RolledBack, Run, TrainingResult
from tasks.runs import lineage
from tasks.serving import loaded_back
from tasks.serving.loaded_back import Loader
from tasks.system import files
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models
from tasks.tracking.champion import Rollback, find_rollback, move_champion_back
from tasks.tracking.models import log_model
from tasks.tracking.outbox import await_told
from tasks.tracking.registry import (
    Candidate,
    CurrentVersions,
    find_current_versions,
    model_place,
    register_version,
    registering,
)
from tasks.tracking.store import Unavailable, is_own_store


class Evaluated(NamedTuple):
    """What is known of the model from its evaluation."""

    record: EvaluationResult
    given: Predictions
    """What it gave for the test rows that there are now."""


class How(NamedTuple):
    """What a registration needs beside its records."""

    load: Loader
    force: bool = False
    """Make the model the champion, whatever the evidence."""


def register(
    settings: config.Settings,
    run: Run,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
    how: How,
) -> RegisteredModel:
    """Log the exported model of the evaluated checkpoint, and make it a version with the alias if it passes the gate;
    and the champion, if it is shown to be better than the one there is (``gate.judge``).

    Before an alias moves the model is loaded back through MLflow, and has to give what it gave when it was evaluated.
    The version's tags lead to the data, the commit, the checkpoint and the weights; the run's tag ``model_version``
    leads to the version.

    Raises:
        UserError: the gate says nothing about these data, or the MLflow store cannot be used. A server that does not
            answer is a reason in the record.
        StratagemError: MLflow did not make the version ready.
    """
    gate.check(settings, prepared)
    name = trained_models.name_of(settings, prepared.name)
    exported = {
        training.best_checkpoint: (training.best_model, training.best_weights_digest),
        training.checkpoint: (training.final_model, training.weights_digest),
    }
    if evaluation.checkpoint not in exported:
        reason = f"the evaluated checkpoint {evaluation.checkpoint} has no exported model; these have: "
        return _none(run, None, name, reason + " and ".join(sorted(exported)))
    keras_file, weights_digest = exported[evaluation.checkpoint]
    model_uri = None
    try:
        await_told(run)
        model_uri = log_model(run, name.replace(".", "-"), keras_file, prepared, evaluation.step, evaluation.metrics)
        refusal = _why_not_registered(settings.register_, run, prepared, training, evaluation)
        if refusal is not None:
            return _none(run, model_uri, name, refusal)
        evaluated = _evaluated(evaluation, prepared)
        if evaluated is None:
            rows = f"the test rows that {prepared.folder} has now"
            return _none(run, model_uri, name, f"its evaluation has no outputs for {rows}: {_commands_again(run)}")
        candidate = Candidate(
            run=run,
            model_uri=model_uri,
            name=name,
            alias=settings.register_.alias,
            tags=_tags(settings, run, prepared, evaluation, keras_file, weights_digest),
            metric=settings.register_.metric,
            better=metrics.better(settings.register_.metric),
        )
        with registering():
            standing = find_current_versions(candidate)
            judgement = _judge(settings, prepared, evaluated, candidate, standing, how)
            if not standing.has_alias or judgement.promoted:
                other = _load_back(run, prepared, evaluated, model_uri, how.load)
                if other is not None:
                    return _none(run, model_uri, name, other)
            return register_version(candidate, judgement)
    except Unavailable as error:
        return _none(run, model_uri, name, f"{error}; then `stratagem register --run {run.run_id}`")


def _why_not_registered(
    section: config.Register,
    run: Run,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
) -> str | None:
    if not section.enabled:
        return "register.enabled is false"
    if training.nonfinite_steps:
        steps = ", ".join(map(str, training.nonfinite_steps))
        return f"the loss was not a finite number at step {steps}, and such a run is never registered"
    value = evaluation.metrics.get(section.metric)
    if value is None:
        return _unmeasured(section.metric, run, _evaluated(evaluation, prepared))
    lower = metrics.better(section.metric) == "lower"
    passed = section.minimum is None or (value <= section.minimum if lower else value >= section.minimum)
    return None if passed else f"{section.metric} = {value:.4f} does not reach register.minimum = {section.minimum}"


def _unmeasured(metric: str, run: Run, evaluated: Evaluated | None) -> str:
    """Return why an evaluation has no value of a metric: there is none, or it was told of it afterwards."""
    if evaluated is not None:
        of_predictions = metrics.find_metric(metric.partition("/")[2], "register.metric").of_predictions
        if of_predictions(evaluated.given.labels, evaluated.given.outputs.astype(np.float64)) is None:
            return f"{metric} says nothing about these test rows"
    return f"the evaluation was told of no {metric}: {_commands_again(run, f'--set register.metric={metric}')}"


def _evaluated(evaluation: EvaluationResult, prepared: PreparedDataset) -> Evaluated | None:
    """Return the evaluation with what the model gave; None where that is gone, or is of other test rows."""
    if evaluation.test_rows != predictions.test_rows(prepared):
        return None
    given = predictions.load(config.project_root() / evaluation.outputs, evaluation.outputs_sha256)
    return None if given is None else Evaluated(evaluation, given)


def _tags(
    settings: config.Settings,
    run: Run,
    prepared: PreparedDataset,
    evaluation: EvaluationResult,
    keras_file: str,
    weights_digest: str,
) -> dict[str, str]:
    """Return the tags of a version."""
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
    evaluated: Evaluated,
    candidate: Candidate,
    standing: CurrentVersions,
    how: How,
) -> Judgement:
    """Return whether the candidate becomes the champion, and why."""
    if standing.champion is not None and standing.champion == standing.own:
        return Judgement(promoted=False, reason=f"this model is @{config.CHAMPION} already", against=standing.own)
    if standing.lost is not None:
        judgement = Judgement(
            promoted=False,
            reason=f"there is nothing to compare with: version {standing.lost} was @{config.CHAMPION}, and was deleted "
            f"in MLflow or lost the alias. `stratagem rollback {candidate.name}` gives it to the newest champion that "
            "is still there, `stratagem register --force` to this model",
        )
    elif standing.rolled_back:
        reason = f"version {standing.own} was @{config.CHAMPION} and was rolled back at {standing.rolled_back}"
        judgement = Judgement(promoted=False, reason=reason, against=standing.champion)
    else:
        champion = None
        if standing.champion is not None:
            champion = _champion(settings, prepared, evaluated.given, candidate.name, standing, how.load)
        judgement = gate.judge(settings, prepared, evaluated.record, evaluated.given, champion)
    return gate.forced(judgement) if how.force else judgement


def _champion(
    settings: config.Settings,
    prepared: PreparedDataset,
    given: Predictions,
    name: str,
    standing: CurrentVersions,
    load: Loader,
) -> gate.Champion:
    """Return the champion with its outputs for the present test rows, which are computed where there are none."""
    version, tags = str(standing.champion), standing.champion_tags
    needed = ("keras_file_sha256", "model_digest", "weights_digest", "model", "takes_digest", "test_rows")
    if not all(tags.get(key) for key in needed):
        why = f"version {version} is @{config.CHAMPION}, and this project did not register it, or an older version did"
        return gate.Champion(version, None, f"{why}: it does not say what it was tested on. --force takes its place")
    if tags["test_rows"] == predictions.test_rows(prepared):
        known = _load_outputs(tags)
        if known is not None and np.array_equal(known.labels, given.labels):
            return gate.Champion(version, known)
    why = f"version {version} is @{config.CHAMPION}, and was tested on other rows or its outputs are gone"
    if tags["takes_digest"] != predictions.takes_digest(prepared):
        reason = "it cannot be given the present ones: image size, columns, vocabularies or classes are others now"
        return gate.Champion(version, None, f"{why}; {reason}. --force takes its place")
    try:
        outputs = loaded_back.of_keras_file(name, version, tags, load, prepared)
        loaded_back.check(outputs, prepared)
    except Unavailable:
        raise
    except StratagemError as error:
        return gate.Champion(version, None, f"{why}; it cannot be scored again: {error}. --force takes its place")
    return gate.Champion(version, Predictions(given.labels, outputs), scored_again=True)


def _load_back(run: Run, prepared: PreparedDataset, evaluated: Evaluated, model_uri: str, load: Loader) -> str | None:
    """Return why a logged model is not what was evaluated; None where it is, loaded back in a process of its own."""
    place, given = model_place(model_uri), evaluated.given
    rows = loaded_back.sample(len(given.outputs))
    try:
        found = loaded_back.through_mlflow(place, load, prepared, rows)
    except Unavailable:
        raise
    except StratagemError as error:
        return f"it cannot be loaded back through MLflow in a clean process: {error}"
    tolerance = loaded_back.tolerance(run, evaluated.record)
    reason = loaded_back.difference(found, given.outputs, rows, tolerance)
    return None if reason is None else f"loaded back through MLflow in a clean process {reason}. {_commands_again(run)}"


def _load_outputs(tags: Mapping[str, str]) -> Predictions | None:
    """Return what a version gave when it was evaluated; None where that is not here any more."""
    place = config.project_root() / tags.get("test_outputs", "")
    return predictions.load(place, tags.get("test_outputs_sha256", ""))


def _commands_again(run: Run, *options: str) -> str:
    """Return what evaluates and registers a run once more, with further options of both commands."""
    given = " ".join(["--run", run.run_id, *options])
    return f"`stratagem evaluate {given}`, then `stratagem register {given}`"


def _none(run: Run, model_uri: str | None, name: str, reason: str) -> RegisteredModel:
    """Return the record of a model that becomes no version."""
    return RegisteredModel(
        run_id=run.run_id,
        model_uri=model_uri,
        model_name=name,
        model_version=None,
        aliases=(),
        reason=reason,
    )


class FoundEvaluation(NamedTuple):
    """What the project still has of the data and the evaluation of a version."""

    run: Run | None = None
    """The run that the version was made of."""
    prepared: PreparedDataset | None = None
    """The data of that run, if the version can be given their present test rows."""
    outputs: Predictions | None = None
    """What the version gave for these rows when it was evaluated."""
    missing: str = ""
    """Why there is nothing to compare with; empty if there is."""


def rollback(name: str, load: Loader) -> RolledBack:
    """Move the alias `champion` back, after the model was loaded back as for a registration.

    Data or outputs of the evaluation that are not here any more are not compared; the record says so.

    Args:
        name: of the registered model.
        load: loads the model and computes what it gives, in a process that knows nothing of the run.

    Raises:
        UserError: there is no such registered model, no version that was the champion before, or that one cannot be
            loaded, gives no numbers or something else now, or was deleted meanwhile: then the alias stays.
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: another process is moving the alias, or has moved it meanwhile.
    """
    with registering():
        back = find_rollback(name)
        seen = _load_version_back(back, _find_evaluation(back), load)
        move_champion_back(back)
    return RolledBack(model_name=name, before=back.champion, now=back.version, missing=back.missing, loaded_back=seen)


def _find_evaluation(back: Rollback) -> FoundEvaluation:
    run = None if back.run_id is None else runs.look_up(back.run_id)
    if run is None:
        return FoundEvaluation(missing="the run that it was made of is not here")
    folder = f"data/{run.settings['dataset']['name']}/prepared"
    try:
        prepared = records.load(PreparedDataset, config.project_root() / folder / "manifest.json")
        prepared_data.verify(prepared)
    except UserError:
        return FoundEvaluation(run, missing=f"{folder} is missing or damaged")
    if back.tags.get("takes_digest") != predictions.takes_digest(prepared):
        return FoundEvaluation(run, missing=f"{folder} has other columns, image sizes, vocabularies or classes now")
    if back.tags.get("test_rows") != predictions.test_rows(prepared):
        return FoundEvaluation(run, prepared, missing=f"{folder} has other test rows now")
    outputs = _load_outputs(back.tags)
    missing = "" if outputs is not None else "what it gave when it was evaluated is not here any more"
    return FoundEvaluation(run, prepared, outputs, missing)


def _load_version_back(back: Rollback, found: FoundEvaluation, load: Loader) -> str:
    """Load a version back, and return a sentence about what it gives.

    Raises:
        UserError: it cannot be loaded, gives no numbers, or something else than when it was evaluated.
    """
    prepared = found.prepared
    count = 0 if prepared is None else prepared.splits["test"].num_examples
    rows = loaded_back.sample(count) if count else None
    try:
        outputs = _compute_version(back, prepared, rows, load)
        if prepared is None:
            loaded_back.check_numbers(outputs)
        else:
            loaded_back.check(outputs, prepared, rows)
    except Unavailable:
        raise
    except StratagemError as error:
        raise _no_rollback(back, f"it cannot be loaded back in a clean process: {error}") from None
    if prepared is None or rows is None:
        computed = "an example of no meaning" if outputs.size else "nothing"  # Another program's may have no example.
        return f"it was loaded, and computed {computed}; nothing was compared: {found.missing}"
    if found.outputs is None or found.run is None:
        return f"it was loaded, and computed {len(rows)} test rows; nothing was compared: {found.missing}"
    evaluation = runs.load_result(found.run, EvaluationResult)
    tolerance = loaded_back.COARSE_TOLERANCE
    # Otherwise the run was evaluated once more since, and nothing says on which device it was before.
    if evaluation is not None and evaluation.outputs_sha256 == back.tags.get("test_outputs_sha256"):
        tolerance = loaded_back.tolerance(found.run, evaluation)
    other = loaded_back.difference(outputs, found.outputs.outputs, rows, tolerance)
    if other is not None:
        raise _no_rollback(back, f"loaded back in a clean process {other}")
    return f"it was loaded, and gives what it gave when it was evaluated, compared on {len(rows)} test rows"


def _compute_version(
    back: Rollback, prepared: PreparedDataset | None, rows: list[int] | None, load: Loader
) -> npt.NDArray[Any]:
    """Return the outputs of a version.

    MLflow loads it from the project's own store, as for a server of models. Others may have written to a server's
    store: there only the version's .keras file is loaded, because what MLflow loads beside it is code.
    """
    if is_own_store():
        return loaded_back.through_mlflow(back.place, load, prepared, rows)
    if not {"keras_file_sha256", "model", "model_digest", "weights_digest"} <= set(back.tags):
        raise UserError(
            "this project did not register it, and a server's model that says nothing of itself may be code"
        )
    return loaded_back.of_keras_file(back.name, back.version, back.tags, load, prepared, rows)


def _no_rollback(back: Rollback, reason: str) -> UserError:
    stays = "no version" if back.champion is None else f"version {back.champion}"
    return UserError(
        f"'{back.name}' cannot be rolled back to version {back.version}: {reason}. @{config.CHAMPION} stays at "
        f"{stays}. Delete version {back.version} in MLflow, and `stratagem rollback {back.name}` takes the one before "
        "it; or move the alias on MLflow's page, where nothing is checked"
    )

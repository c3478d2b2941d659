"""Put the evaluated model into MLflow's registry, if it is good enough; and make it the champion, if it is better."""

from typing import NamedTuple

import numpy as np

from tasks import config, tracking
from tasks.evaluation import gate, predictions
from tasks.evaluation.predictions import Predictions
from tasks.modeling import metrics
from tasks.records import EvaluationResult, Judgement, PreparedDataset, RegisteredModel, Run, TrainingResult
from tasks.runs import lineage
from tasks.serving import loaded_back
from tasks.serving.loaded_back import Apart
from tasks.system import files
from tasks.system.errors import StratagemError
from tasks.tracking import trained_models


class Evaluated(NamedTuple):
    """What is known of the model from its evaluation."""

    record: EvaluationResult
    given: Predictions
    """What it gave for the test rows that there are now."""


class How(NamedTuple):
    """What a registration needs beside its records."""

    apart: Apart
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
        tracking.await_told(run)
        model_uri = tracking.log_model(
            run, name.replace(".", "-"), keras_file, prepared, evaluation.step, evaluation.metrics
        )
        refusal = _refusal(settings.register_, run, prepared, training, evaluation)
        if refusal is not None:
            return _none(run, model_uri, name, refusal)
        evaluated = _evaluated(evaluation, prepared)
        if evaluated is None:
            rows = f"the test rows that {prepared.folder} has now"
            return _none(run, model_uri, name, f"its evaluation has no outputs for {rows}: {_commands_again(run)}")
        candidate = tracking.Candidate(
            run=run,
            model_uri=model_uri,
            name=name,
            alias=settings.register_.alias,
            tags=_tags(settings, run, prepared, evaluation, keras_file, weights_digest),
            metric=settings.register_.metric,
            better=metrics.better(settings.register_.metric),
        )
        with tracking.registering():
            standing = tracking.find_standing(candidate)
            judgement = _judge(settings, prepared, evaluated, candidate, standing, how)
            if not standing.has_alias or judgement.promoted:
                other = _load_back(run, prepared, evaluated, model_uri, how.apart)
                if other is not None:
                    return _none(run, model_uri, name, other)
            return tracking.register_version(candidate, judgement)
    except tracking.Unavailable as error:
        return _none(run, model_uri, name, f"{error}; then `stratagem register --run {run.run_id}`")


def _refusal(
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
        return f"the loss was no finite number at step {steps}, and such a run is never registered"
    value = evaluation.metrics.get(section.metric)
    if value is None:
        return _unmeasured(section.metric, run, _evaluated(evaluation, prepared))
    lower = metrics.better(section.metric) == "lower"
    passed = section.minimum is None or (value <= section.minimum if lower else value >= section.minimum)
    return None if passed else f"{section.metric} = {value:.4f} does not reach register.minimum = {section.minimum}"


def _unmeasured(metric: str, run: Run, evaluated: Evaluated | None) -> str:
    """Return why an evaluation has no value of a metric: there is none, or it was told of it afterwards."""
    if evaluated is not None:
        of_predictions = metrics.find(metric.partition("/")[2], "register.metric").of_predictions
        if of_predictions(evaluated.given.labels, evaluated.given.outputs.astype(np.float64)) is None:
            return f"{metric} says nothing about these test rows"
    return f"the evaluation was told of no {metric}: {_commands_again(run, f'--set register.metric={metric}')}"


def _evaluated(evaluation: EvaluationResult, prepared: PreparedDataset) -> Evaluated | None:
    """Return the evaluation with what the model gave; None where that is gone, or is of other test rows."""
    if evaluation.outputs is None or evaluation.test_rows != predictions.test_rows(prepared):
        return None
    given = predictions.load(config.project_root() / evaluation.outputs, evaluation.outputs_sha256 or "")
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
    candidate: tracking.Candidate,
    standing: tracking.Standing,
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
            champion = _champion(settings, prepared, evaluated.given, candidate.name, standing, how.apart)
        judgement = gate.judge(settings, prepared, evaluated.record, evaluated.given, champion)
    return gate.forced(judgement) if how.force else judgement


def _champion(
    settings: config.Settings,
    prepared: PreparedDataset,
    given: Predictions,
    name: str,
    standing: tracking.Standing,
    apart: Apart,
) -> gate.Champion:
    """Return the champion with its outputs for the present test rows, which are computed where there are none."""
    version, tags = str(standing.champion), standing.champion_tags
    needed = ("keras_file_sha256", "model_digest", "weights_digest", "model", "takes_digest", "test_rows")
    if not all(tags.get(key) for key in needed):
        why = f"version {version} is @{config.CHAMPION}, and this project did not register it, or an older version did"
        return gate.Champion(version, None, f"{why}: it does not say what it was tested on. --force takes its place")
    if tags["test_rows"] == predictions.test_rows(prepared):
        place = config.project_root() / tags.get("test_outputs", "")
        known = predictions.load(place, tags.get("test_outputs_sha256", ""))
        if known is not None and np.array_equal(known.labels, given.labels):
            return gate.Champion(version, known)
    why = f"version {version} is @{config.CHAMPION}, and was tested on other rows or its outputs are gone"
    if tags["takes_digest"] != predictions.takes_digest(prepared):
        reason = "it cannot be given the present ones: image size, columns, vocabularies or classes are others now"
        return gate.Champion(version, None, f"{why}; {reason}. --force takes its place")
    try:
        outputs = loaded_back.of_keras_file(name, version, tags, apart, prepared)
        loaded_back.check(outputs, prepared)
    except tracking.Unavailable:
        raise
    except StratagemError as error:
        return gate.Champion(version, None, f"{why}; it cannot be scored again: {error}. --force takes its place")
    return gate.Champion(version, Predictions(given.labels, outputs), scored_again=True)


def _load_back(run: Run, prepared: PreparedDataset, evaluated: Evaluated, model_uri: str, apart: Apart) -> str | None:
    """Return why a logged model is not what was evaluated; None where it is, loaded back in a process of its own."""
    place, given = tracking.model_place(model_uri), evaluated.given
    rows = loaded_back.sample(len(given.outputs))
    try:
        found = loaded_back.through_mlflow(place, apart, prepared, rows)
    except tracking.Unavailable:
        raise
    except StratagemError as error:
        return f"it cannot be loaded back through MLflow in a clean process: {error}"
    tolerance = loaded_back.tolerance(run, evaluated.record)
    reason = loaded_back.difference(found, given.outputs, rows, tolerance)
    return None if reason is None else f"loaded back through MLflow in a clean process {reason}. {_commands_again(run)}"


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

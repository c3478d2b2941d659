"""Put the evaluated model into MLflow's registry, if it is good enough."""

from tasks import config, files, lineage, metrics, tracking
from tasks.records import EvaluationResult, PreparedDataset, RegisteredModel, Run, TrainingResult


def register(
    settings: config.Settings,
    run: Run,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
) -> RegisteredModel:
    """Log the exported model of the evaluated checkpoint, and make it a version with the alias if it passes the gate.

    The version's tags lead to the data, the commit, the checkpoint and the weights; the run's tag ``model_version``
    leads to the version.

    Raises:
        UserError: the MLflow store cannot be used. A server that does not answer is a reason in the record.
        StratagemError: MLflow did not make the version ready.
    """
    name = settings.register_.model_name or f"{prepared.name}-{settings.model.name.replace(':', '.')}"
    record = RegisteredModel(
        run_id=run.run_id, model_uri=None, model_name=name, model_version=None, aliases=(), reason=None
    )
    models = {training.best_checkpoint: training.best_model, training.checkpoint: training.final_model}
    digests = {training.best_model: training.best_weights_digest, training.final_model: training.weights_digest}
    if evaluation.checkpoint not in models:
        exported = " and ".join(sorted(models))
        reason = f"the evaluated checkpoint {evaluation.checkpoint} has no exported model; these have: {exported}"
        return record.model_copy(update={"reason": reason})
    keras_file = models[evaluation.checkpoint]
    root = config.project_root()
    try:
        tracking.await_told(run)
        model_uri = tracking.log_model(
            run, name.replace(".", "-"), keras_file, prepared, evaluation.step, evaluation.metrics
        )
    except tracking.Unavailable as error:
        return record.model_copy(update={"reason": _later(run, error)})
    record = record.model_copy(update={"model_uri": model_uri})
    refusal = _refusal(settings.register_, evaluation, training)
    if refusal is not None:
        return record.model_copy(update={"reason": refusal})
    tags = {
        "data_version": run.lineage.data_version,
        "git_commit": run.lineage.git_commit,
        "code_digest": run.lineage.code_digest,
        "settings_digest": run.lineage.settings_digest,
        "checkpoint": evaluation.checkpoint,
        "keras_file_sha256": files.digest(root / keras_file),
        "weights_digest": digests[keras_file],
        "model_digest": lineage.model_digest(root / keras_file, digests[keras_file], settings.model.name),
        settings.register_.metric: f"{evaluation.metrics[settings.register_.metric]:.4f}",
    }
    alias = settings.register_.alias
    present = {key: text for key, text in tags.items() if text is not None}
    try:
        metric = settings.register_.metric
        better = metrics.better(metric)
        version, notes = tracking.register_version(run, model_uri, name, alias, present, metric, better)
    except tracking.Unavailable as error:
        return record.model_copy(update={"reason": _later(run, error)})
    return record.model_copy(update={"model_version": version, "aliases": (alias,), "notes": notes})


def _later(run: Run, error: Exception) -> str:
    return f"{error}; then `stratagem register --run {run.run_id}`"


def _refusal(gate: config.Register, evaluation: EvaluationResult, training: TrainingResult) -> str | None:
    if not gate.enabled:
        return "register.enabled is false"
    if training.nonfinite_steps:
        steps = ", ".join(map(str, training.nonfinite_steps))
        return f"the loss was no finite number at step {steps}, and such a run is never registered"
    if gate.metric not in evaluation.metrics:
        return f"{gate.metric} says nothing about these data, or was not measured; {', '.join(evaluation.metrics)} were"
    value, lower = evaluation.metrics[gate.metric], metrics.better(gate.metric) == "lower"
    passed = gate.minimum is None or (value <= gate.minimum if lower else value >= gate.minimum)
    return None if passed else f"{gate.metric} = {value:.4f} does not reach register.minimum = {gate.minimum}"

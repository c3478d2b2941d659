"""Evaluate: one checkpoint, restored into a fresh model, over the test split."""

import keras
import numpy as np
from scipy.special import log_softmax
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score

from tasks import checkpoints, config, datasets, input_pipeline, loops, models
from tasks.checkpoints import Checkpoints
from tasks.errors import StratagemError
from tasks.records import ClassMetrics, EvaluationResult, PreparedDataset, TrainingResult


def evaluate(settings: config.Settings, prepared: PreparedDataset, training: TrainingResult) -> EvaluationResult:
    """Return loss, accuracy, top-5 accuracy (more than five classes), per-class metrics and the confusion matrix.

    Args:
        settings: ``model``, ``input`` and ``evaluate`` are read.
        prepared: the data.
        training: names the run and its checkpoints.

    Raises:
        UserError: no such checkpoint, or it is of another model; or a damaged array.
        StratagemError: the model's outputs are no numbers.
    """
    datasets.verify(prepared)
    keras.config.set_dtype_policy(settings.train.dtype_policy)
    model = models.build(settings.model, prepared, settings.input.normalization)
    folder = config.project_root() / training.checkpoints
    with Checkpoints(folder, monitor=settings.checkpoint.monitor, read_only=True) as saved:
        step = saved.find(settings.evaluate.checkpoint)
        arrays, _ = saved.restore(step)
    checkpoints.assign(model, arrays, ("model",))

    test = input_pipeline.ordered(settings, prepared, "test", settings.evaluate.global_batch_size)
    try:
        labels = np.concatenate([batch.numpy() for _, batch in test.dataset])
        logits = model.predict(loops.Epochs(test.dataset, test.steps), verbose=0).astype("float64")
    finally:
        test.close()
    if not np.isfinite(logits).all():
        raise StratagemError(
            f"checkpoint {step} of run {training.run_id} gives outputs that are no numbers: its training diverged. "
            "Train again with a lower schedule.learning_rate, or evaluate an earlier checkpoint"
        )
    predicted = logits.argmax(axis=1)
    metrics = {
        "test/loss": float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean()),
        "test/accuracy": float((predicted == labels).mean()),
    }
    classes = list(range(prepared.num_classes))
    if prepared.num_classes > 5:
        metrics["test/top_5_accuracy"] = float(top_k_accuracy_score(labels, logits, k=5, labels=classes))
    columns = precision_recall_fscore_support(labels, predicted, labels=classes, zero_division=0)
    return EvaluationResult(
        run_id=training.run_id,
        checkpoint=f"{training.checkpoints}/{step}",
        step=step,
        num_examples=len(labels),
        metrics=metrics,
        classes=tuple(
            ClassMetrics(name=name, precision=float(p), recall=float(r), f1=float(f), support=int(n))
            for name, p, r, f, n in zip(prepared.class_names, *columns, strict=True)
        ),
        confusion_matrix=tuple(map(tuple, confusion_matrix(labels, predicted, labels=classes).tolist())),
    )

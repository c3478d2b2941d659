"""Evaluate: one checkpoint, restored into a fresh model on one device, over the test split."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax

from tasks import checkpoints, config, input_pipeline, models, prepared_data
from tasks.checkpoints import Checkpoints
from tasks.errors import StratagemError, UserError
from tasks.records import ClassMetrics, EvaluationResult, PreparedDataset, TrainingResult


def evaluate(settings: config.Settings, prepared: PreparedDataset, training: TrainingResult) -> EvaluationResult:
    """Return loss, accuracy, top-5 accuracy (more than five classes), per-class metrics and the confusion matrix.

    The loss is what ``validation/loss`` is, the run's own with the model's own losses (regularisation), in float64.

    Args:
        settings: ``model``, ``input``, ``evaluate``, ``train.loss`` and ``train.dtype_policy`` are read; not the
            strategy, so a checkpoint of any is evaluated in a process of any.
        prepared: the data.
        training: names the run and its checkpoints.

    Raises:
        UserError: no such checkpoint, or it is of another model; or a damaged array.
        StratagemError: the model's outputs are no numbers.
    """
    prepared_data.verify(prepared)
    models.set_precision(settings.train.dtype_policy)
    model = models.build(settings.model, prepared, settings.input.normalization)
    folder = config.project_root() / training.checkpoints
    with Checkpoints(folder, monitor=settings.checkpoint.monitor, read_only=True) as saved:
        step = saved.find(settings.evaluate.checkpoint)
        try:
            arrays, _ = saved.restore(step)
        except checkpoints.Damaged as error:
            raise UserError(
                f"{error}. Evaluate another one: `stratagem evaluate --run {training.run_id} "
                "--set evaluate.checkpoint=best`, or a step"
            ) from None
    checkpoints.assign(model, arrays, ("model",))

    test = input_pipeline.ordered(settings, prepared, "test", settings.evaluate.global_batch_size)
    with contextlib.closing(test):
        function = _function(model)
        # An array not of tf.data, which takes longer to start than these batches take to be read.
        with_numpy = keras.backend.backend() == "jax" or isinstance(test.source, input_pipeline.ArraySource)
        batches = test.arrays() if with_numpy else test.dataset.as_numpy_iterator()
        found = [(batch_labels, *function(images)) for images, batch_labels in batches]
    labels = np.concatenate([batch_labels for batch_labels, _, _ in found])
    logits = np.concatenate([batch_logits for _, batch_logits, _ in found])
    # As Keras takes them: those of each batch, as often as it has examples.
    own_loss = sum(len(batch_labels) * batch_loss for batch_labels, _, batch_loss in found) / len(labels)
    if not np.isfinite(logits).all():
        raise StratagemError(
            f"checkpoint {step} of run {training.run_id} gives outputs that are no numbers: its training diverged. "
            "Train again with a lower schedule.learning_rate, or evaluate an earlier checkpoint"
        )
    predicted = logits.argmax(axis=1)
    metrics = {
        "test/loss": float(_losses(settings.train.loss, labels, logits).mean() + own_loss),
        "test/accuracy": float((predicted == labels).mean()),
    }
    if prepared.num_classes > 5:
        best = np.argsort(logits, axis=1, kind="stable")[:, -5:]
        metrics["test/top_5_accuracy"] = float((best == labels[:, None]).any(axis=1).mean())
    confusion = _confusion(labels, predicted, prepared.num_classes)
    columns = _by_class(confusion)
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
        confusion_matrix=tuple(map(tuple, confusion.tolist())),
    )


# By hand, and not by scikit-learn, whose import takes 0.4 s of a processor.


def _confusion(labels: npt.NDArray[Any], predicted: npt.NDArray[Any], num_classes: int) -> npt.NDArray[np.int64]:
    """Return how many examples of each class, a row, were taken for each class, a column: int64 (classes, classes)."""
    counts = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def _by_class(confusion: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], ...]:
    """Return precision, recall, F1 and the number of examples of each class, (classes,); 0 where it would be 0 / 0."""
    right, taken, support = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    precision, recall, f1 = (
        share / np.maximum(whole, 1)
        for share, whole in ((right, taken), (right, support), (2 * right, taken + support))
    )
    return precision, recall, f1, support


def _function(model: Any) -> Callable[[Any], tuple[npt.NDArray[np.float64], float]]:
    """Return what computes a batch: images uint8 (n, height, width, channels) -> logits (n, classes), and the sum of
    the model's own losses, which Keras' ``predict`` leaves out."""
    state = [
        [variable.value for variable in part] for part in (model.trainable_variables, model.non_trainable_variables)
    ]

    def call(trainable: Any, others: Any, images: Any) -> tuple[Any, list[Any]]:
        logits, _, losses = model.stateless_call(trainable, others, images, training=False, return_losses=True)
        return logits, losses

    if keras.backend.backend() == "jax":
        import jax

        compiled: Any = jax.jit(call)
    else:
        import tensorflow as tf

        # Keras lets AutoGraph convert nothing of a model either, and looking for something takes 0.09 s.
        compiled = tf.function(call, autograph=False, reduce_retracing=True)

    def function(images: Any) -> tuple[npt.NDArray[np.float64], float]:
        logits, losses = compiled(*state, images)
        return np.asarray(logits).astype("float64"), sum(float(loss) for loss in losses)

    return function


def _losses(kind: str, labels: npt.NDArray[np.int64], logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return what ``train.loss`` is of each example: labels (n,), logits (n, classes) -> (n,)."""
    values: npt.NDArray[np.float64]
    if kind == "mean_squared_error":
        values = np.square(softmax(logits, axis=1) - np.eye(logits.shape[1])[labels]).mean(axis=1)
    else:
        values = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
    return values

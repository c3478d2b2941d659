"""Evaluate one checkpoint on the test split: restored into a fresh model, on the devices of the run's strategy."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tasks import config, strategies
from tasks.data import prepared_data
from tasks.evaluation import gate, importance, predictions, slices
from tasks.modeling import losses, metrics, models
from tasks.records import (
    ClassMetrics,
    ColumnImportance,
    EvaluationResult,
    PreparedDataset,
    Target,
    TrainingResult,
    as_input,
)
from tasks.serving import outputs
from tasks.strategies import Strategy
from tasks.system.errors import StratagemError, UserError
from tasks.training import checkpoints, model_state
from tasks.training.checkpoints import Checkpoints, State

MAX_PREDICTIONS = 1000
"""Predictions that a record holds; a plot shows no more."""

log = logging.getLogger(__name__)


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, with_importance: bool = True
) -> EvaluationResult:
    """Return the loss, the task's metrics, the metrics of each class or label, and, for classes, the confusion matrix.

    The loss is defined as ``validation/loss``: the run's loss plus the model's own losses (regularisation), in float64;
    on JAX, in the precision of the training. Every example has weight 1, even if it had another in training.
    The run's folder keeps the model's outputs.

    Args:
        settings: ``model``, ``input``, ``evaluate``, ``strategy``, ``train.loss``, ``train.dtype_policy`` and the
            settings that name custom metrics are read. A checkpoint can be evaluated under any strategy, with the
            same metrics.
        with_importance: also measure how much the gate's metric depends on each column of a table.

    Raises:
        UserError: the checkpoint does not exist or belongs to another model, or an array is damaged.
        StratagemError: the model's outputs are not finite.
    """
    prepared_data.verify(prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = _strategy(settings)
    arrays, state = _restore(settings, training)
    if strategy.num_workers > 1:
        strategy.broadcast(checkpoints.pack(arrays, state))
    found = outputs.compute(settings, prepared, strategy, arrays)
    labels, values, target = found.labels, found.values, prepared.target
    if not np.isfinite(values).all():
        raise StratagemError(
            f"checkpoint {state.step} of run {training.run_id} gives outputs that are not finite numbers: its training "
            "diverged. Train again with a lower schedule.learning_rate, or evaluate an earlier checkpoint"
        )
    example_losses = losses.of_examples(losses.find_loss(settings.train, prepared), labels, values)
    measured = {"loss": float(example_losses.mean() + found.own_losses.mean())}
    measured |= metrics.compute(target.task, labels, values, metrics.without_file(settings))
    pairs: Any = (
        np.column_stack([labels[:MAX_PREDICTIONS, 0], values[:MAX_PREDICTIONS, 0]]) if not target.class_names else []
    )
    confusion = metrics.confusion(labels, values).tolist() if target.task == "classification" else []
    kept = Path(training.checkpoints).parent / "evaluation" / f"{state.step}.npz"
    sha256 = predictions.save(config.project_root() / kept, labels, values)
    return EvaluationResult(
        run_id=training.run_id,
        checkpoint=f"{training.checkpoints}/{state.step}",
        step=state.step,
        num_examples=len(labels),
        strategy=strategy.kind,
        examples_by_device=found.examples_by_device,
        metrics={f"test/{name}": value for name, value in measured.items()},
        lower_is_better=tuple(name for one in measured if metrics.better(name := f"test/{one}") == "lower"),
        classes=_by_class(target, labels, values),
        confusion_matrix=tuple(map(tuple, confusion)),
        predictions=tuple((float(wanted), float(given)) for wanted, given in pairs),
        importance=_importance(settings, prepared, arrays, labels) if with_importance else (),
        outputs=kept.as_posix(),
        outputs_sha256=sha256,
        test_rows=predictions.test_rows(prepared),
    )


def _by_class(target: Target, labels: Any, values: Any) -> tuple[ClassMetrics, ...]:
    """Return the metrics of each class or label; an empty tuple for a regression."""
    if not target.class_names:
        return ()
    counts = metrics.count_classes(labels, values)
    columns = counts.precision, counts.recall, counts.f1, counts.support
    return tuple(
        ClassMetrics(name=name, precision=float(p), recall=float(r), f1=float(f), support=int(n))
        for name, p, r, f, n in zip(target.class_names, *columns, strict=True)
    )


def _importance(
    settings: config.Settings, prepared: PreparedDataset, arrays: model_state.Arrays, labels: Any
) -> tuple[ColumnImportance, ...]:
    """Return how much the gate's metric depends on each column of a table; an empty tuple for other data."""
    if not importance.is_measured(prepared) or (test := slices.load(prepared)) is None:
        return ()
    model = models.build(settings.model, prepared, settings.input.normalization)
    model_state.assign(model, arrays, ("model",))
    model.jit_compile = keras.backend.backend() == "jax"  # On TensorFlow, XLA would take longer to compile than to run.

    def predict(features: Mapping[str, Any]) -> Any:
        tensors = {name: keras.ops.convert_to_tensor(array) for name, array in features.items()}
        return np.asarray(model.predict_on_batch(as_input(tensors)), np.float64)

    metric, of_predictions = gate.metric_of(settings, prepared)
    return importance.measure(test, labels, predict, metric, of_predictions, metrics.better(metric))


def assist(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Evaluate the share of a worker that is not the chief, from the chief's checkpoint, without writing files."""
    prepared_data.verify(prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = strategies.build(settings.strategy)
    arrays, _ = checkpoints.unpack(strategy.broadcast(b""))
    outputs.compute(settings, prepared, strategy, arrays)


def _restore(settings: config.Settings, training: TrainingResult) -> tuple[model_state.Arrays, State]:
    """Return the weights and the state of the checkpoint to evaluate."""
    folder = config.project_root() / training.checkpoints
    with Checkpoints(folder, monitor=settings.checkpoint.monitor, read_only=True) as saved:
        try:
            arrays, state = saved.restore(saved.find(settings.evaluate.checkpoint))
        except checkpoints.Damaged as error:
            raise UserError(
                f"{error}. Evaluate another one: `stratagem evaluate {training.run_id} "
                "--set evaluate.checkpoint=best`, or a step"
            ) from None
    return {key: array for key, array in arrays.items() if key.startswith("model/")}, state


def _strategy(settings: config.Settings) -> Strategy:
    """Return the run's strategy, or a single device if the settings ask for it or this machine lacks its devices."""
    if settings.evaluates_on_all_devices:
        try:
            return strategies.build(settings.strategy)
        except UserError as error:
            log.info("evaluating on one device: %s", error)
    return strategies.on_one_device()

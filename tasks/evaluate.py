"""Evaluate: one checkpoint, restored into a fresh model, over the test split, on the devices of the run's strategy."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from tasks import config, strategies
from tasks.evaluation import predictions
from tasks.input import sources
from tasks.modeling import losses, metrics, models
from tasks.records import ClassMetrics, EvaluationResult, PreparedDataset, Target, TrainingResult
from tasks.serving import outputs
from tasks.strategies import Strategy
from tasks.system.errors import StratagemError, UserError
from tasks.training import checkpoints, model_state
from tasks.training.checkpoints import Checkpoints, State

MAX_PREDICTIONS = 1000
"""That a record holds; a picture shows no more."""

log = logging.getLogger(__name__)


def evaluate(settings: config.Settings, prepared: PreparedDataset, training: TrainingResult) -> EvaluationResult:
    """Return the loss, the metrics of the task, and those of each class, or label; of classes the confusion matrix.

    The loss is what ``validation/loss`` is, the run's own with the model's own losses (regularisation), in float64.
    Examples count the same, whatever weights the training gave them. What the model gave for each of them is kept in
    the run's folder.

    Args:
        settings: ``model``, ``input``, ``evaluate``, ``strategy``, ``train.loss``, ``train.dtype_policy`` and what
            names a metric of the user's own are read. A checkpoint of any strategy is evaluated under any, and the
            metrics do not depend on which.
        prepared: the data.
        training: names the run and its checkpoints.

    Raises:
        UserError: no such checkpoint, or it is of another model; or a damaged array.
        StratagemError: the model's outputs are not numbers.
    """
    sources.verify(settings.input, prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = _strategy(settings)
    arrays, state = _restore(settings, training)
    if strategy.num_workers > 1:
        strategy.broadcast(checkpoints.pack(arrays, state))
    found = outputs.compute(settings, prepared, strategy, arrays)
    labels, values, target = found.labels, found.values, prepared.target
    if not np.isfinite(values).all():
        raise StratagemError(
            f"checkpoint {state.step} of run {training.run_id} gives outputs that are not numbers: its training "
            "diverged. Train again with a lower schedule.learning_rate, or evaluate an earlier checkpoint"
        )
    example_losses = losses.find_loss(settings.train, prepared).of_predictions(labels, values)
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
        outputs=kept.as_posix(),
        outputs_sha256=sha256,
        test_rows=predictions.test_rows(prepared),
    )


def _by_class(target: Target, labels: Any, values: Any) -> tuple[ClassMetrics, ...]:
    """Return the metrics of each class, or label; nothing for a regression."""
    if not target.class_names:
        return ()
    counts = metrics.count_classes(labels, values)
    columns = counts.precision, counts.recall, counts.f1, counts.support
    return tuple(
        ClassMetrics(name=name, precision=float(p), recall=float(r), f1=float(f), support=int(n))
        for name, p, r, f, n in zip(target.class_names, *columns, strict=True)
    )


def assist(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Compute the share of a worker that is not the chief, from the chief's checkpoint; nothing is written."""
    sources.verify(settings.input, prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = strategies.build(settings.strategy)
    arrays, _ = checkpoints.unpack(strategy.broadcast(b""))
    outputs.compute(settings, prepared, strategy, arrays)


def _restore(settings: config.Settings, training: TrainingResult) -> tuple[model_state.Arrays, State]:
    """Return the weights and the state of the checkpoint that is to be evaluated."""
    folder = config.project_root() / training.checkpoints
    with Checkpoints(folder, monitor=settings.checkpoint.monitor, read_only=True) as saved:
        try:
            arrays, state = saved.restore(saved.find(settings.evaluate.checkpoint))
        except checkpoints.Damaged as error:
            raise UserError(
                f"{error}. Evaluate another one: `stratagem evaluate --run {training.run_id} "
                "--set evaluate.checkpoint=best`, or a step"
            ) from None
    return {key: array for key, array in arrays.items() if key.startswith("model/")}, state


def _strategy(settings: config.Settings) -> Strategy:
    """Return the run's strategy; or one device, where that is asked for or this machine has not what it needs."""
    if settings.evaluate.has_runs_devices:
        try:
            return strategies.build(settings.strategy)
        except UserError as error:
            log.info("evaluated on one device: %s", error)
    return strategies.on_one_device()

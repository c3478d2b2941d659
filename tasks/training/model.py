"""Build, compile and restore the model to train."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from tasks import config, strategies
from tasks.input.batches import Batches
from tasks.modeling import losses, metrics, models, optimizers
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.strategies import Strategy
from tasks.system import files, upstream
from tasks.system.errors import UserError, listed, shown
from tasks.training import Phase, checkpoints, model_state, phase_at
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.model_state import Arrays
from tasks.training.position import Position


def build(
    settings: config.Settings, prepared: PreparedDataset, strategy: Strategy, batches: Batches, state: State
) -> tuple[Any, Any]:
    """Return the compiled model with all its variables, and its loss."""
    section, phase = settings.train, phase_at(settings, state.epoch)
    keras.utils.set_random_seed(section.seed)
    if section.deterministic and strategy.backend == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    with strategy.scope():
        model = models.build(settings.model, prepared, settings.input.normalization)
        scale = phase.rate_factor * section.rollback_factor**state.rollbacks
        epochs = phase.end_epoch - phase.first_epoch
        optimizer = optimizers.build(settings, batches.steps, batches.global_batch_size, scale, epochs)
        freeze(model, settings.model.freeze if phase.freezes else [])
        loss = compile_model(model, settings, prepared, optimizer)
        model.optimizer.build(model.trainable_variables)
        # Keras makes the variables of metrics and losses at first use, but a resumed epoch restores them before that.
        example = losses.example(prepared, 1)
        model.compute_loss(None, *example)
        model.compute_metrics(None, *example)
    strategy.check_model(model)  # The stage's `check` examined another copy.
    return model, loss


def freeze(model: Any, names: Sequence[re.Pattern[str]]) -> None:
    """Freeze every layer whose full name matches one of the regular expressions.

    Raises:
        UserError: an expression matches no layer with weights, or no trainable weights are left.
    """
    # Without the model itself: `conv.*` must not match the model convnet2.
    every = len(model.weights)
    layers = [layer for layer in upstream.layers_of(model) if 0 < len(layer.weights) < every]
    there = f"The layers with weights are: {listed(list(dict.fromkeys(layer.name for layer in reversed(layers))))}"
    for name in names:
        found = [layer for layer in layers if name.fullmatch(layer.name)]
        if not found:
            raise UserError(f"model.freeze: no layer's whole name matches '{name.pattern}'. {there}")
        for layer in found:
            layer.trainable = False
    if names and not model.trainable_variables:
        raise UserError(
            f"model.freeze = {shown([one.pattern for one in names])} leaves nothing to be trained. {there}; name fewer"
        )


def compile_model(model: Any, settings: config.Settings, prepared: PreparedDataset, optimizer: Any) -> Any:
    """Compile a model with the loss and the metrics of its task; return the loss."""
    section, mixes = settings.train, settings.input.augmentation.mixes
    loss = losses.find_loss(section, prepared, shares=mixes)
    measured = [
        metric.in_training(name, prepared.target)
        for name, metric in metrics.in_training(settings, prepared).items()
        if metric.in_training is not None
    ]
    if mixes:
        measured = [metrics.of_largest_share(metric, prepared.target.task) for metric in measured]
    model.compile(
        optimizer=optimizer,
        loss=loss,
        metrics=measured,
        # Only Keras' own functions read it; they are traced again for each different number of steps.
        steps_per_execution=1 if section.steps_per_execution == "auto" else section.steps_per_execution,
        # Keras' own "auto" compiles on the CPU too, where XLA makes a convnet 7 times slower. On JAX a
        # step that is not compiled runs one operation at a time. The custom loop compiles by itself.
        jit_compile=(section.jit_compile is True and section.loop == "fit") or keras.backend.backend() == "jax",
    )
    optimizer_is_own = ":" in settings.optimizer.kind + settings.schedule.kind
    if optimizer_is_own or not all(type(one).__module__.startswith("keras.") for one in (loss, *measured)):
        # An exported model would name this class, and could not be loaded where this project is not installed.
        upstream.forget_compilation(model)
    return loss


def restore(model: Any, arrays: Arrays, position: Position, phase: Phase) -> None:
    """Restore a model from a checkpoint or from initial weights, and keep the current learning rate and batch size.

    At the start of a phase the optimizer's state is not restored."""
    if position.epoch == phase.first_epoch > 0 == position.step_in_epoch:
        arrays = {key: array for key, array in arrays.items() if not key.startswith("optimizer/")}
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # Under mixed_float16.
    scheduled = isinstance(upstream.rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)
    rate = None if scheduled else float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    model_state.assign(model, arrays, tuple({key.partition("/")[0] for key in arrays} - {"metric"}))
    if rate is not None:
        optimizer.learning_rate = rate  # A constant rate is a variable; a rollback lowers it.
    if position.offset:
        upstream.steps_of(optimizer).assign(position.step - phase.first_epoch * position.batches.steps)  # A schedule's.


def alone(
    settings: config.Settings, prepared: PreparedDataset, batches: Batches, start: State, saved: Checkpoints
) -> Any:
    """Return the model of the newest checkpoint in the memory of this process's host, independently of other processes.

    In a training that is one program over several processes, no process can change or fully read a variable alone.
    ``start``, the state at which the training began, determines the optimizer's phase.
    """
    arrays, _ = saved.restore_latest()
    strategy = replace(strategies.on_one_device(), backend="jax")
    with models.in_host_memory():
        copy, _ = build(settings, prepared, strategy, batches, start)
        model_state.assign(copy, arrays, model_state.GROUPS)
    return copy


def weights_digest(model: Any) -> str:
    """Return the digest of a model's current weights."""
    return lineage.weights_digest(list(model_state.snapshot(model, ("model",)).items()))


def save_best_model(model: Any, saved: Checkpoints, final_step: int, final_model: Path) -> tuple[int, Path]:
    """Write ``best.keras``, the model at its best step, and return the step and the file.

    The given model then holds these weights."""
    path = final_model.with_name("best.keras")
    if saved.find("best") == final_step:
        with files.replacing(path) as temporary:
            shutil.copyfile(final_model, temporary)
        return final_step, path
    arrays, state = saved.restore_best()
    model_state.assign(model, arrays, ("model",))
    return state.step, checkpoints.save_model(model, path)

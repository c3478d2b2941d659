"""Train: prepared data -> input pipeline -> strategy scope -> loop -> checkpoints and exported models."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from filelock import FileLock, Timeout

from tasks import checkpoints, config, datasets, input_pipeline, lineage, loops, models, schedules, strategies
from tasks.checkpoints import Checkpoints, State
from tasks.errors import UserError
from tasks.progress import ProgressBar
from tasks.records import PreparedDataset, Run, TrainingResult

log = logging.getLogger(__name__)

# What a resumed run may change: how long, where and how fast it trains and what becomes of it, not what it learns from.
MAY_CHANGE = (
    "checkpoint.", "dataset.downloads", "evaluate.", "input.cache", "input.prefetch", "register.", "strategy.",
    "tracking.", "train.deterministic", "train.early_stopping", "train.epochs", "train.global_batch_size",
    "train.jit_compile", "train.per_replica_batch_size", "train.steps_per_execution", "train.tensorboard",
)  # fmt: skip


def check(settings: config.Settings, prepared: PreparedDataset) -> tuple[strategies.Strategy, int]:
    """Refuse what cannot be trained, before a run exists; return the strategy and the global batch size.

    Raises:
        UserError: damaged arrays; or data, batch, devices or model do not fit the settings.
    """
    datasets.verify(prepared)
    strategy = strategies.build(settings.strategy)
    global_batch_size = find_global_batch_size(settings.train, strategy.num_replicas)
    _, rows = input_pipeline.carve(prepared, settings.input.validation, settings.train.seed)["train"]
    input_pipeline.check_batch(global_batch_size, len(rows), prepared)
    models.build(settings.model, prepared, settings.input.normalization)
    return strategy, global_batch_size


def train(
    settings: config.Settings, prepared: PreparedDataset, run: Run, send: loops.MetricSink, resume: bool = False
) -> TrainingResult:
    """Train the model of the settings and leave checkpoints, ``final.keras`` and ``best.keras`` in the run's folder.

    Args:
        settings: everything but ``evaluate``, ``register`` and ``tracking`` is read.
        prepared: the data; its arrays are checked against their sha256 first.
        run: names the folder.
        send: takes (step, metrics) after each epoch; it must not block.
        resume: carry on from the run's latest checkpoint instead of starting anew.

    Raises:
        UserError: data, batch, devices or checkpoint do not fit the settings; nothing was trained.
    """
    section = settings.train
    if resume:
        _refuse_other_training(settings, prepared, run)
    strategy, global_batch_size = check(settings, prepared)
    keras.utils.set_random_seed(section.seed)
    if section.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(section.dtype_policy)

    training = input_pipeline.training(settings, prepared, global_batch_size, strategy.num_replicas)
    validation = None
    if settings.input.validation is not None:
        validation = input_pipeline.ordered(settings, prepared, "validation", global_batch_size, strategy.num_replicas)

    with strategy.scope():
        model = models.build(settings.model, prepared, settings.input.normalization)
        compile_model(model, settings, schedules.optimizer(settings, training.steps, global_batch_size))
        model.optimizer.build(model.trainable_variables)
        # Metrics are made at the first use, and a resumed epoch needs theirs before.
        model.compute_metrics(None, tf.zeros([1], tf.int64), tf.zeros([1, prepared.num_classes]))
    log.info("strategy  %s", strategy.describe())
    log.info("model     %s, %s parameters", settings.model.name, f"{model.count_params():,}")

    folder = config.project_root() / run.folder
    with (
        _lock(run, folder),
        Checkpoints(folder / "checkpoints", settings.checkpoint.keep, settings.checkpoint.monitor) as saved,
    ):
        start, arrays = _start(settings, prepared, model, saved, global_batch_size, resume)
        position = loops.Position(training, start)
        throughput = loops.Throughput(position)
        stopping = loops.EarlyStopping(section.early_stopping, start.stopping) if section.early_stopping else None
        saving = loops.SaveCheckpoints(
            saved,
            position,
            stopping,
            settings.checkpoint.every_epochs,
            settings.checkpoint.every_steps,
            metric_values=lambda: checkpoints.assign(model, arrays, ("metric",)),
        )
        callbacks = [position, throughput, loops.SendMetrics(send, position)]
        callbacks += [stopping] if stopping else []
        bar = ProgressBar(section.epochs, training.steps)
        callbacks += [saving, bar]
        if section.tensorboard:
            callbacks.append(keras.callbacks.TensorBoard(folder / "tensorboard", write_graph=False))

        try:
            if stopping is None or not stopping.over:
                loops.fit(model, strategy, training, validation, section.epochs, start, callbacks)
        finally:
            bar.close()
            training.close()
            if validation is not None:
                validation.close()

        final_step, best_step = saved.find("latest"), saved.find("best")
        digest = _weights_digest(model)
        final_model = checkpoints.export(model, folder / "models" / "final.keras")
        best_model = _export_best(model, saved, best_step, final_step, final_model)
        best_digest = _weights_digest(model)

    return TrainingResult(
        run_id=run.run_id,
        dataset=prepared.name,
        strategy=strategy.kind,
        loop=section.loop,
        num_replicas=strategy.num_replicas,
        devices=strategy.devices,
        global_batch_size=global_batch_size,
        epochs=position.epoch,
        steps=position.step,
        num_parameters=model.count_params(),
        examples_per_second=throughput.examples_per_second,
        history={name: tuple(values) for name, values in position.history.items()},
        stopped_early=position.epoch < section.epochs,
        checkpoints=f"{run.folder}/checkpoints",
        checkpoint=f"{run.folder}/checkpoints/{final_step}",
        best_checkpoint=f"{run.folder}/checkpoints/{best_step}",
        final_model=f"{run.folder}/models/{final_model.name}",
        best_model=f"{run.folder}/models/{best_model.name}",
        weights_digest=digest,
        best_weights_digest=best_digest,
    )


def find_global_batch_size(section: config.Train, num_replicas: int) -> int:
    """Return the examples in one step of all replicas together.

    Raises:
        UserError: ``global_batch_size`` does not divide by the replicas.
    """
    if section.per_replica_batch_size is not None:
        return section.per_replica_batch_size * num_replicas
    size = section.global_batch_size or 0
    if size % num_replicas:
        lower = size - size % num_replicas
        raise UserError(
            f"train.global_batch_size = {size} does not divide by {num_replicas} replicas: {size} = {num_replicas} * "
            f"{size // num_replicas} + {size % num_replicas}. Give {lower or num_replicas} or {lower + num_replicas}, "
            "or train.per_replica_batch_size instead"
        )
    return size


def compile_model(model: Any, settings: config.Settings, optimizer: Any) -> None:
    """Compile a classifier that ends in logits: sparse categorical cross-entropy and accuracy."""
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        steps_per_execution=settings.train.steps_per_execution,
        # Keras' own "auto" compiles on the CPU too, where XLA makes convolutions four to five times slower.
        jit_compile=settings.train.jit_compile,
    )


@contextlib.contextmanager
def _lock(run: Run, folder: Path) -> Iterator[None]:
    """Keep a second process from training the same run; the lock of a process that died is free."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"run {run.run_id} is being trained by another process: wait for it, or name another run"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _refuse_other_training(settings: config.Settings, prepared: PreparedDataset, run: Run) -> None:
    """Raise ``UserError`` when a run is to be resumed with settings or data that make it another training."""
    before = config.parse(run.settings).flat() | {"data version": run.lineage.data_version}
    now = settings.flat() | {"data version": prepared.data_version}
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(MAY_CHANGE)
    ]
    if changed:
        raise UserError(
            f"run {run.run_id} cannot be resumed as another training: {'; '.join(changed)}. "
            "Give the settings that it was started with, or start a new run"
        )


def _start(
    settings: config.Settings,
    prepared: PreparedDataset,
    model: Any,
    saved: Checkpoints,
    global_batch_size: int,
    resume: bool,
) -> tuple[State, checkpoints.Arrays]:
    """Return where to start; a resume gives the model its latest checkpoint."""
    if not resume:
        state = State(
            step=0,
            epoch=0,
            step_in_epoch=0,
            global_batch_size=global_batch_size,
            seed=settings.train.seed,
            settings_digest=settings.digest(),
            data_version=prepared.data_version,
            history={},
        )
        return state, {}
    arrays, state = saved.restore(saved.find("latest"))
    if state.global_batch_size != global_batch_size:
        raise UserError(
            f"the run was started with {state.global_batch_size} examples a step of all replicas, and these settings "
            f"give {global_batch_size}: resume it with train.global_batch_size={state.global_batch_size}"
        )
    checkpoints.assign(model, arrays, ("model", "seed", "optimizer"))
    log.info("resuming at step %d, epoch %d", state.step, state.epoch + 1)
    return state, arrays


def _weights_digest(model: Any) -> str:
    weights = [(key, array) for key, array in checkpoints.snapshot(model).items() if key.startswith("model/")]
    return lineage.weights_digest(weights)


def _export_best(model: Any, saved: Checkpoints, best_step: int, final_step: int, final_model: Path) -> Path:
    """Write ``best.keras``: the model as it was at ``best_step``. The model itself ends up holding those weights."""
    path = final_model.with_name("best.keras")
    if best_step == final_step:
        return checkpoints.copy(final_model, path)
    arrays, _ = saved.restore(best_step)
    checkpoints.assign(model, arrays, ("model",))
    return checkpoints.export(model, path)

"""Train: prepared data -> input pipeline -> strategy scope -> loop -> checkpoints and exported models."""

import contextlib
import json
import logging
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import keras
from filelock import FileLock, Timeout

from tasks import config, records, runs, strategies
from tasks.input import sources
from tasks.input.augment import check_augmentation
from tasks.input.order import carve
from tasks.modeling import losses, metrics, models, optimizers
from tasks.records import Limits, Placement, PreparedDataset, Run, TrainingResult
from tasks.runs import lineage
from tasks.system import machine
from tasks.system.errors import StratagemError, UserError, one_line
from tasks.training import Training, autotune, checkpoints, initial, loops, model, setup, shards, step_time
from tasks.training.callbacks.profiler import Profiler
from tasks.training.callbacks.progress import MetricSink, ProgressBar, SendMetrics, Throughput
from tasks.training.callbacks.saving import SaveCheckpoints
from tasks.training.callbacks.stopping import NonFiniteLoss, ResumableEarlyStopping, StopBelowLimits, StopOnNonFinite
from tasks.training.checkpoints import Checkpoints
from tasks.training.model_state import Arrays, assign, variables

log = logging.getLogger(__name__)

DYING_SECONDS = 30.0
"""How long the process of a killed command may take to end, and keep its run's lock."""
COMMON_PACKAGES = ("tensorflow", "keras", "jax", "numpy")
"""All members of a cluster need the same versions: TensorFlow's protocol and kernels, and what draws the batches."""


class ChiefsCallbacks(NamedTuple):
    """The callbacks that only the chief has: they measure, show and track a training."""

    profiler: Profiler | None = None
    throughput: Throughput | None = None
    metrics: SendMetrics | None = None
    bar: ProgressBar | None = None
    limits: StopBelowLimits | None = None
    tensorboard: Any = None


def check(settings: config.Settings, prepared: PreparedDataset) -> tuple[strategies.Strategy, int]:
    """Refuse what cannot be trained, before a run exists; return the strategy and the global batch size.

    Args:
        settings: of the run.
        prepared: its data.

    Raises:
        UserError: damaged arrays; or data, batch, devices or model do not fit the settings.
    """
    sources.verify(settings.input, prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = strategies.build(settings.strategy)
    global_batch_size = setup.find_global_batch_size(settings.train, strategy.num_replicas)
    sources.check_division(settings.input.validation, prepared)
    sources.check_class_weights(settings.train, prepared)
    _, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    sources.check_batch(global_batch_size, len(rows), prepared)
    check_augmentation(settings.input.augmentation, prepared)
    with model.in_host_memory():
        looked_at = models.build(settings.model, prepared, settings.input.normalization)
        losses.find_loss(settings.train, prepared, shares=settings.input.augmentation.mixes)
        metrics.check(settings, prepared, losses.example(prepared, 2))
    strategy.check_model(looked_at)
    setup.check_last_batch(looked_at, strategy, settings.input, len(rows), global_batch_size)
    model.freeze(looked_at, settings.model.freeze)
    return strategy, global_batch_size


def train(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    send: MetricSink,
    stop: threading.Event | None = None,
) -> TrainingResult:
    """Train the model of the settings and leave checkpoints, ``final.keras`` and ``best.keras`` in the run's folder.

    A run that has checkpoints is resumed from the latest one.

    Args:
        settings: everything but ``evaluate``, ``register`` and ``tracking`` is read.
        prepared: the data; its arrays are checked against their sha256 first.
        run: names the folder.
        send: takes (step, metrics) after each epoch; it must not block.
        stop: when it is set, the training saves a checkpoint after its next step and ends.

    Raises:
        Interrupted: ``stop`` was set.
        NonFiniteLoss: the loss was not a finite number, and no rollback is left.
        UserError: data, batch, devices or checkpoint do not fit the settings; nothing was trained.
        StratagemError: a checkpoint could not be written.
    """
    began, gone_back_to = time.perf_counter(), None
    while True:
        try:
            result = _train(settings, prepared, run, send, stop or threading.Event(), began)
            if result is not None:
                return result
            began = time.perf_counter()
        except NonFiniteLoss as error:
            before = runs.nonfinite_steps(run)
            runs.mark_nonfinite(run, error.step)
            if not _rolls_back(settings.train, len(before)):
                raise
            saved = Checkpoints(config.project_root() / run.folder / "checkpoints", read_only=True)
            if saved.steps()[-1:] == [gone_back_to]:
                saved.set_aside(saved.steps()[-1])  # Its weights are finite, and too large: it led here again.
            saved.set_aside_nonfinite()
            gone_back_to = next(reversed(saved.steps()), None)
            log.warning(
                "%s. Back to the last checkpoint, with %g times the learning rate, rollback %d of %d",
                error,
                settings.train.rollback_factor ** (len(before) + 1),
                len(before) + 1,
                settings.train.max_rollbacks,
            )


def _train(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    send: MetricSink,
    stop: threading.Event,
    began: float,
) -> TrainingResult | None:
    """Train until the end, or until the loss is not a finite number, or until layers are to be thawed: then None."""
    strategy, global_batch_size = check(settings, prepared)
    folder = config.project_root() / run.folder
    with contextlib.ExitStack() as opened:
        _lock(run, folder, opened)
        saved = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, settings.checkpoint.monitor)
        opened.enter_context(saved)
        if begun := bool(saved.steps()):
            arrays, state = saved.restore_latest()
            log.info("resuming at step %d, epoch %d", state.step, state.epoch + 1)
            global_batch_size = setup.resumed_batch_size(settings.train, state, strategy.num_replicas)
        else:
            arrays = initial.load(settings, prepared, folder)
            state = setup.first_state(settings, prepared, global_batch_size)
        state = state.model_copy(update=_origin(settings, prepared, run))
        if strategy.num_workers > 1:
            strategy.broadcast(_in_common(settings, prepared))
        data = setup.find_batches(settings, prepared, strategy, global_batch_size)
        for batches in data:
            opened.enter_context(_closing(batches))
        state = setup.in_batches_of(state, global_batch_size, data[0].steps)
        if strategy.num_workers > 1:
            strategy.broadcast(checkpoints.pack(arrays, state))

        training = setup.build(settings, prepared, strategy, data, state, arrays)
        training = autotune.choose_compiler(training, folder / "records" / "tuning.json", begun)
        if _is_in_pieces(training):
            opened.enter_context(shards.marked(saved.folder, saved.attempt))
            strategy.broadcast(json.dumps([str(saved.folder), saved.attempt]).encode())
            saved.num_writers = strategy.num_workers
        placement = strategy.placement_of(training.model)
        records.save(placement, folder / "records" / "placement.json")
        _log_summary(training, placement)

        compiles_each_size = strategy.backend == "tensorflow" and training.settings.train.jit_compile is True
        throughput = Throughput(training.position, began, compiles_each_size)
        chiefs = _chiefs_callbacks(training, throughput, send, folder / "tensorboard", runs.load_limits(run))
        training = replace(training, callbacks=_callbacks(training, arrays, saved, stop, chiefs))
        del arrays  # As large as the model and its optimizer, all training long.
        with _closing(chiefs.bar), chiefs.profiler or contextlib.nullcontext():
            loops.run(training)
        if loops.thaws(training):
            return None
        return _traced(_result(training, prepared, run, saved, throughput), training, stop)


def assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event | None = None) -> None:
    """Train as a worker that is not the chief: the same steps, from the chief's checkpoint; nothing is written.

    Raises:
        Interrupted: ``stop`` of any worker was set.
        NonFiniteLoss: as the chief's.
        UserError: data, batch, devices or model do not fit the settings, or settings or data are not the chief's.
    """
    while True:
        try:
            if not _assist(settings, prepared, stop or threading.Event()):
                return
        except NonFiniteLoss as error:
            if not _rolls_back(settings.train, error.start.rollbacks):
                raise


def _assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event) -> bool:
    """Train with the chief until the end, until the loss is not finite, or until layers are to be thawed: then return
    True."""
    strategy, _ = check(settings, prepared)
    # Before the model is made, for which workers with other settings would wait for each other.
    _refuse_other(_in_common(settings, prepared), strategy.broadcast(b""), strategy.worker)
    arrays, state = checkpoints.unpack(strategy.broadcast(b""))
    data = setup.find_batches(settings, prepared, strategy, state.global_batch_size)
    with contextlib.ExitStack() as opened:
        for batches in data:
            opened.enter_context(_closing(batches))
        training = setup.build(settings, prepared, strategy, data, state, arrays)
        writer = None
        if _is_in_pieces(training):
            folder, attempt = json.loads(strategy.broadcast(b""))
            writer = opened.enter_context(shards.ShardWriter(Path(folder), attempt, strategy.worker))
        training = replace(training, callbacks=_callbacks(training, arrays, writer, stop, ChiefsCallbacks()))
        del arrays
        loops.run(training)
        if loops.thaws(training):
            return True
        step_time.measure_step_time(training, stop)
        return False


def _callbacks(
    training: Training,
    arrays: Arrays,
    saved: Checkpoints | shards.ShardWriter | None,
    stop: threading.Event,
    chiefs: ChiefsCallbacks,
) -> tuple[Any, ...]:
    """Return a training's callbacks in the order in which they are called.

    A worker has none of the chief's, and ``saved`` only for its part of a model that no single process holds.
    """
    section, position = training.settings.train, training.position
    remembered = position.start.stopping
    stopping = ResumableEarlyStopping(section.early_stopping, remembered, position) if section.early_stopping else None
    metrics = {key: array for key, array in arrays.items() if key.startswith("metric/")}

    def restore_metrics() -> None:
        assign(training.model, metrics, ("metric",))

    callbacks = [
        position,  # It moves on first: all that follow ask it where the training is.
        StopOnNonFinite(position),  # Before all that look at the loss: nothing that came of a bad one is sent or saved.
        chiefs.profiler,  # Before the throughput, which leaves the profiler's own work out.
        chiefs.throughput,  # Before the checkpoint of an epoch's end, whose time is not the epoch's.
        chiefs.metrics,
        stopping,  # Before the checkpoint, which holds what it remembers.
        chiefs.limits,
        SaveCheckpoints(training, saved, stopping, restore_metrics, stop),
        chiefs.bar,
        chiefs.tensorboard,
    ]
    return tuple(callback for callback in callbacks if callback is not None)


def _chiefs_callbacks(
    training: Training, throughput: Throughput, send: MetricSink, folder: Path, limits: Limits | None
) -> ChiefsCallbacks:
    section, position = training.settings.train, training.position
    profiler = None
    if section.profile_steps is not None:
        first, last = section.profile_steps
        profiler = Profiler(position, first, last, folder, send)
    return ChiefsCallbacks(
        profiler,
        throughput,
        SendMetrics(send, position),
        ProgressBar(section.epochs, training.batches.steps) if log.isEnabledFor(logging.INFO) else None,
        keras.callbacks.TensorBoard(folder, write_graph=False) if section.tensorboard else None,
        StopBelowLimits(limits, position) if limits is not None else None,
    )


def _is_in_pieces(training: Training) -> bool:
    """Return whether no one process holds the model."""
    return any(shards.in_pieces(variable.value) for variable in variables(training.model).values())


def _origin(settings: config.Settings, prepared: PreparedDataset, run: Run) -> dict[str, Any]:
    """Return what a checkpoint says about the training that writes it, which may have other settings than the first."""
    rollbacks = len(runs.nonfinite_steps(run)) if settings.train.on_nonfinite == "rollback" else 0
    return {
        "seed": settings.train.seed,
        "settings_digest": settings.digest(),
        "data_version": prepared.data_version,
        "rollbacks": rollbacks,
    }


def _log_summary(training: Training, placement: Placement) -> None:
    num_bytes = sum(variable.bytes_per_device for variable in placement.variables)
    ways = Counter(variable.sharding for variable in placement.variables)
    spread = ", ".join(f"{count} {way}" for way, count in ways.most_common())
    strategy, name = training.strategy, training.settings.model.name
    log.info("strategy  %s", strategy.describe())
    log.info("variables %s; %s MB a device; gradients: %s", spread, f"{num_bytes / 1e6:,.1f}", strategy.collectives)
    log.info("model     %s, %s parameters", name, f"{training.model.count_params():,}")
    if training.settings.model.freeze:
        trained = sum(math.prod(variable.shape) for variable in training.model.trainable_variables)
        frozen, phase = ", ".join(training.settings.model.freeze), training.phase
        if phase.freezes:
            log.info("frozen    %s; %s parameters are trained", frozen, f"{trained:,}")
        else:
            log.info("thawed    %s; learning rates are multiplied with %g", frozen, phase.rate_factor)


def _closing(opened: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.closing(opened) if opened is not None else contextlib.nullcontext()


def _lock(run: Run, folder: Path, opened: contextlib.ExitStack) -> None:
    """Keep a second process from training the same run; the lock of a process that died is free."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        opened.enter_context(FileLock(folder / ".lock", timeout=DYING_SECONDS))
    except Timeout:
        raise UserError(
            f"run {run.run_id} is being trained by another process: wait for it, or name another run"
        ) from None


def _in_common(settings: config.Settings, prepared: PreparedDataset) -> bytes:
    """Return what every member of a cluster must have in common, as JSON: names to words."""
    versions = {name: text for name, text in machine.surroundings().items() if name in COMMON_PACKAGES}
    common = {
        "settings": settings.digest("result", "speed"),
        "data": str(prepared.data_version),
        "code": lineage.code_of(settings)[:12],
        **versions,
    }
    return json.dumps(common).encode()


def _refuse_other(own: bytes, chiefs: bytes, worker: int) -> None:
    """Raise ``UserError`` in a worker that was started with something else than the chief, and name each thing."""
    mine, theirs = json.loads(own), json.loads(chiefs)
    other = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not other:
        return
    own_words, chiefs_words = (
        ", ".join(f"{name} {one.get(name, 'not installed')}" for name in other) for one in (mine, theirs)
    )
    raise UserError(
        f"worker {worker} was started with {own_words}, and the chief with {chiefs_words}: give every member of the "
        "cluster the same command, the same code and packages, and the same data"
    )


def _rolls_back(section: config.Train, rollbacks: int) -> bool:
    return section.on_nonfinite == "rollback" and rollbacks < section.max_rollbacks


def _result(
    training: Training, prepared: PreparedDataset, run: Run, saved: Checkpoints, throughput: Throughput
) -> TrainingResult:
    """Export the final and the best model, and return the record of a training that is over."""
    strategy, position, section = training.strategy, training.position, training.settings.train
    models_folder = config.project_root() / run.folder / "models"
    final_step = saved.find("latest")
    trained = training.model
    if strategy.is_one_program:
        trained = model.alone(training.settings, prepared, training.batches, position.start, saved)
    digest = model.weights_digest(trained)
    final_model = checkpoints.save_model(trained, models_folder / "final.keras")
    best_step, best_model = model.save_best_model(trained, saved, final_step, final_model)
    return TrainingResult(
        run_id=run.run_id,
        dataset=prepared.name,
        strategy=strategy.kind,
        loop=section.loop,
        num_replicas=strategy.num_replicas,
        devices=strategy.devices,
        global_batch_size=training.batches.global_batch_size,
        epochs=position.epoch,
        steps=position.step + position.offset,
        num_parameters=trained.count_params(),
        optimizer=optimizers.class_name(training.model.optimizer),
        examples_per_second=throughput.examples_per_second,
        setup_seconds=throughput.setup_seconds,
        first_call_seconds=throughput.first_call_seconds,
        epoch_seconds=tuple(throughput.epoch_seconds),
        history={name: tuple(values) for name, values in position.history.items()},
        stopped_early=position.epoch < section.epochs,
        checkpoints=f"{run.folder}/checkpoints",
        checkpoint=f"{run.folder}/checkpoints/{final_step}",
        best_checkpoint=f"{run.folder}/checkpoints/{best_step}",
        final_model=f"{run.folder}/models/{final_model.name}",
        best_model=f"{run.folder}/models/{best_model.name}",
        weights_digest=digest,
        best_weights_digest=model.weights_digest(trained),
        nonfinite_steps=runs.nonfinite_steps(run),
    )


def _traced(result: TrainingResult, training: Training, stop: threading.Event) -> TrainingResult:
    """Return the record with where a step's time goes, if that is asked for."""
    if training.settings.train.traced_steps is None:
        return result
    began = time.perf_counter()
    try:
        found = step_time.measure_step_time(training, stop)
    except StratagemError:
        raise
    except Exception as error:
        if training.strategy.num_workers > 1:
            raise  # The other workers wait for this one's part: a restart alone ends that.
        log.warning("where a step's time goes is not known (%s): the training is whole", one_line(error))
        found = None
    if found is not None:
        log.info("a step    %s", ", ".join(f"{name} {value:.2f} ms" for name, value in found.parts.items()))
    return result.model_copy(update={"step_time": found, "traced_seconds": time.perf_counter() - began})

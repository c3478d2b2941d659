"""Train: prepared data -> input pipeline -> strategy scope -> loop -> checkpoints and exported models."""

import contextlib
import json
import logging
import math
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
from filelock import FileLock, Timeout

from tasks import config, records, strategies
from tasks.data import prepared_data
from tasks.input import sources
from tasks.input.augment import check_augmentation
from tasks.input.batches import Batches
from tasks.input.order import carve
from tasks.modeling import losses, metrics, models, optimizers
from tasks.records import Limits, NonFinite, Placement, PreparedDataset, Run, TrainingResult
from tasks.runs import lineage, outcome
from tasks.system import machine, units
from tasks.system.errors import StratagemError, UserError, one_line
from tasks.tracking import trained_models
from tasks.training import Training, autotune, checkpoints, initial, loops, model, setup
from tasks.training.callbacks import own as own_callbacks
from tasks.training.callbacks.progress import MetricSink, ProgressBar, SendMetrics, Throughput
from tasks.training.callbacks.saving import SaveCheckpoints
from tasks.training.callbacks.stopping import NonFiniteLoss, ResumableEarlyStopping, StopBelowLimits, StopOnNonFinite
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.model_state import Arrays, assign

log = logging.getLogger(__name__)

DYING_SECONDS = 30.0
"""How long the process of a killed command may take to end and release its run's lock."""


def check(settings: config.Settings, prepared: PreparedDataset) -> tuple[strategies.Strategy, int]:
    """Check that the settings can be trained, before a run exists; return the strategy and the global batch size.

    Raises:
        UserError: arrays are damaged, or data, batch, devices or model do not fit the settings.
    """
    prepared_data.verify(prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = strategies.build(settings.strategy)
    global_batch_size = setup.find_global_batch_size(settings.train, strategy.num_replicas)
    sources.check_division(settings.input.validation, prepared)
    sources.check_class_weights(settings.train, prepared)
    _, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    sources.check_batch(global_batch_size, len(rows), prepared)
    check_augmentation(settings.input.augmentation, prepared)
    with models.in_host_memory():
        looked_at = models.build(settings.model, prepared, settings.input.normalization)
        losses.find_loss(settings.train, prepared, shares=settings.input.augmentation.mixes)
        metrics.check(settings, prepared, losses.example(prepared, 2))
        section, length = settings.input, settings.train.steps_per_epoch
        steps = Batches(len(rows), global_batch_size, section.drop_remainder, length).steps
        optimizers.check(settings, steps, global_batch_size)
        own_callbacks.make(settings.train)
        if ":" in settings.model.name and settings.register_.enabled:
            models.check_loadable(settings.model.name, looked_at)
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
    """Train the configured model and write checkpoints, ``final.keras`` and ``best.keras`` to the run's folder.

    If the run has checkpoints, training resumes from the latest one.

    Args:
        settings: all sections except ``evaluate``, ``register`` and ``tracking`` are read.
        prepared: the data; its arrays are checked against their sha256 first.
        send: receives (step, metrics) after each epoch; it must not block.
        stop: once it is set, the training saves a checkpoint after its next step and ends.

    Raises:
        Interrupted: ``stop`` was set.
        NonFiniteLoss: the loss was not finite, and no rollback is left.
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
            before = outcome.nonfinite_steps(run)
            outcome.save(run, NonFinite(steps=(*before, error.step)))
            if not _rolls_back(settings.train, len(before)):
                raise
            saved = Checkpoints(config.project_root() / run.folder / "checkpoints", read_only=True)
            if saved.steps()[-1:] == [gone_back_to]:
                saved.set_aside(saved.steps()[-1])  # Its weights are finite but too large: it led here again.
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
    """Train to the end and return the result, or return None when frozen layers are to be unfrozen."""
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
            state = State(global_batch_size=global_batch_size)
        state = state.model_copy(update=_origin(settings, prepared, run))
        if strategy.num_workers > 1:
            strategy.broadcast(_in_common(settings, prepared))
        data = setup.find_batches(settings, prepared, strategy, global_batch_size)
        for batches in filter(None, data):
            opened.callback(batches.close)
        state = setup.in_batches_of(state, global_batch_size, data[0].steps)
        if strategy.num_workers > 1:
            strategy.broadcast(checkpoints.pack(arrays, state))

        training = setup.build(settings, prepared, strategy, data, state, arrays)
        training = autotune.choose_compiler(training, begun)
        placement = strategy.placement_of(training.model)
        records.save(placement, folder / "records" / "placement.json")
        _log_summary(training, placement)

        compiles_each_size = strategy.backend == "tensorflow" and training.settings.train.jit_compile is True
        throughput = Throughput(training.position, began, compiles_each_size)
        section, limits, board = settings.train, outcome.load(run, Limits), folder / "tensorboard"
        bar = ProgressBar(section.epochs, training.batches.steps) if log.isEnabledFor(logging.INFO) else None
        if bar is not None:
            opened.callback(bar.close)
        callbacks = _callbacks(
            training,
            arrays,
            saved,
            stop,
            timing=(throughput,),
            tracking=(SendMetrics(send, training.position), limits and StopBelowLimits(limits, training.position)),
            showing=(bar, section.tensorboard and keras.callbacks.TensorBoard(board, write_graph=False)),
        )
        training = replace(training, callbacks=callbacks)
        own_callbacks.log_forgetful(training.callbacks)
        del arrays  # They are as large as the model and its optimizer.
        loops.run(training)
        if loops.thaws(training):
            return None
        return _traced(_result(training, prepared, run, saved, throughput), training, stop, board)


def assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event | None = None) -> None:
    """Train as a worker that is not the chief: do the same steps from the chief's checkpoint, without writing files.

    Raises:
        Interrupted: ``stop`` was set on any worker.
        NonFiniteLoss: as on the chief.
        UserError: data, batch, devices or model do not fit the settings, or settings or data differ from the chief's.
    """
    while True:
        try:
            if not _assist(settings, prepared, stop or threading.Event()):
                return
        except NonFiniteLoss as error:
            if not _rolls_back(settings.train, error.start.rollbacks):
                raise


def _assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event) -> bool:
    """Train with the chief to the end; return whether frozen layers are to be unfrozen and training continues."""
    strategy, _ = check(settings, prepared)
    # Before building the model: workers with different settings would wait for each other there.
    _refuse_other(_in_common(settings, prepared), strategy.broadcast(b""), strategy.worker)
    arrays, state = checkpoints.unpack(strategy.broadcast(b""))
    data = setup.find_batches(settings, prepared, strategy, state.global_batch_size)
    with contextlib.ExitStack() as opened:
        for batches in filter(None, data):
            opened.callback(batches.close)
        training = setup.build(settings, prepared, strategy, data, state, arrays)
        training = replace(training, callbacks=_callbacks(training, arrays, None, stop))
        del arrays
        loops.run(training)
        if loops.thaws(training):
            return True
        if settings.train.traced_steps is not None:
            from tasks.training import step_time

            step_time.measure_step_time(training, stop, config.project_root())
        return False


def _callbacks(
    training: Training,
    arrays: Arrays,
    saved: Checkpoints | None,
    stop: threading.Event,
    timing: Sequence[Any] = (),
    tracking: Sequence[Any] = (),
    showing: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Return a training's callbacks in the order in which they are called.

    Only the chief has checkpoints, and callbacks for timing, tracking and display. Values that are not callbacks, such
    as None, are dropped.
    """
    section, position = training.settings.train, training.position
    stopping = [ResumableEarlyStopping(section.early_stopping, position)] if section.early_stopping else []
    own = [own_callbacks.OwnCallback(name, made, training) for name, made in own_callbacks.make(section).items()]
    metrics = {key: array for key, array in arrays.items() if key.startswith("metric/")}

    def restore_metrics() -> None:
        assign(training.model, metrics, ("metric",))

    callbacks = [
        position,  # First, because the others read the current step from it.
        StopOnNonFinite(position),  # Before those that send or save results: none may come from a non-finite loss.
        *timing,  # Before the checkpoint at an epoch's end, whose time must not count.
        *own,  # Before those that report an epoch's metrics, to which the user's callbacks may add.
        *tracking,
        *stopping,  # Before the checkpoint, which stores its state.
        SaveCheckpoints(training, saved, [*stopping, *own], restore_metrics, stop),
        *showing,
    ]
    return tuple(filter(None, callbacks))


def _origin(settings: config.Settings, prepared: PreparedDataset, run: Run) -> dict[str, Any]:
    """Return what a checkpoint records about the training that writes it; a resumed one may have other settings."""
    rollbacks = len(outcome.nonfinite_steps(run)) if settings.train.on_nonfinite == "rollback" else 0
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
    log.info("variables %s; %s per device; gradients: %s", spread, units.size(num_bytes), strategy.collectives)
    if strategy.backend == "jax":
        at_once = f"up to {loops.steps_of(strategy).LENGTHS[0]} at once"
        alone = "one by one: XLA computes a loop's steps on one thread of a CPU"
        log.info("steps     %s", alone if strategy.on_cpus else at_once)
    log.info("model     %s, %s parameters", name, f"{training.model.count_params():,}")
    if training.settings.model.freeze:
        trained = sum(math.prod(variable.shape) for variable in training.model.trainable_variables)
        frozen, phase = ", ".join(one.pattern for one in training.settings.model.freeze), training.phase
        if phase.freezes:
            log.info("frozen    %s; %s parameters are trained", frozen, f"{trained:,}")
        else:
            log.info("unfrozen  %s; learning rates are multiplied by %g", frozen, phase.rate_factor)


def _lock(run: Run, folder: Path, opened: contextlib.ExitStack) -> None:
    """Keep a second process from training the same run; the system releases the lock of a process that died."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        opened.enter_context(FileLock(folder / ".lock", timeout=DYING_SECONDS))
    except Timeout:
        raise UserError(
            f"run {run.run_id} is being trained by another process: wait until it ends, or name another run"
        ) from None


def _in_common(settings: config.Settings, prepared: PreparedDataset) -> bytes:
    """Return what every member of a cluster must have in common, as a JSON object of strings. The packages determine
    the protocol, the kernels and the batches drawn."""
    versions = {name: text for name, text in machine.surroundings().items() if name in machine.PACKAGES}
    common = {
        "settings": settings.digest("result", "speed"),
        "data": str(prepared.data_version),
        "code": lineage.code_of(settings)[:12],
        **versions,
    }
    return json.dumps(common).encode()


def _refuse_other(own: bytes, chiefs: bytes, worker: int) -> None:
    """Raise ``UserError`` in a worker whose settings, data, code or packages differ from the chief's; name each."""
    mine, theirs = json.loads(own), json.loads(chiefs)
    other = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not other:
        return
    own_words, chiefs_words = (
        ", ".join(f"{name} {one.get(name, 'not installed')}" for name in other) for one in (mine, theirs)
    )
    raise UserError(
        f"worker {worker} was started with {own_words}, but the chief with {chiefs_words}: start every member of the "
        "cluster with the same command, the same code and packages, and the same data"
    )


def _rolls_back(section: config.Train, rollbacks: int) -> bool:
    return section.on_nonfinite == "rollback" and rollbacks < section.max_rollbacks


def _result(
    training: Training, prepared: PreparedDataset, run: Run, saved: Checkpoints, throughput: Throughput
) -> TrainingResult:
    """Export the final and the best model, and return the record of a finished training."""
    strategy, position, section = training.strategy, training.position, training.settings.train
    models_folder = config.project_root() / run.folder / "models"
    final_step = saved.find("latest")
    trained = training.model
    if strategy.is_one_program:
        trained = model.alone(training.settings, prepared, training.batches, position.start, saved)
    digest = model.weights_digest(trained)
    final_model = checkpoints.save_model(trained, models_folder / "final.keras")
    best_step, best_model = model.save_best_model(trained, saved, final_step, final_model)
    trained_models.complete(models_folder, prepared, training.settings.model.name)
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
        nonfinite_steps=outcome.nonfinite_steps(run),
    )


def _traced(result: TrainingResult, training: Training, stop: threading.Event, board: Path) -> TrainingResult:
    """Return the record, with the parts of a step's time if ``train.traced_steps`` is set; ``train.tensorboard`` keeps
    the trace."""
    if training.settings.train.traced_steps is None:
        return result
    from tasks.training import step_time

    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            kept = board if training.settings.train.tensorboard else Path(folder)
            found = step_time.measure_step_time(training, stop, kept)
    except StratagemError:
        raise
    except Exception as error:
        if training.strategy.num_workers > 1:
            raise  # The other workers wait for this one's part: only a restart ends that.
        log.warning("the parts of a step's time could not be measured (%s): the training is complete", one_line(error))
        found = None
    if found is not None:
        log.info("a step    %s", ", ".join(f"{name} {value:.2f} ms" for name, value in found.parts.items()))
    return result.model_copy(update={"step_time": found, "traced_seconds": time.perf_counter() - began})

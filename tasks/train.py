"""Train: prepared data -> input pipeline -> strategy scope -> loop -> checkpoints and exported models."""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
from filelock import FileLock, Timeout

from tasks import checkpoints, config, lineage, models, records, runs, schedules, strategies
from tasks.checkpoints import Checkpoints, State
from tasks.errors import UserError
from tasks.input import sources
from tasks.input.augment import check_augmentation
from tasks.input.batches import Batches
from tasks.input.order import carve
from tasks.records import Placement, PreparedDataset, Run, TrainingResult
from tasks.training import autotune, loops
from tasks.training.callbacks import (
    EarlyStopping,
    MetricSink,
    NonFiniteLoss,
    Position,
    SaveCheckpoints,
    SendMetrics,
    StopOnNonFinite,
    Throughput,
)
from tasks.training.profiler import Profiler
from tasks.training.progress import ProgressBar

log = logging.getLogger(__name__)

DYING_SECONDS = 30.0
# What is never set.
NEVER = threading.Event()


def check(settings: config.Settings, prepared: PreparedDataset) -> tuple[strategies.Strategy, int]:
    """Refuse what cannot be trained, before a run exists; return the strategy and the global batch size.

    Raises:
        UserError: damaged arrays; or data, batch, devices or model do not fit the settings.
    """
    sources.verify(settings.input, prepared)
    models.set_precision(settings.train.dtype_policy)
    strategy = strategies.build(settings.strategy)
    if strategy.coordinator is not None and sources.choose_source(settings.input, prepared) == "stream":
        raise UserError(
            f"input.source = '{settings.input.source}': the training split of {prepared.name} is larger than "
            f"input.memory_budget_bytes = {settings.input.memory_budget_bytes:,}, so it would be a stream, and under "
            f"strategy.kind = '{strategy.kind}' each worker has the arrays in memory and is told rows of them. Give "
            "input.source=array, a larger input.memory_budget_bytes, or another strategy"
        )
    global_batch_size = find_global_batch_size(settings.train, strategy.num_replicas)
    _, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    sources.check_batch(global_batch_size, len(rows), prepared)
    check_augmentation(settings.input.augmentation, prepared)
    with _host():
        model = models.build(settings.model, prepared, settings.input.normalization)
    strategy.check_model(model)
    _check_last_batch(model, strategy, settings.input, len(rows), global_batch_size)
    return strategy, global_batch_size


def train(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    send: MetricSink,
    stop: threading.Event = NEVER,
) -> TrainingResult:
    """Train the model of the settings and leave checkpoints, ``final.keras`` and ``best.keras`` in the run's folder.

    A run that has checkpoints is carried on from the latest one.

    Args:
        settings: everything but ``evaluate``, ``register`` and ``tracking`` is read.
        prepared: the data; its arrays are checked against their sha256 first.
        run: names the folder.
        send: takes (step, metrics) after each epoch; it must not block.
        stop: when it is set, the training saves a checkpoint after its next step and ends.

    Raises:
        Interrupted: ``stop`` was set.
        NonFiniteLoss: the loss was no finite number, and no rollback is left.
        UserError: data, batch, devices or checkpoint do not fit the settings; nothing was trained.
        StratagemError: a checkpoint could not be written.
    """
    began, gone_back_to = time.perf_counter(), None
    while True:
        try:
            return _train(settings, prepared, run, send, stop, began)
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
            log.warning("%s. Back to the last checkpoint, with %s", error, _lowered(settings.train, len(before) + 1))


def _train(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    send: MetricSink,
    stop: threading.Event,
    began: float,
) -> TrainingResult:
    """Train until the end, or until the loss is no finite number."""
    section = settings.train
    strategy, global_batch_size = check(settings, prepared)
    folder = config.project_root() / run.folder
    with contextlib.ExitStack() as opened:
        opened.enter_context(_lock(run, folder))
        saved = Checkpoints(folder / "checkpoints", settings.checkpoint.keep, settings.checkpoint.monitor)
        opened.enter_context(saved)
        if saved.steps():
            arrays, state = saved.restore_latest()
            log.info("resuming at step %d, epoch %d", state.step, state.epoch + 1)
            global_batch_size = _resumed_batch_size(section, state, strategy.num_replicas)
        else:
            arrays, state = {}, _first_state(settings, prepared, global_batch_size)
        origin = {"seed": section.seed, "settings_digest": settings.digest(), "data_version": prepared.data_version}
        rollbacks = len(runs.nonfinite_steps(run)) if section.on_nonfinite == "rollback" else 0
        state = state.model_copy(update={**origin, "rollbacks": rollbacks})
        if strategy.num_workers > 1:
            strategy.broadcast(_told(settings, prepared))
        training, validation = _data(settings, prepared, strategy, global_batch_size)
        state = _in_batches_of(state, global_batch_size, training.steps)
        if strategy.num_workers > 1:
            strategy.broadcast(checkpoints.pack(arrays, state))
        for batches in (training, validation):
            if batches is not None:
                opened.enter_context(contextlib.closing(batches))
        model, loss = _model(settings, prepared, strategy, training, state)
        tuning = folder / "records" / "tuning.json"
        compiled = autotune.choose_compiler(section, model, strategy, training, tuning, bool(arrays))
        settings = settings.model_copy(update={"train": section.model_copy(update={"jit_compile": compiled})})
        placement = strategy.place(model)
        records.save(placement, folder / "records" / "placement.json")
        _say(strategy, placement, settings, model)
        position, stopping, callbacks = _callbacks(settings, model, training, state, arrays, saved, stop, strategy)
        del arrays  # As large as the model and its optimizer, all training long.
        throughput = Throughput(position, began)
        # Before the checkpoint of an epoch's end is saved, whose time is not the epoch's.
        callbacks[2:2] = [throughput, SendMetrics(send, position)]
        bar = ProgressBar(section.epochs, training.steps)
        callbacks.append(bar)
        closing = contextlib.ExitStack()
        closing.callback(bar.close)
        if section.profile_steps is not None:
            first, last = section.profile_steps
            profiler = Profiler(position, first, last, folder / "tensorboard", send)
            callbacks.insert(2, profiler)
            closing.enter_context(profiler)
        if section.tensorboard:
            callbacks.append(keras.callbacks.TensorBoard(folder / "tensorboard", write_graph=False))
        with closing:
            _loop(settings, model, loss, strategy, training, validation, position, stopping, callbacks)

        final_step = saved.find("latest")
        digest = _weights_digest(model)
        final_model = checkpoints.export(model, folder / "models" / "final.keras")
        best_step, best_model = _export_best(model, saved, final_step, final_model)
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
        steps=position.step + position.offset,
        num_parameters=model.count_params(),
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
        best_weights_digest=best_digest,
        nonfinite_steps=runs.nonfinite_steps(run),
    )


def assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event = NEVER) -> None:
    """Train as a worker that is not the chief: the same steps, from the chief's checkpoint; nothing is written.

    Raises:
        Interrupted: ``stop`` of any worker was set.
        NonFiniteLoss: as the chief's.
        UserError: data, batch, devices or model do not fit the settings, or settings or data are not the chief's.
    """
    while True:
        try:
            return _assist(settings, prepared, stop)
        except NonFiniteLoss as error:
            if not _rolls_back(settings.train, error.start.rollbacks):
                raise


def _assist(settings: config.Settings, prepared: PreparedDataset, stop: threading.Event) -> None:
    """Train with the chief until the end, or until the loss is no finite number."""
    strategy, _ = check(settings, prepared)
    # Before the model is made, for which workers with other settings would wait for each other.
    own, chiefs = _told(settings, prepared).decode(), strategy.broadcast(b"").decode()
    if own != chiefs:
        raise UserError(
            f"this worker was started with {own}, and the chief with {chiefs}: give every member of the cluster the "
            "same command, and the same data"
        )
    arrays, state = checkpoints.unpack(strategy.broadcast(b""))
    training, validation = _data(settings, prepared, strategy, state.global_batch_size)
    model, loss = _model(settings, prepared, strategy, training, state)
    with contextlib.closing(training), contextlib.closing(validation) if validation else contextlib.nullcontext():
        position, stopping, callbacks = _callbacks(settings, model, training, state, arrays, None, stop, strategy)
        del arrays
        _loop(settings, model, loss, strategy, training, validation, position, stopping, callbacks)


def _data(
    settings: config.Settings, prepared: PreparedDataset, strategy: strategies.Strategy, global_batch_size: int
) -> tuple[Batches, Batches | None]:
    """Return this worker's training and validation batches."""
    place = (strategy.num_local_replicas, strategy.worker, strategy.num_workers)
    training = sources.training_batches(settings, prepared, global_batch_size, *place)
    if settings.input.validation is None:
        return training, None
    return training, sources.ordered_batches(settings, prepared, "validation", global_batch_size, *place)


def _model(
    settings: config.Settings,
    prepared: PreparedDataset,
    strategy: strategies.Strategy,
    training: Batches,
    state: State,
) -> tuple[Any, Any]:
    """Return the compiled model with all its variables, and its loss."""
    section = settings.train
    keras.utils.set_random_seed(section.seed)
    if section.deterministic and strategy.backend == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    with strategy.scope():
        model = models.build(settings.model, prepared, settings.input.normalization)
        scale = section.rollback_factor**state.rollbacks
        optimizer = schedules.optimizer(settings, training.steps, training.global_batch_size, scale)
        loss = compile_model(model, settings, optimizer)
        model.optimizer.build(model.trainable_variables)
        # Metrics and losses are made at the first use, and a resumed epoch needs theirs before.
        example = keras.ops.zeros([1], "int32"), keras.ops.zeros([1, prepared.num_classes])
        model.compute_loss(None, *example)
        model.compute_metrics(None, *example)
    strategy.check_model(model)  # What counts is the model that is trained.
    return model, loss


def _host() -> contextlib.AbstractContextManager[Any]:
    """Variables that are made inside lie in the host's memory: a model may fit into its strategy's devices only."""
    try:
        device: contextlib.AbstractContextManager[Any] = keras.device("cpu:0")
    except RuntimeError:  # The user's JAX_PLATFORMS leaves the CPU out.
        return contextlib.nullcontext()
    return device


def _told(settings: config.Settings, prepared: PreparedDataset) -> bytes:
    """Return what every member of a cluster must have in common, as a line."""
    return f"the settings {settings.digest('result', 'speed')} and the data {prepared.data_version}".encode()


def _callbacks(
    settings: config.Settings,
    model: Any,
    training: Batches,
    state: State,
    arrays: checkpoints.Arrays,
    saved: Checkpoints | None,
    stop: threading.Event,
    strategy: strategies.Strategy,
) -> tuple[Position, EarlyStopping | None, list[Any]]:
    """Give the model its checkpoint; return the callbacks that every worker needs, in their order."""
    section = settings.train
    position = Position(training, state)
    if arrays:
        _restore(model, arrays, position)
    stopping = EarlyStopping(section.early_stopping, state.stopping, position) if section.early_stopping else None
    metrics = {key: array for key, array in arrays.items() if key.startswith("metric/")}
    saving = SaveCheckpoints(
        saved,
        position,
        stopping,
        settings.checkpoint,
        lambda: checkpoints.assign(model, metrics, ("metric",)),
        stop,
        strategy,
    )
    # First of those that look at the loss: nothing that came of a bad one is saved.
    return position, stopping, [position, StopOnNonFinite(position), *([stopping] if stopping else []), saving]


def _restore(model: Any, arrays: checkpoints.Arrays, position: Position) -> None:
    """Give a model its checkpoint, with the learning rate and the batch size of now."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # Under mixed_float16.
    scheduled = isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule)
    rate = None if scheduled else float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    checkpoints.assign(model, arrays, ("model", "seed", "optimizer"))
    if rate is not None:
        optimizer.learning_rate = rate  # A constant one is a variable, and it may be lower after a rollback.
    if position.offset:
        optimizer._iterations.assign(
            position.step
        )  # What a schedule goes by; without the underscore it can be a tensor.


def _loop(
    settings: config.Settings,
    model: Any,
    loss: Any,
    strategy: strategies.Strategy,
    training: Batches,
    validation: Batches | None,
    position: Position,
    stopping: EarlyStopping | None,
    callbacks: list[Any],
) -> None:
    """Train with the loop of the settings, unless the training had stopped early before it was resumed."""
    if stopping is not None and stopping.over:
        return
    loop = {"fit": loops.fit, "custom": loops.custom}[settings.train.loop]
    if strategy.coordinator is not None:
        from tasks.training import coordinator

        loop = coordinator.train
    with strategy.scope():  # On JAX it is read for each batch and layer.
        loop(model, loss, strategy, training, validation, position, settings.train, callbacks)


def _say(strategy: strategies.Strategy, placement: Placement, settings: config.Settings, model: Any) -> None:
    num_bytes = sum(variable.bytes_per_device for variable in placement.variables)
    ways = Counter(variable.sharding for variable in placement.variables)
    spread = ", ".join(f"{count} {way}" for way, count in ways.most_common())
    log.info("strategy  %s", strategy.describe())
    log.info("variables %s; %s MB a device; gradients: %s", spread, f"{num_bytes / 1e6:,.1f}", strategy.collectives)
    log.info("model     %s, %s parameters", settings.model.name, f"{model.count_params():,}")


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
            f"{size // num_replicas} + {size % num_replicas}. Give {f'{lower} or ' if lower else ''}"
            f"{lower + num_replicas}, or train.per_replica_batch_size instead"
        )
    return size


class SoftmaxSquaredError(keras.losses.Loss):
    """Mean squared error of the softmax of logits (n, classes) against the one-hot of classes int (n,)."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        one_hot = keras.ops.one_hot(y_true, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.ops.mean(keras.ops.square(keras.ops.softmax(y_pred) - one_hot), axis=-1)


def compile_model(model: Any, settings: config.Settings, optimizer: Any) -> Any:
    """Compile a classifier that ends in logits, with accuracy as its metric; return the loss."""
    section = settings.train
    if section.loss == "mean_squared_error":
        loss = SoftmaxSquaredError(name="mean_squared_error")
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=optimizer,
        loss=loss,
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        # Read by Keras' own functions alone, whose every other number of steps would be traced anew.
        steps_per_execution=1 if section.steps_per_execution == "auto" else section.steps_per_execution,
        # Keras' own "auto" compiles on the CPU too, where XLA makes a convnet 7 times slower. On JAX a
        # step that is not compiled runs one operation at a time. The custom loop compiles by itself.
        jit_compile=(section.jit_compile is True and section.loop == "fit") or keras.backend.backend() == "jax",
    )
    if isinstance(loss, SoftmaxSquaredError):
        # An exported model would name this class, and could not be loaded where this project is not installed.
        del model._compile_config
    return loss


def _check_last_batch(
    model: Any, strategy: strategies.Strategy, section: config.Input, num_examples: int, global_batch_size: int
) -> None:
    """Raise ``UserError`` when a replica would see no example in a pass' last batch and has to take their mean."""
    rest = num_examples % global_batch_size
    if section.drop_remainder or not strategy.distributed or not 0 < rest < strategy.num_replicas:
        return
    means = [layer.name for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    if means:
        raise UserError(
            f"{num_examples} training examples leave {rest} for the last batch, {strategy.num_replicas} replicas share "
            f"it, and the mean that {means[0]} takes of no examples is not a number: give input.drop_remainder=true, "
            "or another train.global_batch_size"
        )


@contextlib.contextmanager
def _lock(run: Run, folder: Path) -> Iterator[None]:
    """Keep a second process from training the same run; the lock of a process that died is free."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        # A moment: the process of a command that was killed is still ending when the next one is quick.
        lock.acquire(timeout=DYING_SECONDS)
    except Timeout:
        raise UserError(
            f"run {run.run_id} is being trained by another process: wait for it, or name another run"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _first_state(settings: config.Settings, prepared: PreparedDataset, global_batch_size: int) -> State:
    return State(
        step=0,
        epoch=0,
        step_in_epoch=0,
        global_batch_size=global_batch_size,
        seed=settings.train.seed,
        settings_digest=settings.digest(),
        data_version=prepared.data_version,
        history={},
    )


def _resumed_batch_size(section: config.Train, state: State, num_replicas: int) -> int:
    """Return the global batch size to go on with: that of before, unless the settings name another one.

    Raises:
        UserError: it does not divide by the replicas.
    """
    if section.global_batch_size is not None:
        return section.global_batch_size
    if state.global_batch_size % num_replicas:
        raise UserError(
            f"the run was started with {state.global_batch_size} examples a step of all replicas, which do not divide "
            f"by {num_replicas} replicas: resume it on a number of devices that divides them"
        )
    if state.global_batch_size != find_global_batch_size(section, num_replicas):
        log.info("a step keeps its %d examples of all replicas", state.global_batch_size)
    return state.global_batch_size


def _in_batches_of(state: State, global_batch_size: int, steps: int) -> State:
    """Return where a training is in its epoch, which has ``steps`` of another size from here on.

    No more than a batch is read twice; an epoch always has a step left, which ends it.
    """
    if global_batch_size == state.global_batch_size:
        return state
    place = state.step_in_epoch * state.global_batch_size // global_batch_size
    return state.model_copy(update={"global_batch_size": global_batch_size, "step_in_epoch": min(place, steps - 1)})


def _rolls_back(section: config.Train, rollbacks: int) -> bool:
    return section.on_nonfinite == "rollback" and rollbacks < section.max_rollbacks


def _lowered(section: config.Train, rollbacks: int) -> str:
    times = f"{section.rollback_factor**rollbacks:g}"
    return f"{times} times the learning rate, rollback {rollbacks} of {section.max_rollbacks}"


def _weights_digest(model: Any) -> str:
    return lineage.weights_digest(list(checkpoints.snapshot(model, ("model",)).items()))


def _export_best(model: Any, saved: Checkpoints, final_step: int, final_model: Path) -> tuple[int, Path]:
    """Write ``best.keras``: the model as it was at its best step, which is returned. The model itself ends up holding
    those weights."""
    path = final_model.with_name("best.keras")
    if saved.find("best") == final_step:
        return final_step, checkpoints.copy(final_model, path)
    arrays, state = saved.restore_best()
    checkpoints.assign(model, arrays, ("model",))
    return state.step, checkpoints.export(model, path)

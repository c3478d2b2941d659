"""The section ``train``: the loop, the loss, the length, and when to stop."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tasks.config.section import (
    MAX_COUNT,
    MAX_FLOAT32,
    Bookkeeping,
    Count,
    Course,
    MetricName,
    Options,
    OwnCode,
    Result,
    Section,
    Speed,
    TrainingMetric,
)

BATCH_SIZES = ("per_replica_batch_size", "global_batch_size")


class EarlyStopping(Section):
    monitor: Course[TrainingMetric] = "validation/loss"
    """The metric that must improve."""
    patience_epochs: Course[Annotated[int, Field(ge=0, le=MAX_COUNT)]] = 3
    """Epochs without an improvement before the training stops."""
    min_delta: Course[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.0
    """The smallest change that counts as an improvement."""


class Train(Section):
    loop: Speed[Literal["fit", "custom"]]
    """`fit` uses Keras' Model.fit; `custom` uses Stratagem's own loop, which groups steps into one compiled call."""
    loss: Result[
        Literal[
            "auto",
            "sparse_categorical_crossentropy",
            "binary_crossentropy",
            "mean_squared_error",
            "mean_absolute_error",
            "huber",
        ]
        | OwnCode
    ]
    """`auto` selects the first loss of the task. Classification: sparse_categorical_crossentropy of the logits, or
    mean_squared_error of their softmax and the one-hot label. Multilabel: binary_crossentropy. Regression:
    mean_squared_error, mean_absolute_error, huber, in standard deviations of the target. Or your own
    `module:function` of (labels, outputs) that returns a number per example."""
    label_smoothing: Result[Annotated[float, Field(ge=0, lt=1)]]
    """Label smoothing of a crossentropy: the share of each label that is spread evenly over all classes; 0 is off."""
    class_weights: Result[Literal["balanced"] | None]
    """`balanced` gives all classes the same weight in the loss, however many examples each has; null gives all examples
    the same weight."""
    metrics: Course[list[MetricName]]
    """Metrics of training and validation besides the task's main metric (accuracy, micro_f1, mae): by name,
    top_K_accuracy with any K, or your own `module:function` of (labels, outputs) that returns a number per example,
    which is averaged."""
    callbacks: Course[list[OwnCode | Annotated[dict[OwnCode, Options], Field(min_length=1, max_length=1)]]] = []
    """Your own keras.callbacks.Callback, or any of Keras', as `module:name` or with keyword arguments, {module:name:
    {argument: value}}; called in this order, as in Model.fit."""
    epochs: Course[Count]
    """Number of epochs; a resume may increase it."""
    steps_per_epoch: Result[Count | None]
    """Number of steps in an epoch; the next epoch continues with the following data. Null is one pass over the data."""
    frozen_epochs: Result[Count | None]
    """Number of epochs before the layers in model.freeze are trained too, with a new optimizer, and a schedule that
    starts again for the remaining epochs. Null keeps them frozen."""
    thawed_learning_rate_factor: Result[Annotated[float, Field(gt=0, le=1)]]
    """Factor for all learning rates after frozen_epochs."""
    per_replica_batch_size: Course[Count | None]
    """Examples per replica in one step. Set this or global_batch_size, and the other to null."""
    global_batch_size: Course[Count | None]
    """Examples of all replicas together in one step."""
    scale_learning_rate_from: Result[Count | None]
    """Linear scaling rule: multiply learning rates by global batch / this batch size; null is off."""
    steps_per_execution: Speed[Literal["auto"] | Annotated[int, Field(gt=0, le=10_000)]]
    """Steps per call of the compiled train function; `auto` starts with 1 and increases this until a call takes a
    quarter of a second. It does not change the result."""
    jit_compile: Speed[Literal["auto"] | bool]
    """Compile with XLA: with arrays on one device, all steps of a call together, otherwise each step. `auto` compiles
    only where measurements showed a gain: a long training of dense layers on a CPU."""
    gradient_accumulation_steps: Result[Count]
    """Number of steps whose gradients are averaged for one update of the weights; 1 is off."""
    dtype_policy: Result[Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"]]
    """Keras' dtype policy; the mixed ones keep the weights in float32, and mixed_float16 scales the loss."""
    seed: Result[Annotated[int, Field(ge=0, lt=2**31)]]
    """Seed of the weights, the order of the data, augmentation, Dropout, and a randomly drawn validation split."""
    deterministic: Course[bool]
    """Compute the same bits in every run; on TensorFlow, an operation that cannot do that is an error."""
    on_nonfinite: Course[Literal["stop", "rollback"]]
    """If the loss is not finite, `stop` the training, or `rollback` to the latest checkpoint and continue with a lower
    learning rate. Such a run is marked and never registered."""
    max_rollbacks: Course[Count]
    """Number of rollbacks before the training stops."""
    rollback_factor: Course[Annotated[float, Field(gt=0, lt=1)]]
    """Factor by which each rollback multiplies the learning rate."""
    early_stopping: Course[EarlyStopping | None]
    """Stop when a metric no longer improves: {patience_epochs: 3}; null is off."""
    tensorboard: Bookkeeping[bool]
    """Write TensorBoard logs to the run's folder."""
    traced_steps: Bookkeeping[Count | None]
    """Number of extra steps after the training that measure where the time of a step goes; they do not change the
    model. With `train.tensorboard`, TensorBoard shows their trace. Null is off; a comparison uses 30. Not under
    `parameter_server`."""

    @property
    def own_callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        """The names of callbacks, and their options."""
        return [(one, {}) if isinstance(one, str) else next(iter(one.items())) for one in self.callbacks]

    @model_validator(mode="after")
    def each_metric_once(self) -> Self:
        for name in self.metrics:
            if self.metrics.count(name) > 1:
                raise ValueError(f"metrics = {self.metrics} has {name} twice")
        return self

    @model_validator(mode="after")
    def one_batch_size(self) -> Self:
        if (self.per_replica_batch_size is None) == (self.global_batch_size is None):
            raise ValueError(
                f"per_replica_batch_size={self.per_replica_batch_size} and global_batch_size={self.global_batch_size}: "
                "set exactly one of them, and the other to null"
            )
        return self

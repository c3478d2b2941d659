"""The section ``train``: how long, in which steps, by which loop, and what ends it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tasks.config.section import (
    MAX_COUNT,
    MAX_FLOAT32,
    Bookkeeping,
    Count,
    Course,
    MetricName,
    OwnCode,
    Result,
    Section,
    Speed,
    TrainingMetric,
)

BATCH_SIZES = ("per_replica_batch_size", "global_batch_size")


class EarlyStopping(Section):
    monitor: Course[TrainingMetric] = "validation/loss"
    """What must go on getting better."""
    patience_epochs: Course[Annotated[int, Field(ge=0, le=MAX_COUNT)]] = 3
    """Epochs without a better value before the training stops."""
    min_delta: Course[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]] = 0.0
    """How much better counts as better."""


class Train(Section):
    loop: Speed[Literal["fit", "custom"]]
    """`fit` is Keras' Model.fit; `custom` is our own loop, which groups steps into one compiled call."""
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
    """`auto`: the first of the task's own. Classes: sparse_categorical_crossentropy of the logits, mean_squared_error
    of their softmax against the one-hot label. Several labels: binary_crossentropy. Numbers: mean_squared_error,
    mean_absolute_error, huber, each in standard deviations of the target. Or your own `module:function` of (labels,
    outputs), a number an example."""
    label_smoothing: Result[Annotated[float, Field(ge=0, lt=1)]]
    """The share of each label that all classes get alike; 0 is off. Of a crossentropy."""
    class_weights: Result[Literal["balanced"] | None]
    """`balanced`: the classes count the same in the loss, however many examples each has. Null: the examples do."""
    metrics: Course[list[MetricName]]
    """Measured in training and validation beside the task's headline (accuracy, micro_f1, mae): by name, as
    top_K_accuracy with any K, or your own `module:function` of (labels, outputs), a number an example, whose mean it
    is."""
    epochs: Course[Count]
    """After how many the training ends; a run that is resumed may have more."""
    steps_per_epoch: Result[Count | None]
    """Steps that count as an epoch; the data go on where the epoch before left them. Null is one pass over the data."""
    frozen_epochs: Result[Count | None]
    """Epochs after which the layers of model.freeze are trained too, with a new optimizer, and the schedule from its
    beginning over the epochs that are left. Null keeps them frozen."""
    thawed_learning_rate_factor: Result[Annotated[float, Field(gt=0, le=1)]]
    """What learning rates are multiplied with from then on."""
    per_replica_batch_size: Course[Count | None]
    """Examples a replica takes in one step. Give this or global_batch_size, and set the other to null."""
    global_batch_size: Course[Count | None]
    """Examples all replicas take together in one step."""
    scale_learning_rate_from: Result[Count | None]
    """Linear scaling rule: multiply learning rates by global batch / this batch size; null is off."""
    steps_per_execution: Speed[Literal["auto"] | Annotated[int, Field(gt=0, le=10_000)]]
    """Steps in one call of the compiled train function; `auto` begins with 1 and lets the calls grow, as their time
    allows, to a quarter of a second. It changes no number."""
    jit_compile: Speed[Literal["auto"] | bool]
    """Compile with XLA: with arrays and one device all steps of a call together, else each step. `auto` compiles what
    was measured to be faster so: a long training of dense layers on a CPU."""
    gradient_accumulation_steps: Result[Count]
    """Steps whose gradients are averaged before the weights change; 1 is off."""
    dtype_policy: Result[Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"]]
    """What Keras computes in; of a mixed one the weights are float32, and float16 has its loss scaled."""
    seed: Result[Annotated[int, Field(ge=0, lt=2**31)]]
    """Of the weights, the order of the data, the augmentation, Dropout, and a validation split that is drawn."""
    deterministic: Course[bool]
    """Refuse TensorFlow kernels whose results differ from run to run."""
    on_nonfinite: Course[Literal["stop", "rollback"]]
    """When the loss is not finite: `stop` the training, or `rollback` to the latest checkpoint and continue with a
    lower learning rate. Such a run is marked, and never registered."""
    max_rollbacks: Course[Count]
    """How often, before the training stops."""
    rollback_factor: Course[Annotated[float, Field(gt=0, lt=1)]]
    """What each rollback multiplies the learning rate with."""
    early_stopping: Course[EarlyStopping | None]
    """Stop when a metric gets no better: {patience_epochs: 3}; null is off."""
    tensorboard: Bookkeeping[bool]
    """Write a TensorBoard log into the run's folder."""
    profile_steps: Bookkeeping[Annotated[list[Count], Field(min_length=2, max_length=2)] | None]
    """First and last training step that the profiler traces, such as [10, 20]; null is off."""
    traced_steps: Bookkeeping[Count | None]
    """Steps that are done and traced after the training, of which nothing is kept but where their time goes; null is
    off. A comparison does 30."""

    @model_validator(mode="after")
    def one_batch_size(self) -> Self:
        if (self.per_replica_batch_size is None) == (self.global_batch_size is None):
            raise ValueError(
                f"per_replica_batch_size={self.per_replica_batch_size} and global_batch_size={self.global_batch_size}: "
                "give exactly one of them and set the other to null"
            )
        return self

    @model_validator(mode="after")
    def profile_rises(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"profile_steps = {self.profile_steps}: the first step comes after the last")
        return self

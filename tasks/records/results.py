"""Records of training, evaluation, registration, export and prediction."""

from typing import Any, Literal

from pydantic import Field

from tasks.records.record import Name, Place, Record


class VariablePlacement(Record):
    """The devices that really hold one variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    devices: tuple[str, ...]
    sharding: str
    """`whole` on one device; `mirrored`, or `replicated` on JAX, with a copy on each device; or which axis of the mesh
    shards which dimension."""
    bytes_per_device: int


class Placement(Record):
    """The devices on which a strategy really placed each variable of a model. Equal losses cannot show that."""

    strategy: str
    backend: str
    num_replicas: int
    num_workers: int
    devices: tuple[str, ...]
    collectives: str
    """The operation that sums the gradients, such as `NcclAllReduce`, or `none`."""
    variables: tuple[VariablePlacement, ...]
    """The model's, then the optimizer's."""


class StepTime(Record):
    """The parts of a training step, in milliseconds; they add up to the step."""

    num_steps: int
    """The number of traced steps, after the training so that they do not slow it down."""
    compute_ms: float
    collectives_ms: float
    """Sums over replicas, and the wait for replicas that are not ready."""
    input_wait_ms: float
    host_ms: float
    """Python, callbacks, launching, copies to a device."""

    @property
    def parts(self) -> dict[str, float]:
        """The milliseconds of each part by its name."""
        return {name: getattr(self, f"{name}_ms") for name in ("compute", "collectives", "input_wait", "host")}

    @property
    def total_ms(self) -> float:
        """The milliseconds of the whole step."""
        return sum(self.parts.values())


class TrainingResult(Record):
    """The result of `train`: the checkpoints, the exported models and how the training went. Seconds and examples per
    second are those of its last phase."""

    run_id: Name
    dataset: str
    strategy: str
    loop: str
    num_replicas: int
    devices: tuple[str, ...]
    global_batch_size: int
    epochs: int
    steps: int
    num_parameters: int
    optimizer: str
    """The optimizer's class: one of Keras, such as `SGD`, or one of this project, such as `FusedAdam`."""
    examples_per_second: float | None
    """Of the training steps after the first call of the step function, including input wait; None after one call."""
    setup_seconds: float
    """From the start of the stage to the first call of the step function: model, variables, input."""
    first_call_seconds: float | None
    """The first call of the step function, which traces and compiles it; None if no step remained."""
    epoch_seconds: tuple[float, ...]
    """The duration of each whole epoch of this process, including validation but not its last checkpoint."""
    history: dict[str, tuple[float, ...]]
    """Metrics by name (`train/loss`, `validation/accuracy`, `train/learning_rate`), one value per whole epoch."""
    stopped_early: bool
    checkpoints: Place
    checkpoint: Place
    best_checkpoint: Place
    final_model: Place
    best_model: Place
    weights_digest: str
    """The sha256 over the sorted weights of the final model."""
    best_weights_digest: str
    restarts: tuple[str, ...] = ()
    """Why processes of the cluster restarted, one sentence each time."""
    nonfinite_steps: tuple[int, ...] = ()
    """Steps at which the loss was not finite and the training went back to a checkpoint."""
    step_time: StepTime | None = None
    """Measured on `train.traced_steps` steps after the last one."""
    traced_seconds: float = 0.0
    """The duration of that measurement, which is not part of the training's time."""

    @property
    def curves(self) -> dict[str, dict[str, tuple[float, ...]]]:
        """``history`` by metric, then by split."""
        found: dict[str, dict[str, tuple[float, ...]]] = {}
        for name, values in self.history.items():
            split, _, metric = name.partition("/")
            found.setdefault(metric, {})[split] = values
        return found


class ClassMetrics(Record):
    name: str
    precision: float
    recall: float
    f1: float
    support: int


class ColumnImportance(Record):
    """How much worse a metric gets on the test split if the values of one column are shuffled among the rows."""

    column: str
    metric: str
    """`register.metric`, such as test/accuracy."""
    value: float
    """Below 0, the metric gets better."""
    interval: tuple[float, float]
    """At 95%."""


class EvaluationResult(Record):
    """The result of `evaluate`: metrics of one checkpoint on the test split. Rows of the matrix are true classes."""

    run_id: str
    checkpoint: str
    step: int
    num_examples: int
    strategy: str
    """The strategy that computed the outputs."""
    examples_by_device: dict[str, int] = {}
    """The number of examples that each device really held. With several devices per replica, or a short last batch on
    JAX, some are on more than one device."""
    metrics: dict[str, float]
    lower_is_better: tuple[str, ...]
    """The metrics whose lower values are better; the code of the user's own metrics says so."""
    classes: tuple[ClassMetrics, ...]
    """The metrics of each class or label; empty for a regression."""
    confusion_matrix: tuple[tuple[int, ...], ...]
    """Empty unless the task is a classification."""
    predictions: tuple[tuple[float, float], ...] = ()
    """For a regression's first number: pairs of true and predicted values of the first test examples."""
    importance: tuple[ColumnImportance, ...] = ()
    """For a table, the greatest first."""
    outputs: Place
    """The model's output for each test example: an .npz file with ``labels`` and ``outputs``, float32; see
    ``tasks/evaluation/predictions.py``."""
    outputs_sha256: str
    """The sha256 of that file."""
    test_rows: str
    """A digest of the test rows: two evaluations with the same digest can be compared example by example."""


class Judgement(Record):
    """Whether the alias `champion` moved to a model version, and why."""

    promoted: bool
    reason: str
    """One sentence, with the figures."""
    forced: bool = False
    """Whether a person moved it without evidence."""
    against: str | None = None
    """The version that was the champion."""
    scored_again: bool = False
    """Whether the champion was evaluated again, because its evaluation had other test rows."""
    metric: str | None = None
    """The compared metric, `register.metric`; None, like the figures below, if nothing could be compared."""
    candidate: float | None = None
    champion: float | None = None
    difference: float | None = None
    """How much better the candidate is; below 0, it is worse."""
    interval: tuple[float, float] | None = None
    """The interval of the difference, at `register.confidence`."""
    test: Literal["McNemar", "paired bootstrap"] | None = None
    p_value: float | None = None
    """The probability of so large a difference if the candidate is not better."""
    num_examples: int | None = None
    """The number of test rows that both were evaluated on."""

    @property
    def told(self) -> str:
        """Which version is the champion, and why, for a table."""
        who = "this version" if self.promoted else f"version {self.against}" if self.against else "none"
        return f"{who}: {self.reason}"


REGISTER_LATER = "`stratagem runs sync` registers it"
"""The end of the reason of a model without a version if only its registration must be repeated."""


class RegisteredModel(Record):
    """The result of `register`. Without a version, `reason` says why."""

    run_id: str
    model_uri: str | None
    model_name: str
    model_version: str | None
    aliases: tuple[str, ...]
    reason: str | None
    notes: tuple[str, ...] = ()
    """Remarks about the version: it existed already."""
    judgement: Judgement | None = None
    """Whether it is the champion, and why; None without a version."""

    @property
    def waits(self) -> bool:
        """Whether the next `stratagem runs sync` registers the model, because the server did not answer."""
        return self.model_version is None and REGISTER_LATER in (self.reason or "")


class RolledBack(Record):
    """The result of `rollback`, which moves the alias `champion` back to an earlier version."""

    model_name: str
    before: str | None
    """The version that had the alias, if any."""
    now: str
    missing: tuple[str, ...] = ()
    """Versions in between that no longer exist."""
    loaded_back: str
    """One sentence on how the version was checked before it got the alias."""


class ModelVersion(Record):
    """A version in MLflow's registry."""

    name: str
    version: str
    aliases: tuple[str, ...]
    run_id: str | None
    """Its run in mlruns/, or else in MLflow; None if the version names no run."""
    tags: dict[str, str]


class TensorShape(Record):
    """An input or output of a model; a dimension of any size, such as the batch, is None."""

    name: str | None = Field(default=None, exclude_if=lambda value: value is None)
    shape: tuple[int | None, ...]
    dtype: str


class ExportedModel(Record):
    """The result of `export`: export.json, next to the files of a trained model."""

    format: str
    run_id: Name
    dataset: str
    checkpoint: str
    """The checkpoint with its weights."""
    model_digest: str
    """The digest of its weights, layers and the user's code for them; a tag of the MLflow version."""
    weights_digest: str
    data_version: str | None
    git_commit: str | None
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    num_examples: int
    """The number of test examples for which Keras and the files were compared."""
    max_difference: float
    """The largest difference between their outputs; for a regression, in standard deviations of its target."""
    metrics: dict[str, float] | None = Field(default=None, exclude_if=lambda value: value is None)
    """The metrics of the files on those examples, if the format rounds the weights; ``keras_metrics`` are Keras'."""
    keras_metrics: dict[str, float] | None = Field(default=None, exclude_if=lambda value: value is None)
    files: dict[str, str]
    """The sha256 of each file, by its path in the folder of this file."""
    folder: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """That folder; it is not in the file, which may be copied elsewhere."""


class PredictionRequest(Record):
    """The request of `stratagem predict` to the stage process. Paths are relative to ``folder``."""

    model: str | None
    """See ``raw_model.load``."""
    inputs: tuple[str, ...]
    """Files and folders; ``-`` is the descriptor ``stdin``."""
    folder: str
    """The absolute folder in which the user gave the command."""
    stdin: int | None = None
    to: str | None = None
    """The absolute path of the file for the predictions."""
    stdout: int | None = None
    """The descriptor for the predictions; without it and without ``to``, only the first ones are printed."""
    format: str
    """A key of ``prediction_files.WRITERS``."""
    top_k: int
    probabilities: bool
    batch_size: int | None
    """None is as many examples as fit in 8 MiB, at most 1,024."""
    encoding: str | None = None
    """The encoding of text files; None is the model's."""


class Predicted(Record):
    """The result of `stratagem predict`."""

    model: str
    num_examples: int
    num_failed: int
    """The number of examples with an error instead of a prediction."""
    counts: dict[str, int]
    """The number of examples predicted as each class; empty for a regression."""
    first: tuple[dict[str, Any], ...]
    """The first predictions, as in the file."""
    devices: tuple[str, ...]
    """The devices that computed them."""
    seconds: float
    """Without the start of the process."""
    output: str | None = None

"""What training, evaluation, registration, export and prediction leave."""

from typing import Any, Literal

from pydantic import Field

from tasks.records.record import Name, Place, Record


class VariablePlacement(Record):
    """Where one variable really lies."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    devices: tuple[str, ...]
    sharding: str
    """`whole` on one device; `mirrored`, or on JAX `replicated`, with a copy on each; or which axis of the mesh cuts
    which dimension."""
    bytes_per_device: int


class Placement(Record):
    """What a strategy really did with a model: which variable lies where. Equal losses cannot show that."""

    strategy: str
    backend: str
    num_replicas: int
    num_workers: int
    devices: tuple[str, ...]
    collectives: str
    """What sums the gradients, such as `NcclAllReduce`, or `none`."""
    variables: tuple[VariablePlacement, ...]
    """The model's, then the optimizer's."""


class Tuning(Record):
    """What was chosen for a training that changes how its sums are rounded, so that a resumed one does the same."""

    jit_compile: bool
    reason: str


class StepTime(Record):
    """Where the time of a training step goes, in milliseconds of one step. The parts add up to the step."""

    num_steps: int
    """That were looked at, after the training, whose own steps nothing slows down."""
    compute_ms: float
    collectives_ms: float
    """Sums over replicas, and the wait for those that are not done yet; under `parameter_server` fetching variables
    from the servers and changing them there."""
    input_wait_ms: float
    host_ms: float
    """Python, callbacks, launching, copies to a device."""

    @property
    def parts(self) -> dict[str, float]:
        """The milliseconds of each part by its name."""
        return {name: getattr(self, f"{name}_ms") for name in ("compute", "collectives", "input_wait", "host")}

    @property
    def total_ms(self) -> float:
        """Of the whole step."""
        return sum(self.parts.values())


class TrainingResult(Record):
    """What `train` leaves: the checkpoints, the exported models and what the training was like; its seconds and
    examples a second are those of its last phase."""

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
    """The class that changed the weights: one of Keras', such as `SGD`, or of this project's, such as `FusedAdam`."""
    examples_per_second: float | None
    """Training steps after the first call of the step function, input wait included; None when there was one call."""
    setup_seconds: float
    """From the stage's beginning to the first call of the step function: model, variables, input."""
    first_call_seconds: float | None
    """The first call of the step function, which traces and compiles it; None when no step was left to do."""
    epoch_seconds: tuple[float, ...]
    """Of each whole epoch that this process trained, validation included, its last checkpoint left out."""
    history: dict[str, tuple[float, ...]]
    """Metric by name (`train/loss`, `validation/accuracy`, `train/learning_rate`), one value a whole epoch."""
    stopped_early: bool
    checkpoints: Place
    checkpoint: Place
    best_checkpoint: Place
    final_model: Place
    best_model: Place
    weights_digest: str
    """sha256 over the sorted weights of the final model."""
    best_weights_digest: str
    restarts: tuple[str, ...] = ()
    """Why processes of the cluster were started again, a sentence for each time."""
    nonfinite_steps: tuple[int, ...] = ()
    """Where the loss was no finite number, and the training went back to a checkpoint."""
    step_time: StepTime | None = None
    """Of `train.traced_steps` after the last one."""
    traced_seconds: float = 0.0
    """What looking at these took, which is no time of the training's."""

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


class EvaluationResult(Record):
    """What `evaluate` leaves: the test split's metrics of one checkpoint. Rows of the matrix are true classes."""

    run_id: str
    checkpoint: str
    step: int
    num_examples: int
    strategy: str
    """Under which the outputs were computed."""
    examples_by_device: dict[str, int] = {}
    """How many examples really lay on each device. With several devices a replica, or a short last batch on JAX, some
    lie on more than one."""
    metrics: dict[str, float]
    lower_is_better: tuple[str, ...]
    """Those of which less is better; the code of the user's own metrics says it."""
    classes: tuple[ClassMetrics, ...]
    """Or labels; nothing for a regression."""
    confusion_matrix: tuple[tuple[int, ...], ...]
    """Nothing for other tasks than a classification."""
    predictions: tuple[tuple[float, float], ...] = ()
    """Of a regression's first number: what the first test examples have, and what the model gives."""
    outputs: Place
    """What the model gave for each test example: an .npz of ``labels`` and ``outputs``, float32, see
    ``tasks/evaluation/predictions.py``."""
    outputs_sha256: str
    """Of that file."""
    test_rows: str
    """Which test rows these are: two evaluations that have it in common can be compared example by example."""


class Judgement(Record):
    """Whether the alias `champion` moved to a model version, and why."""

    promoted: bool
    reason: str
    """One sentence, with the figures."""
    forced: bool = False
    """Whether it moved because somebody said so, whatever the evidence."""
    against: str | None = None
    """The version that was the champion."""
    scored_again: bool = False
    """Whether the champion's outputs were computed for the present test rows, because it was evaluated on others."""
    metric: str | None = None
    """What was compared, `register.metric`; the figures below are of it, None where nothing could be compared."""
    candidate: float | None = None
    champion: float | None = None
    difference: float | None = None
    """By how much the candidate is better; below 0 it is worse."""
    interval: tuple[float, float] | None = None
    """Of the difference, at `register.confidence`."""
    test: Literal["McNemar", "paired bootstrap"] | None = None
    p_value: float | None = None
    """How likely so large a difference is where the candidate is no better."""
    num_examples: int | None = None
    """Test rows that both were measured on."""

    @property
    def told(self) -> str:
        """Which version is the champion, and why, as a table has it."""
        who = "this version" if self.promoted else f"version {self.against}" if self.against else "none"
        return f"{who}: {self.reason}"


class RegisteredModel(Record):
    """What `register` leaves. Without a version, `reason` says why there is none."""

    run_id: str
    model_uri: str | None
    model_name: str
    model_version: str | None
    aliases: tuple[str, ...]
    reason: str | None
    notes: tuple[str, ...] = ()
    """What is remarkable about the version: it was there before, or its alias moved to a worse model."""
    judgement: Judgement | None = None
    """Whether it is the champion, and why; None without a version."""


class RolledBack(Record):
    """What `rollback` leaves: the alias `champion` is again where it was before."""

    model_name: str
    before: str | None
    """The version that had the alias; None where nobody had it any more."""
    now: str
    missing: tuple[str, ...] = ()
    """Versions in between that are no longer there."""
    loaded_back: str
    """What was seen of the version that has the alias now, before it got it: a sentence."""


class LoggedModel(Record):
    """A model in MLflow, by what it was logged from."""

    run_id: str
    keras_file_sha256: str


class ModelVersion(Record):
    """A version in MLflow's registry."""

    name: str
    version: str
    aliases: tuple[str, ...]
    run_id: str | None
    """Of the run in mlruns/ that it was made of, or as MLflow calls that; None where it says nothing of a run."""
    tags: dict[str, str]


class TensorShape(Record):
    """What a model takes or gives; None is a dimension of any size, such as the batch."""

    name: str | None = Field(default=None, exclude_if=lambda value: value is None)
    shape: tuple[int | None, ...]
    dtype: str


class ExportedModel(Record):
    """What `export` leaves in export.json, beside the files of a model that was trained."""

    format: str
    run_id: Name
    dataset: str
    checkpoint: str
    """Whose weights it has."""
    model_digest: str
    """Of its weights, its layers and the user's own code of them; the model's version in MLflow has it as a tag."""
    weights_digest: str
    data_version: str | None
    """Of what it was trained on."""
    git_commit: str | None
    """At which it was trained."""
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    num_examples: int
    """How many examples of the test split were given to Keras and to the files."""
    max_difference: float
    """By which an output of the two differed at most; of a regression in standard deviations of its target."""
    metrics: dict[str, float] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Of the files on those examples, where the format rounds the weights; ``keras_metrics`` those of Keras."""
    keras_metrics: dict[str, float] | None = Field(default=None, exclude_if=lambda value: value is None)
    files: dict[str, str]
    """The sha256 of each, by its path from the folder of this file."""
    folder: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """Where that lies; not in the file itself, which may be copied elsewhere."""


class PredictionRequest(Record):
    """What `stratagem predict` asks the process that computes. Paths are from ``folder``."""

    model: str
    """See ``trained_models.find_trained_model``."""
    inputs: tuple[str, ...]
    """Files and folders; ``-`` is what comes through the descriptor ``stdin``."""
    folder: str
    """Where the command was given, absolute."""
    stdin: int | None = None
    to: str | None = None
    """The file that the predictions are written to, absolute."""
    stdout: int | None = None
    """The descriptor that they are written to; without it, and without ``to``, only the first ones are printed."""
    format: str
    """A key of ``prediction_files.WRITERS``."""
    top_k: int
    probabilities: bool
    batch_size: int | None
    """None is as many as 8 MiB hold, up to 1,024."""
    encoding: str
    """Of texts in files."""


class ServingRequest(Record):
    """What `stratagem serve-model` asks the process that serves."""

    model: str
    """See ``trained_models.find_trained_model``."""
    port: int
    """0 is any that is free."""
    poll_seconds: float
    """How often the alias is looked up."""


class Serving(Record):
    """What that process tells when it answers."""

    port: int
    model: str


class Predicted(Record):
    """What `stratagem predict` leaves."""

    model: str
    num_examples: int
    num_failed: int
    """Of these, how many have an error in place of a prediction."""
    counts: dict[str, int]
    """How many examples each class was predicted for; nothing for a regression."""
    first: tuple[dict[str, Any], ...]
    """The first ones, as the file has them."""
    devices: tuple[str, ...]
    """Where it was computed."""
    seconds: float
    """Without the start of the process."""
    output: str | None = None

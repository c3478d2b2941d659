"""The small frozen records that cross from one stage to the next. Never a tensor, a dataset or a model."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks import files
from tasks.errors import UserError

# What becomes part of a path: a record that was edited must not lead out of mlruns/, where files are read and removed.
Name = Annotated[str, Field(pattern=r"^[^./][^/]*$")]
Place = Annotated[str, Field(pattern=r"^mlruns(/[^./][^/]*)+$")]
"""A file or folder in mlruns/, from the project's folder."""


class Record(BaseModel):
    """A frozen value that is JSON on disk and between processes. Paths in it are relative to the project's folder."""

    # A loss that is not a number is written as "NaN": JSON has no number for it, and null would not be read back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class SourceFile(Record):
    """An archive that a dataset is built from, as TFDS registers it."""

    url: str
    sha256: str
    num_bytes: int


class DatasetManifest(Record):
    """What `download` leaves in data/<name>/raw: a TFDS dataset that is complete and whose archives were verified."""

    name: str
    version: str
    tfds_version: str
    folder: str
    image_shape: tuple[int | None, int | None, int]
    num_classes: int
    class_names: tuple[str, ...]
    num_examples: dict[str, int]
    sources: tuple[SourceFile, ...]
    licence: str | None


class PreparedSplit(Record):
    """One split as two memory-mappable arrays: images uint8 (n, height, width, channels), labels int64 (n,)."""

    num_examples: int
    images: str
    labels: str
    sha256: dict[str, str]
    class_counts: tuple[int, ...]
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]


class HeldOut(Record):
    """The test split that `prepare` took from the training split of a dataset that has none."""

    num_examples: int
    seed: int


class PreparedDataset(Record):
    """What `prepare` leaves in data/<name>/prepared/manifest.json. Mean and deviation are of the values 0..255."""

    name: str
    version: str
    tfds_version: str
    folder: str
    raw_folder: str
    image_shape: tuple[int, int, int]
    num_classes: int
    class_names: tuple[str, ...]
    splits: dict[str, PreparedSplit]
    sources: tuple[SourceFile, ...]
    licence: str | None
    # Left out where there is none, so that the manifests of all other datasets keep their bytes.
    held_out: HeldOut | None = Field(default=None, exclude_if=lambda value: value is None)
    data_version: str | None = None
    """The md5 of the prepared folder in DVC's lock; not in the file itself, which is part of that md5."""


class Lineage(Record):
    """Where a run comes from."""

    git_commit: str | None
    git_dirty: bool | None
    code_digest: str
    settings_digest: str
    data_version: str | None


class CodeMeanings(Record):
    """What Python makes of the project's files (``lineage.meaning``); kept, because parsing all of them takes 0.3 s."""

    by_bytes: dict[str, str]
    """By the sha256 of the file's bytes."""


class Run(Record):
    """A run that has an MLflow run and a folder mlruns/runs/<run_id>."""

    run_id: Name
    experiment: str
    name: str
    folder: Place
    lineage: Lineage
    settings: dict[str, Any]
    """What it was started with, nested as in params.yaml: a later stage reads the model and the input from here."""
    flow_run_id: str | None = None
    parent_run_id: Name | None = None
    """The comparison that it belongs to."""
    number: int = 0
    """Rises with each run that is begun or taken up here, whatever the clock says."""
    start_time: int = 0
    """In milliseconds since 1970."""
    key: Literal[""] | Name = ""
    """What the process that leads it holds, see ``runs.hold``."""
    host: str = ""
    """Where that process is."""
    boot: str = ""
    """That machine, from its start to its end; see ``runs.boot_id``."""
    project: str = ""
    """The folder where it was begun or taken up last, see ``runs.project_id``; empty in records of before."""
    store: str = ""
    """MLFLOW_TRACKING_URI; empty for the project's own store."""
    creation_id: str = ""
    """A tag of the MLflow run that is this one's: the reply to its creation may be lost, and it must be found again."""


class RunStatus(Record):
    """Whether a run is at work or how it ended, as MLflow says it too."""

    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
    reason: str | None
    at: str


class Holder(Record):
    """The process that leads a run."""

    key: Name
    """What two commands that would do the same have in common."""
    pid: int
    host: str
    boot: str = ""
    """The machine, from its start to its end; see ``runs.boot_id``."""
    process_space: str = ""
    """Among which processes ``pid`` names one, see ``runs.process_space``; empty in notes of before."""
    since: str
    what: str
    run_id: Name | None = None
    flow_run_id: str | None = None


class Ended(Record):
    """What was left open by a process that died, and was ended."""

    what: str
    """Such as `MLflow run 0123abcd`."""
    status: str
    reason: str


class FlowEnd(Record):
    """How a flow run ended that its Prefect server still takes for running."""

    flow_run_id: str
    state: Literal["COMPLETED", "FAILED", "CANCELLED"]
    message: str


class NonFinite(Record):
    """A run's mark: its loss was no finite number."""

    steps: tuple[int, ...]


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


class TrainingResult(Record):
    """What `train` leaves: the checkpoints, the exported models and what the training was like."""

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
    strategy: str = "one_device"
    """Under which the outputs were computed; older records have none, and were."""
    examples_by_device: dict[str, int] = {}
    """How many examples really lay on each device. With several devices a replica, or a short last batch on JAX, some
    lie on more than one."""
    metrics: dict[str, float]
    classes: tuple[ClassMetrics, ...]
    confusion_matrix: tuple[tuple[int, ...], ...]


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


class RunSummary(Record):
    """One whole run, as `stratagem run --json` prints it and mlruns/runs/<run_id>/summary.json keeps it."""

    run_id: str
    status: Literal["FINISHED"] = "FINISHED"
    flow_run_id: str | None
    git_commit: str | None
    git_dirty: bool | None
    code_digest: str
    settings_digest: str
    data_version: str | None
    dataset: str
    strategy: str
    loop: str
    num_replicas: int
    epochs: int
    steps: int
    examples_per_second: float | None
    metrics: dict[str, float]
    checkpoint: str
    weights_digest: str
    model_uri: str | None
    model_version: str | None
    aliases: tuple[str, ...]
    reason: str | None = None
    """Why there is no model version."""
    notes: tuple[str, ...] = ()
    """What is remarkable about the model version."""
    seconds: dict[str, float]
    finished_at: str


class Repeat(Record):
    """One of the trainings that a row of a comparison is made of."""

    run_id: Name
    """Its MLflow run, a child of the comparison's."""
    round: int
    """Each round trains all rows once, so that rows of one round met the same machine."""
    examples_per_second: float | None
    total_seconds: float
    load: float
    """How many processor cores other programs kept busy meanwhile, on average."""


class ComparisonRow(Record):
    """One strategy under one loop: what was measured, or in `reason` why it did not work. Figures are the medians of
    the repeats."""

    strategy: str
    loop: str | None
    """None for a strategy that none of the loops drives."""
    reason: str | None = None
    run_id: Name | None = None
    """Its first MLflow run, a child of the comparison's; None when it was refused before there was one."""
    repeats: tuple[Repeat, ...] = ()
    failures: tuple[str, ...] = ()
    """Why later repeats failed."""
    devices: tuple[str, ...] = ()
    num_replicas: int | None = None
    steps: int | None = None
    metrics: dict[str, float] = {}
    examples_per_second: float | None = None
    seconds_per_epoch: float | None = None
    """Mean of the epochs after the first; of a single epoch, what is left of it without its first call."""
    total_seconds: float | None = None
    """From the start of the processes to the end of the evaluation."""
    speed_up: float | None = None
    """Times the examples/s of `one_device` under the same loop, or under another where there is no such row: the median
    of the rounds."""
    speed_up_range: tuple[float, float] | None = None
    """The lowest and the highest of the rounds; None where there was only one, which says nothing of chance."""
    efficiency: float | None = None
    """`speed_up` by the number of devices, which is that of the replicas but for `model_parallel`, where a replica has
    several, and `parameter_server`, where each worker does steps of its own."""
    start_seconds: float | None = None
    """The start of the processes: imports, devices, checks, and the beginning of the MLflow run."""
    setup_seconds: float | None = None
    """From there to the first training step: model, variables, input."""
    tracing_seconds: float | None = None
    """The first call of the step function."""
    restarts: tuple[str, ...] = ()
    """Why its processes were started again."""

    @property
    def differs(self) -> bool:
        """Whether every round agrees that it is faster than `one_device`, or that it is slower."""
        return self.speed_up_range is not None and not self.speed_up_range[0] <= 1 <= self.speed_up_range[1]


class Comparison(Record):
    """The same training under several strategies, as `stratagem compare --json` prints it."""

    run_id: str
    """The parent of the rows' MLflow runs."""
    folder: str
    """Where this record lies as comparison.json, beside the same table as CSV and as a Markdown page."""
    flow_run_id: str | None
    git_commit: str | None
    data_version: str | None
    dataset: str
    model: str
    seed: int
    epochs: int
    global_batch_size: int
    num_cores: int
    """Processor cores that this process may use."""
    rounds: int = 1
    """How often each row was trained."""
    rows: tuple[ComparisonRow, ...]
    left_out: tuple[str, ...]
    """Pairs of strategy and loop that do not exist, where the strategy has another row."""
    note: str | None
    """What the figures of this machine cannot show."""
    seconds: float
    finished_at: str


R = TypeVar("R", bound=Record)


def save(record: Record, path: Path) -> Path:
    """Write a record as JSON under a temporary name, flush it, and rename it: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def load(kind: type[R], path: Path) -> R:
    """Return the record in a JSON file.

    Raises:
        UserError: the file is missing or is not such a record.
    """
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the stage that writes it has not finished") from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{path} is not a readable {kind.__name__} ({first}): run the stage that writes it again"
        ) from None

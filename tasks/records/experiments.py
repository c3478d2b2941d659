"""Many trainings: a comparison of strategies, a sweep over settings, and a plan for many machines."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from tasks.records.record import Name, Record
from tasks.records.results import StepTime
from tasks.records.runs import RunSummary


class Repeat(Record):
    """One training of a row of a comparison."""

    run_id: Name
    """Its MLflow run, a child of the comparison's."""
    round: int
    """Each round trains every row once, so that its rows share the state of the machine."""
    examples_per_second: float | None
    total_seconds: float
    load: float
    """The average number of processor cores that other programs used meanwhile."""
    peak_memory_bytes: int | None = None
    """The sum of its processes' peak memory."""
    start_up_seconds: float
    """From the start of the processes to the first training step: imports, devices, checks, the start of the MLflow
    run, model, variables, input."""
    step_time: StepTime | None = None


class ComparisonRow(Record):
    """One strategy under one loop: its figures, or in `reason` why it failed. Speeds, seconds and bytes are medians of
    the repeats."""

    strategy: str
    loop: str | None
    """None for a strategy that no loop supports."""
    reason: str | None = None
    run_id: Name | None = None
    """Its first MLflow run, a child of the comparison's; None if it was refused before that."""
    repeats: tuple[Repeat, ...] = ()
    failures: tuple[str, ...] = ()
    """Why later repeats failed."""
    devices: tuple[str, ...] = ()
    num_replicas: int | None = None
    steps: int | None = None
    metrics: dict[str, float] = {}
    """Of the first training of the row."""
    metric_ranges: dict[str, tuple[float, float]] = {}
    """The lowest and the highest value of each metric in the rounds, each with its own seed; empty after one round."""
    intervals: dict[str, tuple[float, float]] = {}
    """The 95% bootstrap interval of each metric that has one, from the first training of the row."""
    differences: dict[str, tuple[float, float]] = {}
    """The 95% interval of the difference between each metric and that of the row it is compared with
    (`comparison.metric_base`), on the same test examples."""
    peak_memory_bytes: int | None = None
    step_time: StepTime | None = None
    """The step time of the round with the median step."""
    examples_per_second: float | None = None
    seconds_per_epoch: float | None = None
    """The mean of the epochs after the first; for a single epoch, its time without the first call."""
    total_seconds: float | None = None
    """From the start of the processes to the end of the evaluation."""
    speed_up: float | None = None
    """The examples/s divided by those of `one_device`, if possible under the same loop: the median of the rounds."""
    speed_up_range: tuple[float, float] | None = None
    """The lowest and the highest of the rounds; None after a single round."""
    efficiency: float | None = None
    """`speed_up` divided by the number of devices. That is the number of replicas, except under `model_parallel`,
    where a replica has several devices, and `parameter_server`, where each worker takes its own steps."""
    start_up_seconds: float | None = None
    tracing_seconds: float | None = None
    """The duration of the first call of the step function."""
    restarts: tuple[str, ...] = ()
    """The reasons why its processes were restarted."""

    @property
    def name(self) -> str:
        """The name of the row in tables."""
        return f"{self.strategy}, {self.loop}"

    @property
    def differs(self) -> bool:
        """Whether every round agrees that it is faster than `one_device`, or that it is slower."""
        return self.speed_up_range is not None and not self.speed_up_range[0] <= 1 <= self.speed_up_range[1]


class Comparison(Record):
    """The same training under several strategies, as `stratagem compare --json` prints it."""

    remedy: ClassVar[str] = "run the command again with --fresh"
    run_id: str
    """The parent of the rows' MLflow runs."""
    folder: str
    """The folder of this record (comparison.json) and of the same table as CSV, Markdown and HTML."""
    flow_run_id: str | None
    git_commit: str | None
    data_version: str | None
    dataset: str
    model: str
    seed: int
    epochs: int
    global_batch_size: int
    num_cores: int
    """The processor cores that this process may use."""
    rounds: int = 1
    """The number of times each row was trained."""
    rows: tuple[ComparisonRow, ...]
    left_out: tuple[str, ...]
    """Pairs of strategy and loop that do not exist, for strategies with another row."""
    note: str | None
    """What the figures from this machine cannot show."""
    finding: tuple[str, ...] = ()
    """The conclusions from the figures."""
    seconds: float
    finished_at: str


class ComparisonProgress(Record):
    """The trainings that a running comparison has measured, each as a row; after a kill, it continues from here."""

    rows: tuple[ComparisonRow, ...]


class Limits(Record):
    """The values that a trial of a sweep must reach to continue."""

    metric: str
    lower_is_better: bool
    by_epoch: dict[int, float] = {}
    """The worst allowed value of the metric by number of epochs."""

    def missed(self, values: Sequence[float]) -> int | None:
        """Return the number of epochs after which a trial with these values ends; None if it continues."""
        sign = 1 if self.lower_is_better else -1
        for epoch, limit in sorted(self.by_epoch.items()):
            if epoch <= len(values) and sign * values[epoch - 1] > sign * limit:
                return epoch
        return None


class Trial(Record):
    """One training of a sweep."""

    pruned_because: ClassVar[str] = "pruned after epoch"
    """How the reason of a pruned trial begins, also in the status of its run."""
    number: int
    """From 0, in the order in which the trials were suggested."""
    state: Literal["running", "complete", "pruned", "failed"]
    """Also `running` if its process was killed: the same command continues it."""
    params: dict[str, Any]
    """Its values of the swept settings."""
    value: float | None = None
    """The sweep's metric; for a pruned trial, its value when the trial ended."""
    values: tuple[float, ...] = ()
    """The metric after each epoch."""
    run_id: Name | None = None
    """Its MLflow run, a child of the sweep's; None if it was refused, or repeats an earlier trial."""
    same_as: int | None = None
    """The earlier trial with the same parameters, whose result it takes without training."""
    reason: str | None = None
    """Why it failed, or was pruned."""
    seconds: float | None = None


class SweepPlan(Record):
    """What two sweeps must share so that their trials have the same parameters."""

    name: str
    """The name of the space's file, without its extension."""
    space: dict[str, Any]
    """The space as in the file, with defaults filled in."""
    metric: str
    lower_is_better: bool
    parallel: int
    sampler: str
    """The sampler that suggests the parameters, with its version."""


class Sweep(Record):
    """A whole sweep, as `stratagem sweep --json` prints it."""

    remedy: ClassVar[str] = "run the command again with --fresh"
    run_id: str
    """The parent of the trials' MLflow runs."""
    folder: str
    """The folder of this record (sweep.json), the trials as CSV, a page, and Optuna's database."""
    flow_run_id: str | None
    git_commit: str | None
    data_version: str | None
    dataset: str
    model: str
    plan: SweepPlan
    trials: tuple[Trial, ...]
    best: int | None
    """The number of the best trial; None if no trial finished."""
    importance: dict[str, float] = {}
    """The share of the variance that each parameter explains; empty for too few trials."""
    best_settings: dict[str, Any] = {}
    """The settings of the final training: the best trial's parameters, and those that train on all examples."""
    final: RunSummary | None = None
    """The run that trained these on training and validation examples together, and that the gate judged; None before
    that."""
    seconds: float
    """The duration of this command, without earlier ones if the sweep was killed."""
    finished_at: str


class Pace(Record):
    """The time of a step on one device, and of a checkpoint, on this machine."""

    parameters: int
    """The number of trainable parameters."""
    examples: int
    """The number of examples in a step."""
    step_seconds: tuple[float, ...]
    """The duration of each call divided by the steps in it."""
    checkpoint_seconds: float
    """The time that the training waits; the file is written in the background."""
    device: str


class ScalingPlan(Record):
    """The prediction of `stratagem plan`."""

    workers: int
    devices: int
    """The number of devices of each worker."""
    communication: str
    """`ring`: TensorFlow's over gRPC, as measured; `nccl`: the textbook's ring."""
    bandwidth: float
    """In bits per second."""
    latency_seconds: float
    parameters: int
    gradient_bytes: int
    global_batch_size: int
    step_seconds: float
    parts_seconds: dict[str, float]
    """The parts of a step: `computing`, `bandwidth`, `latency`, `software`."""
    bottleneck: str
    """The largest part."""
    examples_per_second: float
    efficiency: float
    """The share of a step that is spent computing."""
    failures_a_day: float | None = None
    """Failures of all machines together; null, like the restart and the goodputs, without a time between failures."""
    checkpoint_seconds: float | None = None
    """The time that a training waits for a checkpoint; null if it is neither given nor measured."""
    restart_seconds: float | None = None
    interval_seconds: float | None = None
    """The time between two checkpoints; null if the settings do not give it in steps, or if a checkpoint's cost is
    unknown."""
    checkpoint_share: float | None = None
    """The share of time that a training without failures waits for checkpoints, with that interval."""
    goodput: float | None = None
    """The share of time spent on steps that count in the end, with that interval."""
    best_interval_seconds: float | None = None
    best_goodput: float | None = None
    ranges: dict[str, tuple[float, float]]
    """The bounds of predicted values, by name; those of `goodput` with half and twice the time between failures, and
    with the range of a step if the interval is in steps."""

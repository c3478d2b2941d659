"""Many trainings: a comparison of strategies, a sweep over settings, and a plan for many machines."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from tasks.records.record import Name, Record
from tasks.records.results import StepTime
from tasks.records.runs import RunSummary


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
    sitting: int = 1
    """In which go of the comparison: one that was killed and goes on is in its second."""
    peak_memory_bytes: int | None = None
    """What its processes had of the memory, each at its most, added up."""
    start_up_seconds: float
    """From the start of the processes to the first training step."""
    step_time: StepTime | None = None


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
    intervals: dict[str, tuple[float, float]] = {}
    """The 95 % bootstrap interval of each metric that has one: of the first of its trainings."""
    differences: dict[str, tuple[float, float]] = {}
    """The 95 % interval of how much more each of these is than that of the row which they are held against
    (`findings.metric_base`), on the same test examples."""
    peak_memory_bytes: int | None = None
    peak_memory_range: tuple[int, int] | None = None
    """The lowest and the highest of the rounds, in bytes; None where there was only one."""
    step_time: StepTime | None = None
    """Of the round with the median step."""
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
    """The start of the processes: imports, devices, checks, and the start of the MLflow run."""
    setup_seconds: float | None = None
    """From there to the first training step: model, variables, input."""
    start_up_seconds: float | None = None
    """Both together, the median of the rounds."""
    start_up_range: tuple[float, float] | None = None
    """The lowest and the highest of the rounds, as `peak_memory_range`."""
    tracing_seconds: float | None = None
    """The first call of the step function."""
    restarts: tuple[str, ...] = ()
    """Why its processes were started again."""

    @property
    def name(self) -> str:
        """What tells it from the other rows."""
        return f"{self.strategy}, {self.loop}"

    @property
    def differs(self) -> bool:
        """Whether every round agrees that it is faster than `one_device`, or that it is slower."""
        return self.speed_up_range is not None and not self.speed_up_range[0] <= 1 <= self.speed_up_range[1]


class Comparison(Record):
    """The same training under several strategies, as `stratagem compare --json` prints it."""

    remedy: ClassVar[str] = "give the command again with --fresh"
    run_id: str
    """The parent of the rows' MLflow runs."""
    folder: str
    """Where this record lies as comparison.json, beside the same table as CSV, as a Markdown page and as HTML."""
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
    finding: tuple[str, ...] = ()
    """What follows from the figures, a sentence each."""
    seconds: float
    finished_at: str


class ComparisonProgress(Record):
    """What a comparison that is at work has measured: each training as a row of its own. One that was killed goes on
    from here."""

    sitting: int
    """How often it was begun or gone on with."""
    rows: tuple[ComparisonRow, ...]


class Limits(Record):
    """What a trial of a sweep must reach to be trained on."""

    metric: str
    lower_is_better: bool
    by_epoch: dict[int, float] = {}
    """After so many epochs the metric must be as good as this."""

    def missed(self, values: Sequence[float]) -> int | None:
        """Return after how many epochs a trial ends, because its metric is worse; None where it is trained on.

        Args:
            values: of the metric, one a whole epoch.
        """
        sign = 1 if self.lower_is_better else -1
        for epoch, limit in sorted(self.by_epoch.items()):
            if epoch <= len(values) and sign * values[epoch - 1] > sign * limit:
                return epoch
        return None


class Trial(Record):
    """One training of a sweep."""

    number: int
    """From 0 on, in the order in which they were suggested."""
    state: Literal["running", "complete", "pruned", "failed"]
    """`running`, too, of one whose process was killed: the same command trains it on."""
    params: dict[str, Any]
    """The settings that it has of the space."""
    value: float | None = None
    """Of the sweep's metric; of a pruned one, where it ended."""
    values: tuple[float, ...] = ()
    """Of the metric after each epoch."""
    run_id: Name | None = None
    """Its MLflow run, a child of the sweep's; None of one that was refused, and of a copy."""
    same_as: int | None = None
    """The earlier trial with the same parameters whose result it has: nothing was trained again."""
    reason: str | None = None
    """Why it failed, or was pruned."""
    seconds: float | None = None


class SweepPlan(Record):
    """What makes two sweeps the same: each trial of them has the same parameters."""

    name: str
    """The file of the space, without its ending."""
    space: dict[str, Any]
    """As the file says it, with what is left out there."""
    metric: str
    lower_is_better: bool
    parallel: int
    sampler: str
    """Whose suggestions they are, with its version."""


class Sweep(Record):
    """A whole sweep, as `stratagem sweep --json` prints it."""

    remedy: ClassVar[str] = "give the command again with --fresh"
    run_id: str
    """The parent of the trials' MLflow runs."""
    folder: str
    """Where this record lies as sweep.json, beside the trials as CSV, a page, and Optuna's own database."""
    flow_run_id: str | None
    git_commit: str | None
    data_version: str | None
    dataset: str
    model: str
    plan: SweepPlan
    trials: tuple[Trial, ...]
    best: int | None
    """The number of the best trial; None where none was trained to its end."""
    importance: dict[str, float] = {}
    """By parameter, what part of the differences between the values it explains; nothing of too few trials."""
    best_settings: dict[str, Any] = {}
    """Of the final training: what it has of the best trial's parameters, and what was changed to train on all."""
    final: RunSummary | None = None
    """The best trial's settings, trained again on training and validation examples together, evaluated on the test
    split and put through the gate; None before that is done."""
    seconds: float
    """Of this command; a sweep that was killed has lost the earlier ones."""
    finished_at: str


class Pace(Record):
    """What one device takes for a step, and a training for a checkpoint, on this machine."""

    parameters: int
    """That are trained."""
    examples: int
    """In a step."""
    step_seconds: tuple[float, ...]
    """Of each call, by the steps in it."""
    checkpoint_seconds: float
    """What the training waits; the file is written beside it."""
    device: str


class ScalingPlan(Record):
    """What `stratagem plan` predicts; each range is what it may be as well."""

    workers: int
    devices: int
    """Of each worker."""
    communication: str
    """`ring`: TensorFlow's over gRPC, as measured; `nccl`: a ring by the textbook."""
    bandwidth: float
    """Bits a second."""
    latency_seconds: float
    parameters: int
    gradient_bytes: int
    global_batch_size: int
    step_seconds: float
    step_seconds_range: tuple[float, float]
    parts_seconds: dict[str, float]
    """Of a step: `computing`, `bandwidth`, `latency`, `software`."""
    bottleneck: str
    """The largest of the parts."""
    examples_per_second: float
    examples_per_second_range: tuple[float, float]
    efficiency: float
    """The share of a step that computes."""
    efficiency_range: tuple[float, float]
    failures_a_day: float | None = None
    """Of all machines together; null without a time between failures, as the restart and the goodputs are."""
    checkpoint_seconds: float | None = None
    """What a training waits for one; null where it is neither given nor measured."""
    restart_seconds: float | None = None
    interval_seconds: float | None = None
    """Between two checkpoints of the settings; null where these do not say it in steps, or a checkpoint's cost is
    not known."""
    checkpoint_share: float | None = None
    """The share of the time in which nothing fails that a training waits for checkpoints, with that interval."""
    checkpoint_share_range: tuple[float, float] | None = None
    goodput: float | None = None
    """The share of all time whose steps count in the end, with that interval."""
    goodput_range: tuple[float, float] | None = None
    """With half and twice the time between failures, and with the range of the step where the interval is in steps."""
    best_interval_seconds: float | None = None
    best_goodput: float | None = None
    best_goodput_range: tuple[float, float] | None = None

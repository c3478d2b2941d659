"""The same training under several strategies."""

from typing import ClassVar

from tasks.records.record import Name, Record
from tasks.records.results import StepTime


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

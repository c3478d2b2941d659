"""Records of a run: its origin, the process that trains it, how it ended, its results; and lists of runs."""

from typing import Any, ClassVar, Literal

from tasks.records.record import Inside, Name, Place, Record
from tasks.records.results import Judgement, RegisteredModel, TrainingResult
from tasks.system.errors import shown


class Lineage(Record):
    """The origin of a run."""

    git_commit: str | None
    git_dirty: bool | None
    code_digest: str
    settings_digest: str
    data_version: str | None
    package_version: str | None = None
    """Stratagem's version if the project contains none of its code. The commit is then that of the settings and the
    user's code, and the code digest that of the package."""

    @property
    def commit(self) -> str:
        """The commit for people."""
        return f"{self.git_commit or 'none'}{' with uncommitted changes' if self.git_commit and self.git_dirty else ''}"


class Changed(Record):
    """A difference from a step on, because a command resumed the training with another value."""

    step: int
    """The last step before the change."""
    kind: Literal["settings", "code", "data", "environment", "machine"]
    what: str
    """Such as ``train.epochs`` or ``tensorflow``."""
    before: Any
    now: Any
    affects: Literal["result", "speed"]
    """``speed`` affects at most the last bits of the result."""

    @property
    def values(self) -> str:
        """Both values in words."""
        before, now = (
            str(one)[:12] if self.kind in ("code", "data") else shown(one) for one in (self.before, self.now)
        )
        return f"{before} up to step {self.step:,}, then {now}"


class CodeMeanings(Record):
    """Digests of the syntax trees of the project's files (``lineage.meaning``), cached because parsing takes 1 s."""

    by_bytes: dict[str, str]
    """Each digest by the sha256 of the file's bytes."""


class Run(Record):
    """A run, with an MLflow run and a folder mlruns/runs/<run_id>; its format number covers all files there."""

    remedy: ClassVar[str] = "start the run again with --fresh, or remove its folder"
    run_id: Name
    experiment: str
    name: str
    folder: Place
    lineage: Lineage
    settings: dict[str, Any]
    """The settings at its start, nested as in params.yaml; later stages read them from here."""
    flow_run_id: str | None = None
    parent_run_id: Name | None = None
    """The comparison or sweep that it belongs to."""
    number: int = 0
    """Rises with each run that is started or resumed in this project, independently of the clock."""
    start_time: int = 0
    """In milliseconds since 1970."""
    key: Literal[""] | Name = ""
    """The key of its process's lock, see ``locks.lock``."""
    host: str = ""
    """The host of that process."""
    boot: str = ""
    """The id of that machine's boot, see ``locks.boot_id``."""
    project: str = ""
    """The project in which it was last started or resumed, see ``locks.project_id``."""
    store: str = ""
    """MLFLOW_TRACKING_URI; empty for the project's own store."""
    environment: dict[str, str] = {}
    """The environment in which it was started or resumed, see ``machine.surroundings``."""
    changed: tuple[Changed, ...] = ()
    """Differences from its start, in the order of the resumes."""

    @property
    def dataset(self) -> str:
        """The name of its dataset."""
        return str(self.settings["dataset"]["name"])

    @property
    def model(self) -> str:
        """The name of its model."""
        return str(self.settings["model"]["name"])

    @property
    def strategy(self) -> str:
        """The kind of its strategy."""
        return str(self.settings["strategy"]["kind"])

    @property
    def loop(self) -> str:
        """Its training loop."""
        return str(self.settings["train"]["loop"])


class RunStatus(Record):
    """Whether a run is active or how it ended, in MLflow's terms."""

    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
    reason: str | None
    at: str


class Holder(Record):
    """The process that works on a run."""

    key: Name
    """The same for two commands that would do the same work."""
    pid: int
    host: str
    boot: str = ""
    """The id of the machine's boot, see ``locks.boot_id``."""
    since: str
    what: str
    run_id: Name | None = None
    flow_run_id: str | None = None


class Ended(Record):
    """Something that a dead process left unfinished and another process ended."""

    what: str
    """Such as `MLflow run 0123abcd`."""
    status: str
    reason: str


class FlowEnd(Record):
    """The end of a flow run that its Prefect server still considers running."""

    flow_run_id: str
    state: Literal["COMPLETED", "FAILED", "CANCELLED"]
    message: str


class NonFinite(Record):
    """Marks a run whose loss was not finite."""

    steps: tuple[int, ...]


class Pruned(Record):
    """Marks a run whose checkpoints and models were removed to free disk space."""

    at: str
    num_bytes: int


class RunSummary(Lineage):
    """A finished run: the output of `stratagem run --json`, and mlruns/runs/<run_id>/summary.json."""

    run_id: str
    status: Literal["FINISHED"] = "FINISHED"
    flow_run_id: str | None
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
    """Remarks about the model version."""
    judgement: Judgement | None = None
    """Whether the model version is the champion, and why."""
    seconds: dict[str, float]
    finished_at: str


class Copy(Record):
    """The content of a run's remote; written after everything that it names."""

    project: str
    """The project (``locks.project_id``) that trains the run; only this project may write there."""
    host: str
    at: str
    """The time of writing."""
    texts: dict[Inside, str]
    """The run's records and other small files, by their paths in its folder."""
    files: dict[Inside, str]
    """The sha256 of each other file, such as ``models/final.keras``, and of those of checkpoints."""


class MetricPair(Record):
    """A test metric of two runs. Intervals are 95%; None if unknown."""

    first: float | None
    second: float | None
    first_interval: tuple[float, float] | None = None
    second_interval: tuple[float, float] | None = None
    difference: float | None = None
    """The second value minus the first."""
    difference_interval: tuple[float, float] | None = None
    """On the same test rows; None if the runs have different test rows, or it is unknown."""


class Change(Record):
    """A difference between today and the training of a run."""

    kind: Literal["code", "settings", "data", "environment", "machine"]
    what: str
    """Such as ``train.epochs`` or ``tensorflow``."""
    then: str | None
    now: str | None
    effect: Literal["restored", "matters", "cannot be restored"]
    """``matters``: it differs and may change the numbers; ``restored``: the run uses its own value again."""


class Reproduction(Record):
    """The output of `stratagem runs reproduce --json`, and records/reproduction.json of the new run."""

    run_id: Name
    """The run to reproduce."""
    changes: tuple[Change, ...]
    reproduced_by: Name | None = None
    """The run that was trained to reproduce it, if any."""
    same: bool | None = None
    """Whether the results are the same; None if nothing was trained."""
    reason: str
    weights_digests: tuple[str, str] | None = None
    """The run's, and the new run's."""
    metrics: dict[str, MetricPair] = {}
    """The run's, and the new run's."""


class RunLine(Record):
    """A run in a list."""

    run_id: str
    name: str
    began: str
    """When it was first started."""
    ended: str | None
    status: str
    """`running`, `finished`, `failed`, or `killed`, also if its process has died without recording an end."""
    dataset: str
    model: str
    strategy: str
    loop: str
    headline: str | None
    """The name of its task's main metric, such as `test/accuracy`; None if the run was not evaluated."""
    metrics: dict[str, float]
    examples_per_second: float | None
    model_version: str | None
    """NAME/VERSION in the registry."""
    bytes: int
    """The size of its folder."""
    pruned: bool
    parent_run_id: str | None


class RunProgress(Record):
    """The progress of a running training."""

    run_id: str
    name: str
    epoch: int
    """The number of finished epochs."""
    epochs: int
    """The number of epochs of the whole training, unless it stops early."""
    seconds_left: float | None
    """Until the last epoch ends, estimated from the median of the finished ones; None before the second one ends."""


class RecentRuns(Record):
    """The runs in `stratagem status`."""

    running: tuple[RunProgress, ...]
    latest: RunLine | None
    """The newest finished run."""
    failed: dict[str, str]
    """Why runs of the last 24 hours failed, by name."""
    stopped: dict[str, str]
    """Why runs of the last 24 hours were cancelled, interrupted or killed, by name."""


class RunList(Record):
    """The output of `stratagem runs --json`."""

    runs: tuple[RunLine, ...]
    num_matching: int
    """The number of runs that match, including those beyond the limit."""
    num_runs: int
    """The number of all runs."""
    bytes: int
    """The size of mlruns/runs, of which:"""
    checkpoint_bytes: int
    model_bytes: int
    unreadable: dict[str, str]
    """Why a run's files cannot be read, by folder."""


class RunDetails(Record):
    """The output of `stratagem runs show --json`. Results of stages that did not finish are None."""

    run: RunLine
    record: Run
    reason: str | None
    """Why it failed or was killed."""
    settings: dict[str, tuple[Any, Any]]
    """Settings that differ from today's params.yaml: the run's value, and today's."""
    training: TrainingResult | None
    evaluated: str | None
    """The checkpoint that was evaluated."""
    registered: RegisteredModel | None
    seconds: dict[str, float]
    files: dict[str, int]
    """The sizes of the checkpoints and models in bytes, by their paths in the run's folder."""
    reproduction: Reproduction | None
    """Which run it was trained to reproduce, and whether it did."""


class RunDifference(Record):
    """The output of `stratagem runs diff --json`."""

    first: str
    second: str
    differences: dict[str, tuple[Any, Any]]
    """The two values by what differs, such as ``train.epochs``; None where one of the two has no value."""
    metrics: dict[str, MetricPair] = {}
    """The test metrics by name, including those that do not differ."""
    same_test_rows: bool = False
    """Whether both were evaluated on the same test rows and their outputs are stored."""


class Pruning(Record):
    """The output of `stratagem runs prune --json`."""

    dry_run: bool
    pruned: tuple[RunLine, ...]
    """With the number of removed bytes."""
    bytes: int
    """The sum of these."""
    left: dict[str, str]
    """Why a chosen run is left alone, by its id."""
    unfinished: int = 0
    """The number of runs that match but are left because they can be resumed."""
    bytes_left: int
    """The size of mlruns/runs afterwards."""

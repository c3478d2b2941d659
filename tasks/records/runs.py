"""A run: where it comes from, which process leads it, how it ended and what it gave; and runs as they are listed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from tasks.records.record import Name, Place, Record
from tasks.records.results import Judgement
from tasks.system.errors import shown


class Lineage(Record):
    """Where a run comes from."""

    git_commit: str | None
    git_dirty: bool | None
    code_digest: str
    settings_digest: str
    data_version: str | None
    package_version: str | None = None
    """Of Stratagem, where the project has no code of its own: then the commit is that of settings and of code of the
    user's own, and the code's digest that of the package."""


class Changed(Record):
    """What differs from a step on, because a command resumed the training with it."""

    step: int
    """After which it went on."""
    kind: Literal["settings", "code", "data", "environment", "machine"]
    what: str
    """Such as ``train.epochs`` or ``tensorflow``."""
    before: Any
    now: Any
    affects: Literal["result", "speed"]
    """``speed`` is what moves the last bits at most."""

    @property
    def values(self) -> str:
        """Both values, as a person reads them."""
        before, now = (
            str(one)[:12] if self.kind in ("code", "data") else shown(one) for one in (self.before, self.now)
        )
        return f"{before} up to step {self.step:,}, then {now}"


class CodeMeanings(Record):
    """What Python makes of the project's files (``lineage.meaning``); kept, because parsing all of them takes 0.3 s."""

    by_bytes: dict[str, str]
    """By the sha256 of the file's bytes."""
    sha256: str
    """Of all of them: a wrong one would be the digest of other code."""

    @model_validator(mode="after")
    def are_as_written(self) -> Self:
        if self.sha256 != self.digest(self.by_bytes):
            raise ValueError("the file has changed since it was written")
        return self

    @staticmethod
    def digest(by_bytes: Mapping[str, str]) -> str:
        """Return the sha256 of meanings."""
        return hashlib.sha256(json.dumps(sorted(by_bytes.items())).encode()).hexdigest()


class Run(Record):
    """A run that has an MLflow run and a folder mlruns/runs/<run_id>. The format of its file is that of all others in
    this folder."""

    remedy: ClassVar[str] = "start the run again with --fresh, or remove its folder"
    run_id: Name
    experiment: str
    name: str
    folder: Place
    lineage: Lineage
    settings: dict[str, Any]
    """What it was started with, nested as in params.yaml: a later stage reads the model and the input from here."""
    flow_run_id: str | None = None
    parent_run_id: Name | None = None
    """The comparison or the sweep that it belongs to."""
    number: int = 0
    """Rises with each run that is started or resumed here, whatever the clock says."""
    start_time: int = 0
    """In milliseconds since 1970."""
    key: Literal[""] | Name = ""
    """What the process at work on it holds, see ``runs.lock``."""
    host: str = ""
    """Where that process is."""
    boot: str = ""
    """That machine, from its start to its end; see ``runs.boot_id``."""
    project: str = ""
    """The folder where it was started or resumed last, see ``runs.project_id``."""
    store: str = ""
    """MLFLOW_TRACKING_URI; empty for the project's own store."""
    environment: dict[str, str] = {}
    """What it was started or resumed on, see ``machine.surroundings``."""
    changed: tuple[Changed, ...] = ()
    """What differs from how it began, in the order in which it was resumed."""
    creation_id: str = ""
    """A tag of the MLflow run that is this one's: the reply to its creation may be lost, and it must be found again."""


class RunStatus(Record):
    """Whether a run is at work or how it ended, as MLflow says it too."""

    status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
    reason: str | None
    at: str


class Holder(Record):
    """The process that works on a run."""

    key: Name
    """The same for two commands that would do the same."""
    pid: int
    host: str
    boot: str = ""
    """The machine, from its start to its end; see ``runs.boot_id``."""
    process_space: str = ""
    """Among which processes ``pid`` names one, see ``runs.process_space``."""
    since: str
    what: str
    run_id: Name | None = None
    flow_run_id: str | None = None


class Ended(Record):
    """Something that a process left open when it died, and another process ended."""

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
    """Marks a run whose loss was no finite number."""

    steps: tuple[int, ...]


class Pruned(Record):
    """Marks a run whose checkpoints and models were removed to free disk space."""

    at: str
    num_bytes: int


class RunSummary(Lineage):
    """One whole run, as `stratagem run --json` prints it and mlruns/runs/<run_id>/summary.json keeps it."""

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
    """What is remarkable about the model version."""
    judgement: Judgement | None = None
    """Whether the model version is the champion, and why."""
    seconds: dict[str, float]
    finished_at: str


class Copy(Record):
    """What lies at a remote of a run beside its checkpoints; it is written after all that it names."""

    project: str
    """The project (``runs.project_id``) that trains the run; only this one may write there."""
    host: str
    at: str
    """When it was written."""
    texts: dict[str, str]
    """The run's records and other small files, by their names from its folder."""
    files: dict[str, str]
    """The sha256 of each other file, such as ``models/final.keras``."""


class ToCopy(Record):
    """Marks a run that may not be completely copied to its remote."""

    address: str
    told: bool = False
    """Whether a message has said that the remote accepts nothing."""


class MetricPair(Record):
    """A test metric of two runs. Intervals are of 95 %, None where none is known."""

    first: float | None
    second: float | None
    first_interval: tuple[float, float] | None = None
    second_interval: tuple[float, float] | None = None
    difference: float | None = None
    """By how much it is more for the second."""
    difference_interval: tuple[float, float] | None = None
    """Of the difference on the same test rows; None where the runs were evaluated on others, or it is not known."""


class Change(Record):
    """What differs today from what a run had."""

    kind: Literal["code", "settings", "data", "environment", "machine"]
    what: str
    """Such as ``train.epochs`` or ``tensorflow``."""
    then: str | None
    now: str | None
    effect: Literal["brought back", "matters", "cannot be brought back"]
    """``matters``: differs, and may give other numbers; ``brought back``: is as it was."""


class Reproduction(Record):
    """What `stratagem reproduce --json` prints, and what the new run keeps in records/reproduction.json."""

    run_id: Name
    """Of the run that is to come out again."""
    changes: tuple[Change, ...]
    reproduced_by: Name | None = None
    """The run that was trained for it; None where none was."""
    same: bool | None = None
    """Whether it gave the same; None where nothing was trained."""
    reason: str
    weights_digests: tuple[str, str] | None = None
    """Of the run, and of the new one."""
    metrics: dict[str, MetricPair] = {}
    """Of the run, and of the new one."""


class RunLine(Record):
    """A run in a list."""

    run_id: str
    name: str
    began: str
    """Of its first start."""
    ended: str | None
    status: str | None
    """`running`, `finished`, `failed`, `killed`; or `crashed`: at work by its record, and its process has died."""
    dataset: str
    model: str
    strategy: str
    loop: str
    headline: str | None
    """Which of the metrics is that of its task, such as `test/accuracy`; None of a run that was not evaluated."""
    metrics: dict[str, float]
    examples_per_second: float | None
    model_version: str | None
    """NAME/VERSION, as it was registered."""
    bytes: int
    """Of its folder."""
    pruned: bool
    parent_run_id: str | None


class RunList(Record):
    """What `stratagem runs --json` prints."""

    runs: tuple[RunLine, ...]
    num_matching: int
    """That are as was asked for, also those beyond the limit."""
    num_runs: int
    """In all."""
    bytes: int
    """Of mlruns/runs, of which:"""
    checkpoint_bytes: int
    model_bytes: int
    unreadable: dict[str, str]
    """Why a folder's files cannot be read."""


class Kept(Record):
    """A checkpoint, or a model, in a run's folder."""

    path: Place
    bytes: int


class RunDetails(Record):
    """What `stratagem runs show --json` prints. What a stage would have left that did not come to its end is None."""

    run: RunLine
    folder: Place
    reason: str | None
    """Why it ended as it did."""
    lineage: Lineage
    flow_run_id: str | None
    experiment: str
    host: str
    settings: dict[str, tuple[Any, Any]]
    """That have another value than in params.yaml as it is now: the run's, and that one."""
    epochs: int | None
    steps: int | None
    num_replicas: int | None
    devices: tuple[str, ...]
    weights_digest: str | None
    checkpoint: str | None
    """That was evaluated."""
    seconds: dict[str, float]
    checkpoints: tuple[Kept, ...]
    models: tuple[Kept, ...]
    model_uri: str | None
    aliases: tuple[str, ...]
    """Of the model's version, when it was registered."""
    why_no_version: str | None
    judgement: str | None = None
    """Which version became the champion when it was registered, and why."""
    notes: tuple[str, ...]
    changed: tuple[Changed, ...] = ()
    """What differs from the start of its training, because it was resumed with it."""
    reproduces: str | None = None
    """Which run it was trained to reproduce, and whether it did."""


class RunDifference(Record):
    """What `stratagem runs diff --json` prints."""

    first: str
    second: str
    differences: dict[str, tuple[Any, Any]]
    """By what it is, such as ``train.epochs``: of the first and of the second; None where one has none."""
    metrics: dict[str, MetricPair] = {}
    """Of the test split, by name, also those that do not differ."""
    same_test_rows: bool = False
    """Whether both were evaluated on the same ones, and what each gave for them is there."""


class PrunedRun(Record):
    """A run whose checkpoints and models were removed, or would be."""

    run_id: str
    began: str
    dataset: str
    bytes: int


class Pruning(Record):
    """What `stratagem runs prune --json` prints."""

    dry_run: bool
    pruned: tuple[PrunedRun, ...]
    bytes: int
    """That were removed, or would be."""
    left: dict[str, str]
    """By the id of a run that was chosen: why it is left alone."""
    unfinished: int = 0
    """Runs that would have been chosen, and are left because they can be resumed."""
    bytes_left: int
    """Of mlruns/runs, afterwards."""

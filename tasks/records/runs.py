"""A run: where it comes from, who leads it, how it ended, and what the whole of it gave."""

from typing import Any, ClassVar, Literal

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
    """What of a training is otherwise from a step on, because a command resumed it so."""

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
    """The process that is at work on a run."""

    key: Name
    """What two commands that would do the same have in common."""
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
    """What a process that died had not ended, and was ended after it."""

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


class Pruned(Record):
    """A run's mark: its checkpoints and models were removed to make room, and all else of it stays."""

    at: str
    num_bytes: int


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
    package_version: str | None = None
    """As in ``Lineage``."""
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

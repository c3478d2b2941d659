"""Records of commands about the project: a plan, a health check, jobs, services, deliveries, provenance."""

from typing import Any, Literal

from tasks.records.record import Name, Place, Record


class PlannedStage(Record):
    """A stage or step of a command."""

    stage: str
    does: Literal["would run", "is cached", "is done", "would resume", "is skipped"]
    why: str


class GivenSetting(Record):
    """A setting and the value that the command would use."""

    key: str
    value: Any
    source: str
    """Where the value comes from: `params.yaml`, `recipe NAME`, `--set`, `dataset: REASON`, `default rule` or another
    source. The value is null until it can be chosen for the data."""


class Plan(Record):
    """What a command would do: the output of `--dry-run`."""

    stages: tuple[PlannedStage, ...]
    settings: tuple[GivenSetting, ...]


Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""From best to worst."""


class Finding(Record):
    """The result of one check."""

    check: str
    """Its name in ``tasks.operations.doctor.CHECKS``."""
    level: Level
    """``error``: a command fails, or something is lost; ``warning``: a command may fail, or is slower than it could
    be."""
    text: str
    fix: str | None = None
    """The command that repairs it, or what to do; None if nothing is wrong."""


class Health(Record):
    """The results of all checks."""

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Level:
        """The worst level of all."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")


class Job(Record):
    """A run that `stratagem submit` gave to a cluster."""

    engine: Name
    """The file of tasks/operations/submission/ that submitted it, such as `slurm`."""
    id: str
    """The engine's name for it."""
    place: tuple[str, ...] = ()
    """Arguments with which the engine's commands find it, such as ``--namespace team``."""
    name: str
    folder: Place
    """The folder of its script and log, relative to the project's folder."""
    num_processes: int
    submitted_at: str


class JobState(Record):
    """A job and its state."""

    job: Job
    state: str
    """In the engine's words, such as RUNNING; `ended (0)` with the exit code if the engine has forgotten it; `gone`
    without one; `unknown` if the engine does not answer."""
    detail: str = ""
    """Why it waits, or where it runs."""


class ServiceState(Record):
    """One of the programs that `stratagem up` keeps running."""

    name: str
    pid: int
    """The process id of its guard; 0 while it waits for its next start."""
    created: float
    """When the guard started, in seconds since 1970: another process may have its id by now."""
    since: str
    restarts: int = 0
    last_end: str | None = None
    """How it ended last."""
    address: str = ""
    log: str = ""
    """Relative to the project's folder."""


class Operation(Record):
    """What `stratagem up` keeps running: mlruns/up/state.json."""

    pid: int
    created: float
    host: str
    phase: Literal["starting", "ready", "ending"]
    services: tuple[ServiceState, ...] = ()


class Synced(Record):
    """The delivery of a run."""

    run_id: str
    name: str
    outcome: Literal["delivered", "updated", "up to date", "left out"]
    there: str | None = None
    """The run's id in the other store."""
    versions: tuple[str, ...] = ()
    """The versions of its models in the other store, as NAME/VERSION."""
    reason: str | None = None
    """Why it was left out."""


class Sync(Record):
    """The delivery of runs to a store."""

    to: str
    runs: tuple[Synced, ...]
    notes: tuple[str, ...] = ()
    """Remarks about aliases."""


class Link(Record):
    """A part of the chain from a data source to a model: a data version, a commit, a run, a version of a model."""

    kind: str
    """Such as `run` or `model version`."""
    name: str
    """Its id or path."""
    facts: dict[str, str] = {}
    up: tuple["Link", ...] = ()
    """What it was made from."""
    down: tuple["Link", ...] = ()
    """What was made from it."""


class Provenance(Record):
    """The output of `stratagem trace --json`."""

    reference: str
    """As the user gave it."""
    link: Link
    registry: str | None
    """Why MLflow's registry did not answer, so that versions and aliases come from the runs' records."""


class NewProject(Record):
    """The output of `stratagem init --json`."""

    folder: str
    files: tuple[str, ...]
    """Relative to the folder."""
    git: bool
    """Whether a repository was created."""

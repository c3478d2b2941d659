"""Runs as a person looks at them: in a list, one by itself, two side by side; and what was removed of some."""

from typing import Any

from tasks.records.record import Place, Record
from tasks.records.reproduction import MetricPair
from tasks.records.runs import Changed, Lineage


class NewProject(Record):
    """What `stratagem init --json` prints."""

    folder: str
    files: tuple[str, ...]
    """From the folder."""
    git: bool
    """Whether a repository was made there."""


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
    """What of its training is otherwise than it began, because it was resumed so."""
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

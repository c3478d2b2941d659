"""What a command would do, and where its settings come from."""

from typing import Any, Literal

from tasks.records.record import Record


class PlannedStage(Record):
    """A stage or step that a command has."""

    stage: str
    does: Literal[
        "would run",
        "would end",
        "is cached",
        "is there already",
        "asks DVC",
        "asks MLflow",
        "would resume",
        "is left out",
    ]
    why: str


class GivenSetting(Record):
    """A setting with the value that the command would have."""

    key: str
    value: Any
    source: str
    """`params.yaml`, `recipe NAME`, `--set`, `dataset: REASON`, `default rule`, or what else says it."""


class Explanation(Record):
    """What a command would do; nothing of it was done."""

    stages: tuple[PlannedStage, ...]
    settings: tuple[GivenSetting, ...] = ()
    """None of a command that has no settings."""

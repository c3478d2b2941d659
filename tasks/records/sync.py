"""What was delivered to another MLflow store."""

from typing import Literal

from tasks.records.record import Record


class Synced(Record):
    """A run that was to be delivered."""

    run_id: str
    name: str
    outcome: Literal["delivered", "updated", "there already", "left out"]
    there: str | None = None
    """Its id in the other store."""
    versions: tuple[str, ...] = ()
    """NAME/VERSION in the other store, of its models."""
    reason: str | None = None
    """Why it was left out."""


class Sync(Record):
    """All runs that were to be delivered to a store."""

    to: str
    runs: tuple[Synced, ...]
    notes: tuple[str, ...] = ()
    """What is remarkable about aliases."""

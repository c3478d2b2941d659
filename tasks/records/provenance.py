"""Where a thing comes from, and what was made of it."""

from tasks.records.record import Record


class Link(Record):
    """A thing in the chain from a source of data to a model: a data version, a commit, a run, a version of a model."""

    kind: str
    """Such as `run` or `model version`."""
    name: str
    """Its id, or its place."""
    facts: dict[str, str] = {}
    up: tuple["Link", ...] = ()
    """What it was made of."""
    down: tuple["Link", ...] = ()
    """What was made of it."""


class Provenance(Record):
    """What `stratagem trace --json` prints."""

    reference: str
    """As it was given."""
    link: Link
    registry: str | None
    """Why MLflow's registry could not be asked: versions and aliases are then those of the runs' records."""

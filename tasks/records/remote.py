"""A run at another place: what lies there of it, and what of that is still to be brought."""

from tasks.records.record import Record


class Copy(Record):
    """What lies at a remote of a run beside its checkpoints; it is written after all that it names."""

    project: str
    """Whose turn it is: the project (``runs.project_id``) that trains the run, and alone may write there."""
    host: str
    at: str
    """When it was written."""
    texts: dict[str, str]
    """The run's records and other small files, by their names from its folder."""
    files: dict[str, str]
    """The sha256 of each other file, such as ``models/final.keras``."""


class ToCopy(Record):
    """A run's mark: not all of it is known to lie at its remote."""

    address: str
    told: bool = False
    """Whether somebody was told that the remote takes nothing now."""

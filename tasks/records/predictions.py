"""What is asked of a trained model, and what it said."""

from typing import Any

from tasks.records.record import Record


class PredictionRequest(Record):
    """What `stratagem predict` asks the process that computes. Paths are from ``folder``."""

    model: str
    """See ``trained_models.find``."""
    inputs: tuple[str, ...]
    """Files and folders; ``-`` is what comes through the descriptor ``stdin``."""
    folder: str
    """Where the command was given, absolute."""
    stdin: int | None = None
    to: str | None = None
    """The file that the predictions are written to, absolute."""
    stdout: int | None = None
    """The descriptor that they are written to; without it, and without ``to``, the first ones alone are told."""
    format: str
    """A key of ``prediction_files.WRITERS``."""
    top_k: int
    probabilities: bool
    batch_size: int | None
    """None is as many as 8 MiB hold, up to 1,024."""
    encoding: str
    """Of texts in files."""


class ServingRequest(Record):
    """What `stratagem serve-model` asks the process that serves."""

    model: str
    """See ``trained_models.find``."""
    port: int
    """0 is any that is free."""
    poll_seconds: float
    """How often the alias is looked up."""


class Serving(Record):
    """What that process tells when it answers."""

    port: int
    model: str


class Predicted(Record):
    """What `stratagem predict` leaves."""

    model: str
    num_examples: int
    num_failed: int
    """Of these, how many have an error in place of a prediction."""
    counts: dict[str, int]
    """How many examples each class was predicted for; nothing for a regression."""
    first: tuple[dict[str, Any], ...]
    """The first ones, as the file has them."""
    devices: tuple[str, ...]
    """Where it was computed."""
    seconds: float
    """Without the start of the process."""
    output: str | None = None

"""What `stratagem up` keeps running: mlruns/up/state.json."""

from typing import Literal

from tasks.records.record import Record


class ServiceState(Record):
    """One of the programs that are kept."""

    name: str
    pid: int
    """Of its guard; 0 while it waits to be started again."""
    created: float
    """When the guard began, in seconds since 1970: a process id may be another one's by now."""
    since: str
    restarts: int = 0
    last_end: str | None = None
    """How it ended before it was started again."""
    address: str = ""
    log: str = ""
    """From the project's folder."""


class Operation(Record):
    """All of them."""

    pid: int
    created: float
    host: str
    since: str
    phase: Literal["starting", "ready", "ending"]
    services: tuple[ServiceState, ...] = ()
    versions: dict[str, str] = {}
    """What it runs with, by package; of one of before that was not told."""

"""The time as records have it: ISO 8601, in UTC, to the second."""

from datetime import UTC, datetime


def now() -> str:
    """Return the time now."""
    return at(datetime.now(UTC).timestamp())


def at(seconds: float) -> str:
    """Return a time that is so many seconds after 1970 began."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

"""What a look at the machine and the project finds."""

from typing import Literal

from tasks.records.record import Record

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")
"""The better one first."""


class Finding(Record):
    """One thing that was looked at."""

    check: str
    """The file of ``tasks/operations/doctor/`` that looked."""
    level: Level
    """``error``: a command fails, or something is lost; ``warning``: one may, or is slower than need be."""
    text: str
    mend: str | None = None
    """The command that mends it, or what to do; None where nothing is wrong."""


class Health(Record):
    """All that was looked at."""

    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Level:
        """The worst level of all."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="ok")

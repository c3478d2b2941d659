"""The logs of a cluster's members: in mlruns/logs/ until they train for a run, then in the run's folder."""

import contextlib
import itertools
import os
import time
from pathlib import Path

from tasks import config
from tasks.strategies.engines import Member


class Logs:
    """A folder with a file for each member."""

    def __init__(self) -> None:
        name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}", time.gmtime())
        _without_run().mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):  # The trials of a sweep have a cluster each, in threads of one process.
            self._folder = _without_run() / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
                return

    def __str__(self) -> str:
        """Return where they lie, from the project's folder."""
        return str(self._folder.relative_to(config.project_root()))

    def of(self, member: Member) -> Path:
        """Return the file of a member."""
        return self._folder / f"{member.name.replace(' ', '-')}.log"

    def of_engine(self, name: str) -> Path:
        """Return the file of what places the members on other machines."""
        return self._folder / f"{name}.log"

    def move_to(self, run_folder: Path) -> None:
        """Keep them with a run from now on."""
        folder = run_folder / "logs"
        if self._folder.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = self._folder.rename(folder / self._folder.name)
            with contextlib.suppress(OSError):  # Those of others lie there, too.
                _without_run().rmdir()

    def close(self, went_well: bool) -> None:
        """Remove the empty ones; all of them where no run has them and nobody will ask why something failed."""
        unwanted = went_well and self._folder.parent == _without_run()
        with contextlib.suppress(OSError):  # A log that says something stays, and so does its folder.
            for log in self._folder.iterdir():
                if unwanted or not log.stat().st_size:
                    log.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()


def _without_run() -> Path:
    return config.project_root() / "mlruns" / "logs"

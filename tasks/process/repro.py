"""`python -m tasks.process.repro TARGET [--force]`: the process in which DVC makes data, through its Python interface.

A stage leaves its own error in the file STRATAGEM_ERROR; what DVC itself refuses is put there too, known by the class
of its exception: one message whatever DVC calls it, and no second run to learn what the first one said.
"""

import argparse
import json
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.logger import set_loggers_level
from dvc.repo import Repo

from tasks import errors, files
from tasks.errors import StratagemError

BUSY_SECONDS = 600.0


def reproduce(target: str, force: bool) -> None:
    """Bring a stage and those before it up to date; wait for another command of DVC on the same files.

    Args:
        target: such as ``data/digits/dvc.yaml:prepare``.
        force: run that stage, and no other one, in any case.

    Raises:
        StratagemError: DVC cannot do it.
    """
    waiting_since = time.monotonic()
    while True:
        try:
            with Repo() as repo:
                repo.reproduce([target], force=force, single_item=force)
            return
        except (DvcException, OSError) as error:
            causes = list(_causes(error))
            if not any(isinstance(cause, LockError) for cause in causes):
                raise _explain(target, causes) from error
            if time.monotonic() - waiting_since > BUSY_SECONDS:
                raise StratagemError(
                    "another command of DVC has been at work for ten minutes: wait for it, then run again"
                ) from error
        if select.select([sys.stdin], [], [], 2)[0]:
            raise StratagemError("the process that started this one has gone")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain(target: str, causes: list[BaseException]) -> StratagemError:
    """Return the one message for why DVC failed: the innermost cause says it."""
    if full := files.full_disk(causes[0], f"{target.rpartition('/')[0]}, or DVC's cache of it,"):
        return full
    said = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    return StratagemError(f"{target}: DVC could not make it ({said[:500]})")


def main() -> None:
    """Make one stage, and end with the exit code of its error, which lies in STRATAGEM_ERROR."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    try:
        with set_loggers_level(logging.CRITICAL):  # The stage has the terminal for its own progress.
            reproduce(arguments.target, arguments.force)
    except StratagemError as error:
        told = Path(os.environ["STRATAGEM_ERROR"])
        if not told.exists():  # Else the stage has said what went wrong.
            told.write_text(json.dumps(errors.to_json(error)), encoding="utf-8")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""`python -m tasks.process.repro TARGET [--force]`: the process in which DVC makes data, through its Python interface.

A stage leaves its own error in the file STRATAGEM_ERROR; what DVC itself refuses is put there too, known by the class
of its exception: one message whatever DVC calls it, and no second run to learn what the first one said.
"""

import argparse
import json
import logging
import os
import select
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from diskcache import Timeout
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.repo import Repo

from tasks import errors, files, upstream
from tasks.errors import StratagemError

BUSY_SECONDS = 600.0
LOGGERS = ("dvc", "dvc_data", "dvc_objects")


class LastError(logging.Handler):
    """Keeps what DVC only logs: why its cache did not take a file. Nothing goes to the terminal, where the stage tells
    of its progress."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a record that has one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.error = record.exc_info[1]


def reproduce(target: str, force: bool) -> None:
    """Bring a stage and those before it up to date; wait for another command of DVC on the same files.

    Args:
        target: such as ``data/digits/dvc.yaml:prepare``.
        force: run that stage, and no other one, in any case.

    Raises:
        StratagemError: DVC cannot do it.
    """
    heard = LastError()
    for name in LOGGERS:
        logging.getLogger(name).handlers = [heard]
    upstream.end_on_a_full_disk()
    waiting_since = time.monotonic()
    while True:
        try:
            with Repo() as repo:
                made = repo.reproduce([target], force=force, single_item=force)
                if any(out.changed_cache() for stage in made for out in stage.outs if out.use_cache):
                    raise heard.error or DvcException("its cache did not take all files")
            return
        except (DvcException, OSError, sqlite3.Error, Timeout) as error:
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
    place = f"{target.rpartition('/')[0]}, or DVC's cache of it,"
    if full := files.full_disk(causes[0], place):
        return full
    if isinstance(causes[0], Timeout) and files.out_of_inodes():
        return files.no_room(place)
    said = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    return StratagemError(f"{target}: DVC could not make it ({said[:500]})")


def main() -> None:
    """Make one stage, and end with the exit code of its error, which lies in STRATAGEM_ERROR."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    try:
        reproduce(arguments.target, arguments.force)
    except StratagemError as error:
        error_file = Path(os.environ["STRATAGEM_ERROR"])
        if not error_file.exists():  # Else the stage has said what went wrong.
            error_file.write_text(json.dumps(errors.to_json(error)), encoding="utf-8")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""DVC's Python interface, in a process of its own: makes data, or moves them to its remote or from there.

A stage leaves its own error in the file STRATAGEM_ERROR; what DVC itself refuses is known by the class of its
exception: one message whatever DVC calls it, and no second run to learn what the first one said.
"""

import contextlib
import json
import logging
import os
import shlex
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dvc.config import NoRemoteError
from dvc.exceptions import DownloadError, DvcException, FileTransferError
from dvc.repo import Repo

from tasks import config
from tasks.process import dvc
from tasks.system import errors, messages, network
from tasks.system.errors import StratagemError, UserError, causes

LOGGERS = ("dvc", "dvc_data", "dvc_objects")


class LastError(logging.Handler):
    """Keeps what DVC only logs: why its cache did not take a file. Nothing goes to the terminal, where the stage tells
    of its progress."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a record that has one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.error = record.exc_info[1]


def reproduce(target: str, force: bool, downloads: str | None) -> None:
    """Bring a stage and those before it up to date; wait for another command of DVC on the same files.

    Args:
        target: such as ``data/digits/dvc.yaml:prepare``.
        force: run that stage, and no other one, in any case.
        downloads: the folder of archives that were brought by hand.

    Raises:
        StratagemError: DVC cannot do it, or the stage's own error.
    """
    if downloads is not None:
        os.environ["STRATAGEM_DOWNLOADS"] = downloads
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "error"
        os.environ["STRATAGEM_ERROR"] = str(problem)
        try:
            with _opened(target) as (repo, heard):
                made = repo.reproduce([target], force=force, single_item=force)
                if any(out.changed_cache() for stage in made for out in stage.outs if out.use_cache):
                    raise heard.error or DvcException("its cache did not take all files")
        except StratagemError:
            if problem.exists():
                raise errors.from_json(json.loads(problem.read_text(encoding="utf-8"))) from None
            raise


def is_up_to_date(target: str) -> bool:
    """Return whether a stage, and all that it depends on, is done; False if DVC cannot say so. Nothing is made."""
    _listen()
    logging.getLogger("dvc").setLevel(logging.CRITICAL)  # No progress bar either.
    try:
        with Repo() as repo:
            return not repo.status(targets=[target], with_deps=True)
    except (DvcException, sqlite3.DatabaseError):
        return False


def push(targets: list[str]) -> None:
    """Copy what is not there yet to DVC's remote, and say how many files that are.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, or the cache lacks what would be copied.
        StratagemError: DVC cannot do it.
    """
    with _opened(", ".join(targets)) as (repo, _):
        repo.cloud.get_remote()  # Without one, DVC copies nothing and calls it done.
        for target in targets:
            if _lacks(repo, target):
                raise UserError(  # DVC would push the rest, and call it done.
                    f"{target}: DVC's cache lacks some of the data that dvc.lock names, so they cannot be pushed. Pull "
                    "them, or prepare them again: stratagem data prepare --force"
                )
        print(f"pushed {repo.push(targets=targets):,} files", file=sys.stderr)


def pull(targets: list[str]) -> None:
    """Bring what dvc.lock names from DVC's remote, where the cache lacks it, and say how many files that are.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, or files of the user's are in the place of the data.
        StratagemError: the remote lacks some of them, or DVC cannot do it.
    """
    with _opened(", ".join(targets)) as (repo, heard):
        repo.cloud.get_remote()  # As above.
        try:
            print(f"pulled {repo.fetch(targets=targets):,} files", file=sys.stderr)
        except DownloadError:
            if not isinstance(heard.error, FileNotFoundError):  # What is lacking is looked for below.
                raise
        for target in targets:
            # Before anything in the folder is touched: DVC removes all of one that it cannot make whole.
            if _lacks(repo, target):
                raise StratagemError(
                    f"{target}: the remote lacks some of the data that dvc.lock names: push them from where they were "
                    "prepared (stratagem data push), or prepare them here (stratagem data prepare)"
                )
        try:
            repo.checkout(targets=targets)
        except DvcException as error:
            if error.__cause__ is not None:
                raise
            folders = " and ".join(f"{os.path.dirname(target)}/prepared" for target in targets)
            said = " ".join(str(error).split())[:500]
            raise UserError(
                f"{', '.join(targets)}: your own files are where the data belong (DVC: {said}). Move {folders} "
                "away, then pull again"
            ) from None


def _lacks(repo: Any, target: str) -> bool:
    """Return whether DVC's cache lacks some of what dvc.lock names."""
    return any(out.changed_cache() for stage in repo.stage.collect(target) for out in stage.outs)


def _listen() -> LastError:
    heard = LastError()
    for name in LOGGERS:
        logging.getLogger(name).handlers = [heard]
    return heard


@contextlib.contextmanager
def _opened(target: str) -> Iterator[tuple[Any, LastError]]:
    """Open DVC's repository, and raise its errors as ours; it waits for another command of DVC on the same files."""
    heard = _listen()
    try:
        with Repo(_wait_for_lock=True) as repo:
            yield repo, heard
    except StratagemError:
        raise
    except NoRemoteError:
        raise UserError(
            "DVC has no remote to push data to or pull them from. Add one: "
            "dvc remote add --default storage URL (a folder, s3://, gs://, azure://, ssh://)"
        ) from None
    except Exception as error:  # DVC passes on what each remote's package raises.
        cause = heard.error if isinstance(error, FileTransferError) and heard.error is not None else error
        chain = causes(cause)
        is_of_database = any(isinstance(one, sqlite3.DatabaseError) for one in chain)
        if is_of_database and (damaged := dvc.damaged_databases(config.project_root())):
            raise StratagemError(
                f"{target}: {damaged[0]} is damaged. Remove it, and DVC makes it again: "
                f"rm {shlex.quote(str(damaged[0]))}"
            ) from error
        raise _explain(target, chain) from error


def _explain(target: str, chain: list[BaseException]) -> StratagemError:
    """Return the one message for why DVC failed: the innermost cause says it."""
    place = f"{target.rpartition('/')[0]}, or DVC's cache of it,"
    if (explained := messages.explain(chain[0], place, f"{target}: ")) is not None:
        return explained
    said = network.without_secrets(f"{type(chain[-1]).__name__}: {' '.join(str(chain[-1]).split())}")
    return StratagemError(f"{target}: DVC says: {said[:500]}")

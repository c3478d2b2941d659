"""Functions that call DVC's Python interface, each in its own process: they prepare data, push them to DVC's remote, or
pull them.

A stage that DVC runs writes its own error to the file STRATAGEM_ERROR; DVC's own errors are recognised by their
classes.
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
from tasks.runs import dvc
from tasks.system import errors, messages, network
from tasks.system.errors import StratagemError, UserError, causes


class LastError(logging.Handler):
    """Keeps the last error that DVC logs: only the log says why its cache did not accept a file. Nothing is printed,
    because the stage prints its progress."""

    error: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error of a record that has one."""
        if record.exc_info and record.exc_info[1] is not None:
            self.error = record.exc_info[1]


def reproduce(target: str, force: bool, downloads: str | None) -> None:
    """Bring a stage and its dependencies up to date; wait for another command of DVC on the same files.

    Args:
        target: such as ``data/digits/dvc.yaml:prepare``.
        force: run only that stage, even if it is up to date.
        downloads: the folder of archives that the user provides.

    Raises:
        StratagemError: DVC or the stage failed.
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
    """Return whether a stage and its dependencies are up to date; False if DVC cannot tell. This changes nothing."""
    _listen()
    logging.getLogger("dvc").setLevel(logging.CRITICAL)  # No progress bar either.
    try:
        with Repo() as repo:
            return not repo.status(targets=[target], with_deps=True)
    except (DvcException, sqlite3.DatabaseError):
        return False


def push(targets: list[str]) -> None:
    """Copy the files that DVC's remote lacks to it, and print their number.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, or DVC's cache lacks some of the data.
        StratagemError: DVC failed.
    """
    with _opened(", ".join(targets)) as (repo, _):
        repo.cloud.get_remote()  # Raises an error without a remote: `push` would copy nothing and report success.
        for target in targets:
            if _lacks(repo, target):
                raise UserError(  # DVC would push the rest and report success.
                    f"{target}: DVC's cache lacks some of the data that dvc.lock names, so they cannot be pushed. Pull "
                    "them, or prepare them again: stratagem data prepare --force"
                )
        print(f"pushed {repo.push(targets=targets):,} files", file=sys.stderr)


def pull(targets: list[str]) -> None:
    """Fetch the data that dvc.lock names and the cache lacks from DVC's remote, and print the number of files.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, or the user's own files are in the place of the data.
        StratagemError: the remote lacks some of the data, or DVC failed.
    """
    with _opened(", ".join(targets)) as (repo, heard):
        repo.cloud.get_remote()  # As above.
        try:
            print(f"pulled {repo.fetch(targets=targets):,} files", file=sys.stderr)
        except DownloadError:
            if not isinstance(heard.error, FileNotFoundError):  # The code below finds out what is missing.
                raise
        for target in targets:
            # Before the checkout, which empties a folder that it cannot complete.
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
    return any(out.changed_cache() for stage in repo.stage.collect(target) for out in stage.outs)


def _listen() -> LastError:
    heard = LastError()
    for name in ("dvc", "dvc_data", "dvc_objects"):
        logging.getLogger(name).handlers = [heard]
    return heard


@contextlib.contextmanager
def _opened(target: str) -> Iterator[tuple[Any, LastError]]:
    """Open DVC's repository, wait for another command of DVC on the same files, and raise DVC's errors as ours."""
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
    except Exception as error:  # DVC passes on the errors of each remote's package.
        cause = heard.error if isinstance(error, FileTransferError) and heard.error is not None else error
        chain = causes(cause)
        is_of_database = any(isinstance(one, sqlite3.DatabaseError) for one in chain)
        if is_of_database and (damaged := dvc.damaged_databases(config.project_root())):
            raise StratagemError(
                f"{target}: {damaged[0]} is damaged. Remove it, and DVC makes it again: "
                f"rm {shlex.quote(str(damaged[0]))}"
            ) from error
        place = f"{target.rpartition('/')[0]}, or DVC's cache of it,"
        said = network.without_secrets(errors.one_line(chain[-1]))[:500]  # The innermost cause has the reason.
        explained = messages.explain(chain[0], place, f"{target}: ")
        raise explained or StratagemError(f"{target}: DVC says: {said}") from error

"""`python -m tasks.process.dvc_program ACTION TARGET... [--force]`: the process in which DVC makes data, or moves
them to its remote or from there, through its Python interface.

A stage leaves its own error in the file STRATAGEM_ERROR; what DVC itself refuses is put there too, known by the class
of its exception: one message whatever DVC calls it, and no second run to learn what the first one said.
"""

import argparse
import contextlib
import json
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diskcache import Timeout
from dvc.config import NoRemoteError
from dvc.exceptions import DownloadError, DvcException, FileTransferError
from dvc.lock import LockError
from dvc.repo import Repo

from tasks.system import errors, files, lifetime, messages, upstream
from tasks.system.errors import StratagemError, UserError, causes

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
    heard = _listen()

    def make(repo: Any) -> None:
        made = repo.reproduce([target], force=force, single_item=force)
        if any(out.changed_cache() for stage in made for out in stage.outs if out.use_cache):
            raise heard.error or DvcException("its cache did not take all files")

    _do(make, target)


def push(targets: list[str]) -> None:
    """Copy what is not there yet to DVC's remote, and say how many files that are.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, it refuses, has no room, or the cache lacks what would be copied.
        StratagemError: the remote does not answer, or DVC cannot do it.
    """
    heard = _listen()

    def copy(repo: Any) -> None:
        remote = repo.cloud.get_remote()  # Without one, DVC copies nothing and calls it done.
        for target in targets:
            if _lacks(repo, target):
                raise UserError(  # DVC would push the rest, and call it done.
                    f"{target}: DVC's cache lacks some of the data that dvc.lock names, so they cannot be pushed. Pull "
                    "them, or make them again: stratagem prepare --force"
                )
        with _errors_of(remote, heard):
            print(f"pushed {repo.push(targets=targets):,} files", file=sys.stderr)

    _do(copy, ", ".join(targets))


def pull(targets: list[str]) -> None:
    """Bring what dvc.lock names from DVC's remote, where the cache lacks it, and say how many files that are.

    Args:
        targets: such as ``data/digits/dvc.yaml``.

    Raises:
        UserError: there is no remote, it refuses, or files of the user's are in the place of the data.
        StratagemError: the remote does not answer or lacks some of them, or DVC cannot do it.
    """
    heard = _listen()

    def copy(repo: Any) -> None:
        remote = repo.cloud.get_remote()  # As above.
        # What is lacking is looked for below.
        with contextlib.suppress(DownloadError), _errors_of(remote, heard, lacking=FileNotFoundError):
            print(f"pulled {repo.fetch(targets=targets):,} files", file=sys.stderr)
        for target in targets:
            # Before anything in the folder is touched: DVC removes all of one that it cannot make whole.
            if _lacks(repo, target):
                raise StratagemError(
                    f"{target}: the remote lacks some of the data that dvc.lock names: where they were made, push them "
                    "(stratagem data push), or make them here (stratagem prepare)"
                )
        try:
            repo.checkout(targets=targets)
        except DvcException as error:
            if error.__cause__ is not None:
                raise
            folders = " and ".join(f"{os.path.dirname(target)}/prepared" for target in targets)
            said = " ".join(str(error).split())[:500]
            raise UserError(
                f"{', '.join(targets)}: files of yours are in the place of the data (DVC: {said}). Move {folders} "
                "away, then pull again"
            ) from None

    _do(copy, ", ".join(targets))


def _lacks(repo: Any, target: str) -> bool:
    """Return whether DVC's cache lacks some of what dvc.lock names."""
    return any(out.changed_cache() for stage in repo.stage.collect(target) for out in stage.outs)


@contextlib.contextmanager
def _errors_of(remote: Any, heard: LastError, lacking: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Raise one message of ours for what a remote's package raises, which DVC passes on, or logs for each file.

    Args:
        remote: DVC's.
        heard: what DVC logs.
        lacking: what a file is told by that the remote does not have; it is raised as it is.

    Raises:
        UserError: the remote refuses, or has no room.
        StratagemError: it does not answer.
    """
    try:
        yield
    except Exception as error:
        cause = heard.error if isinstance(error, FileTransferError) else error
        if cause is None or remote.fs.protocol == "local" or isinstance(cause, lacking) or _is_of_here(cause):
            raise
        from tasks.runs.remote import address  # A third of a second, which a stage that is made need not wait for.

        url = remote.fs.unstrip_protocol(remote.path)
        key = f"DVC's remote '{remote.name}' ({url})"
        refused = address.refusal(cause, url, key)
        raise refused or StratagemError(f"{address.no_answer(cause, key)}. Run again when it does") from error


def _is_of_here(error: BaseException) -> bool:
    """Return whether an error is DVC's, a file's on this machine, or a mistake in code, and not the remote's."""
    if isinstance(error, OSError):
        return error.filename is not None or error.errno in files.DISK_FULL_NUMBERS
    ours = (DvcException, StratagemError, sqlite3.Error, Timeout)
    return isinstance(error, ours) or type(error).__module__ == "builtins"


def _listen() -> LastError:
    heard = LastError()
    for name in LOGGERS:
        logging.getLogger(name).handlers = [heard]
    upstream.end_on_a_full_disk()
    return heard


def _do(work: Callable[[Any], None], target: str) -> None:
    """Let DVC work; wait for another command of DVC on the same files."""
    waiting_since = time.monotonic()
    while True:
        try:
            with Repo() as repo:
                work(repo)
            return
        except NoRemoteError:
            raise UserError(
                "DVC has no remote, where data are pushed to and pulled from. Add one: "
                "dvc remote add --default storage URL (a folder, s3://, gs://, azure://, ssh://)"
            ) from None
        except (DvcException, OSError, sqlite3.Error, Timeout) as error:
            chain = list(causes(error))
            if not any(isinstance(cause, LockError) for cause in chain):
                raise _explain(target, chain) from error
            if time.monotonic() - waiting_since > BUSY_SECONDS:
                raise StratagemError(
                    "another command of DVC has been at work for ten minutes: wait for it, then run again"
                ) from error
        if lifetime.input_closes_within(2):
            raise StratagemError("the process that started this one has gone")


def _explain(target: str, chain: list[BaseException]) -> StratagemError:
    """Return the one message for why DVC failed: the innermost cause says it."""
    place = f"{target.rpartition('/')[0]}, or DVC's cache of it,"
    if full := files.find_full_disk(chain[0], place):
        return full
    if isinstance(chain[0], Timeout) and files.out_of_inodes():
        return files.full_disk_error(place)
    if (words := messages.translate(chain[0])) is not None:
        return StratagemError(f"{target}: {words}")
    said = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
    return StratagemError(f"{target}: DVC could not make it ({said[:500]})")


def main() -> None:
    """Do one thing, and end with the exit code of its error, which lies in STRATAGEM_ERROR."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["repro", "push", "pull"])
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--force", action="store_true")
    arguments = parser.parse_args()
    try:
        if arguments.action == "repro":
            reproduce(arguments.targets[0], arguments.force)
        else:
            {"push": push, "pull": pull}[arguments.action](arguments.targets)
    except StratagemError as error:
        error_file = Path(os.environ["STRATAGEM_ERROR"])
        if not error_file.exists():  # Else the stage has said what went wrong.
            error_file.write_text(json.dumps(errors.to_json(error)), encoding="utf-8")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

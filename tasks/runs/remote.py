"""Copies runs to a remote (``checkpoint.remote``, through fsspec) while they train, and fetches them back.

The local folder is authoritative: a copy first uploads the files that the remote lacks, then an index with the sha256
of all files, and only then removes files that the index no longer names. So an outage of the remote needs no record,
and the next copy completes one that was killed.

Only the project whose id is in the index copies a run: the project that copied the run first or fetched it last. Every
other project leaves the remote alone.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.records import Copy, Run
from tasks.runs import committed, entries, locks, outcome, repository
from tasks.system import files, network
from tasks.system.errors import StratagemError, UserError, cut, listed, one_line

# By scheme: the package that fsspec imports, the environment variables for credentials and for the server's address.
AZURE = "adlfs", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING"
PROVIDERS = {
    "abfs": AZURE,
    "azure": AZURE,  # As DVC calls it.
    "gs": ("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"),
    "s3": ("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
}
# Short timeouts, so that an S3 server that hangs does not delay the end of a run; others have their packages' defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}},
}
# Errors of a server that is temporarily unavailable.
AWAY = re.compile(r"(?i)connect|time[sd]?[ -]?out|unavailable|slow ?down|\b50[0-4]\b")
INDEX = "run.json"
CHECKPOINTS = "checkpoints"
MARK = "remote"
"""A file in a run's folder with the address of the remote that may not have all of the run."""
# Files that no other machine needs or that are private.
LEFT_HERE = {"damaged_checkpoints", MARK, repository.FILE}
MAX_TEXT_BYTES = 4 * 2**20
LOOK_SECONDS, PAUSE_SECONDS = 1.0, 10.0
"""Seconds between two checks for new checkpoints, and before a retry after an error of the remote."""
_copying = threading.Lock()
# Cached by path, size and time of change: a file is read again only when it was changed.
_digest = functools.cache(lambda path, size, changed: files.digest(path))
_told: set[str] = set()


def open_place(address: str, *below: str) -> Any:
    """Return fsspec's file system for a folder at an address in the format of ``checkpoint.remote``. This contacts no
    server yet.

    Raises:
        UserError: the package for its scheme is not installed, or requires credentials immediately.
    """
    scheme = address.partition("://")[0]
    package = PROVIDERS[scheme][0] if scheme in PROVIDERS else None
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"checkpoint.remote = {address} needs the package {package}, which is not installed: pip install "
            f"'stratagem[{scheme}]', or use a file:/// address"
        )
    import fsspec.implementations.dirfs  # With s3fs it takes a second.

    for name in ("azure", "gcsfs"):  # They log many lines about missing credentials, and gcsfs about each request.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        # No cache of listings, so that files of other processes are visible.
        fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **OPTIONS.get(scheme, {}))
    except Exception as error:  # Each file system has its own errors.
        raise UserError(refusal(error, address)) from None
    return fsspec.implementations.dirfs.DirFileSystem(path="/".join((path.rstrip("/"), *below)), fs=fs)


@functools.cache
def check(address: str) -> None:
    """Try to write and remove a small file at an address, once per process.

    If the server does not answer, warn instead of refusing: the files stay here until it answers.

    Raises:
        UserError: its package is not installed, or the server refuses.
    """
    place, name = open_place(address), f".stratagem-{uuid.uuid4().hex}"
    try:
        place.pipe_file(name, b"can stratagem write here?")
        place.rm_file(name)
    except Exception as error:  # Each file system has its own errors.
        if not AWAY.search(one_line(error)):
            raise UserError(refusal(error, address)) from None
        print(
            f"checkpoint.remote = {address} does not answer ({reason(error)}): files to copy are kept until it does",
            file=sys.stderr,
        )


def reason(error: BaseException) -> str:
    """Return a library's error as a part of a sentence, without passwords."""
    return cut(network.without_secrets(one_line(error)), 300).rstrip(".")


def refusal(error: BaseException, address: str) -> str:
    """Return the message for a remote that cannot be written to, with the error of its file system."""
    said = f"checkpoint.remote = {address} cannot be written to: {reason(error)}"
    scheme = address.partition("://")[0]
    if scheme not in PROVIDERS:
        return f"{said}. Choose a folder that user {os.geteuid()} can write to, with enough free space"
    _, credentials, server = PROVIDERS[scheme]
    return (
        f"{said}. The bucket must exist and have free space. Credentials come from the environment or the provider's "
        f"own files, such as {credentials}, and must allow listing, reading, writing and removing. {server} names "
        "another server"
    )


@contextlib.contextmanager
def copied_meanwhile(run: Run, address: str | None) -> Iterator[None]:
    """Copy a run in a thread, at each new checkpoint, while the block runs; the block never waits for it.

    Args:
        run: a run in mlruns/runs; others are not copied.
        address: ``checkpoint.remote``; None copies nothing.
    """
    if address is None or not run.folder.startswith("mlruns/runs/"):
        yield
        return
    with contextlib.suppress(OSError):  # A full disk: the training reports it.
        (config.project_root() / run.folder / MARK).write_text(address, encoding="utf-8")
    ended = threading.Event()

    def copy_until_ended() -> None:
        seen = None
        while not ended.wait(LOOK_SECONDS) and _address_of(run) is not None:
            now = committed.steps(config.project_root() / run.folder / CHECKPOINTS)
            if now == seen:
                continue
            if _try_copy(run, address):
                seen = now
            else:
                ended.wait(PAUSE_SECONDS)

    threading.Thread(target=copy_until_ended, name="remote-copier", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def finish(run: Run) -> None:
    """Copy the rest of a run that has ended; if that fails, ``deliver_kept`` does it later."""
    if (address := _address_of(run)) is not None:
        _try_copy(run, address)


def deliver_kept() -> list[records.Ended]:
    """Copy the rest of all runs that have ended; return the copied ones."""
    copied = []
    for path in sorted((config.project_root() / "mlruns" / "runs").glob(f"*/{MARK}")):
        run, to = entries.look_up(path.parent.name), path.read_text(encoding="utf-8")
        if run is not None and not locks.is_locked(run.key) and _try_copy(run, to):
            copied.append(records.Ended(what=f"the copy of run {run.run_id}", status="whole", reason=f"it is at {to}"))
    return copied


def _try_copy(run: Run, address: str) -> bool:
    """Copy a run and return whether that succeeded; print the reason once if not."""
    try:
        copy_run(run, address)
        return True
    except Exception as error:  # The training continues without the remote.
        if _address_of(run) is None:  # Another project has resumed the run.
            print(error, file=sys.stderr)
        elif run.run_id not in _told:
            _told.add(run.run_id)
            print(
                f"run {run.run_id} cannot be copied to {address} now ({reason(error)}): the files are kept "
                "and copied later, also by `stratagem reconcile`",
                file=sys.stderr,
            )
    return False


def _address_of(run: Run) -> str | None:
    path = config.project_root() / run.folder / MARK
    return path.read_text(encoding="utf-8") if path.exists() else None


def copy_run(run: Run, address: str) -> None:
    """Make the remote identical to the run's folder.

    Raises:
        UserError: another project has resumed the run.
        Exception: any error of the remote's file system.
    """
    folder = config.project_root() / run.folder
    with _copying:
        if outcome.is_pruned(run):
            (folder / MARK).unlink(missing_ok=True)  # The remote keeps files that were pruned here.
            return
        place = open_place(address, "runs", run.run_id)
        there = set(place.find(""))
        before = read_index(place) if INDEX in there else None
        if before is not None and before.project != locks.project_id():
            (folder / MARK).unlink(missing_ok=True)
            raise _taken_over(run, address, before)
        status = outcome.status(run)
        texts, found = _contents(folder)
        known = before.files if before is not None else {}
        for name in [name for name, digest in found.items() if known.get(name) != digest or name not in there]:
            try:
                place.put_file(str(folder / name), name)
            except FileNotFoundError:
                if (folder / name).exists():  # It was not pruned meanwhile.
                    raise
        found = {name: digest for name, digest in found.items() if (folder / name).exists()}
        index = Copy(project=locks.project_id(), host=socket.gethostname(), at=records.now(), texts=texts, files=found)
        if before is None or index.model_copy(update={"at": before.at}) != before:
            write_index(place, index)
        for name in there - found.keys() - {INDEX}:
            with contextlib.suppress(FileNotFoundError):
                # One by one, because some servers refuse the bulk request of s3fs (Swift requires Content-MD5).
                place.rm_file(name)
        if status.status != "RUNNING":
            (folder / MARK).unlink(missing_ok=True)


def _contents(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the current small text files of a run and the sha256 of its other files, both by name."""
    texts: dict[str, str] = {}
    found: dict[str, str] = {}
    for path in [Path(where, name) for where, _, names in os.walk(folder) for name in names]:
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts) or path.suffix == ".lock"
        if hidden or {name.parts[0], name.as_posix()} & LEFT_HERE or path.is_symlink() or not path.is_file():
            continue
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            if (len(name.parts) == 1 or name.parts[0] == "records") and stat.st_size <= MAX_TEXT_BYTES:
                texts[name.as_posix()] = path.read_text(encoding="utf-8")
            else:
                found[name.as_posix()] = _digest(path, stat.st_size, stat.st_mtime_ns)
    return texts, found


def read_index(place: Any) -> Copy:
    """Read a run's index at a remote.

    Raises:
        FileNotFoundError: the remote does not have the run, or its first copy was never completed.
        ValueError: the index was changed.
        UserError: the index has another format.
    """
    return Copy.model_validate(committed.parse(place.cat_file(INDEX), f"{place.path}/{INDEX}"))


def write_index(place: Any, index: Copy) -> None:
    """Replace a run's index at a remote atomically."""
    content = committed.signed(index.model_dump(mode="json"))
    # An object in a bucket only appears when the request is complete; a file needs a rename.
    is_file = "file" in place.fs.protocol
    place.pipe_file(f".{INDEX}" if is_file else INDEX, content)
    if is_file:
        place.mv(f".{INDEX}", INDEX)


def _taken_over(run: Run, address: str, index: Copy) -> UserError:
    return UserError(
        f"another copy of the project has resumed run {run.run_id}, on {index.host} since {index.at} ({address}): "
        "this project no longer copies it. Resume it there, or start a new one with --fresh"
    )


def bring(settings: config.Settings, resume: str | None) -> None:
    """Fetch the run to resume from ``checkpoint.remote`` if it is not in mlruns/runs.

    Args:
        settings: name the remote and the dataset.
        resume: the id of a run, its first letters, or ``latest`` on the dataset; None fetches nothing.

    Raises:
        UserError: the remote does not have the run either, or its copy is damaged; or see ``check``.
        StratagemError: the remote does not answer.
    """
    address = settings.checkpoint.remote
    if address is None or resume is None or not (resume == "latest" or entries.PREFIX.fullmatch(resume)):
        return
    if any((config.project_root() / "mlruns" / "runs").glob(f"{resume}*")):
        return  # The caller resumes it or explains why not.
    if resume == "latest" and any(one.dataset == settings.dataset.name for one in entries.find_runs("runs")):
        return
    try:
        known: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            known = sorted(filter(entries.is_id, open_place(address, "runs").ls("", detail=False)))
        found = [name for name in known if name.startswith(resume)]
        if resume == "latest":
            ended: list[tuple[str, str]] = []
            for name in known:
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError, UserError):
                    texts = read_index(open_place(address, "runs", name)).texts
                    if json.loads(texts["records/run.json"])["settings"]["dataset"]["name"] == settings.dataset.name:
                        ended.append((json.loads(texts["status.json"])["at"], name))
            found = [name for _, name in sorted(ended)[-1:]]
    except Exception as error:  # Each file system has its own errors.
        raise StratagemError(
            f"--resume {resume}: it is not in mlruns/, and checkpoint.remote = {address} does not answer: "
            f"{reason(error)}"
        ) from None
    if not found:
        on = f" on {settings.dataset.name}" if resume == "latest" else ""
        raise UserError(
            f"--resume {resume}: no such run{on} exists in mlruns/ or at checkpoint.remote = {address}, which has "
            f"{listed(known, 5) or 'none'}"
        )
    if len(found) > 1:
        raise UserError(
            f"--resume {resume}: {len(found)} runs at the remote begin with it: {listed(found, 5)}. Add more letters"
        )
    _bring(found[0], address)


def _bring(run_id: str, address: str) -> None:
    """Fetch a run into a temporary folder, verify each file, record this project in the remote's index, and move the
    run into mlruns/runs."""
    all_runs = config.project_root() / "mlruns" / "runs"
    if (all_runs / run_id).exists():
        raise UserError(f"mlruns/runs/{run_id} cannot be read: move it away, and the run is fetched from {address}")
    all_runs.mkdir(parents=True, exist_ok=True)
    try:
        with files.scratch(all_runs.parent, ".cache.") as scratch:
            brought = scratch / run_id
            place = open_place(address, "runs", run_id)
            index = read_index(place)
            for name, text in index.texts.items():
                path = brought / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if there := set(place.find("")) & index.files.keys():
                place.get(list(there), [str(brought / name) for name in there])
            # Checkpoints with damaged or missing files are useless, and stages with such files run again.
            whole = {name for name in there if files.digest(brought / name) == index.files[name]}
            damaged = index.files.keys() - whole
            of_checkpoints = {name for name in damaged if name.startswith(f"{CHECKPOINTS}/")}
            for step in sorted({name.split("/")[1] for name in of_checkpoints}):
                shutil.rmtree(brought / CHECKPOINTS / step, ignore_errors=True)
                print(f"the checkpoint of step {step} at the remote is damaged: it is not fetched", file=sys.stderr)
            if others := damaged - of_checkpoints:
                for name in (*others, "summary.json", *(outcome.FILES[one] for one in outcome.RESULTS)):
                    (brought / name).unlink(missing_ok=True)
            run = records.load(Run, brought / "records" / "run.json")
            if run.run_id != run_id or run.folder != f"mlruns/runs/{run_id}":
                raise ValueError(f"its record names {run.folder}")
            status = records.load(records.RunStatus, brought / "status.json")
            if status.status == "RUNNING":
                why = f"it was running on {index.host}, and was fetched to this machine"
                records.save(status.model_copy(update={"status": "KILLED", "reason": why}), brought / "status.json")
            ours = {"project": locks.project_id(), "host": socket.gethostname(), "at": records.now()}
            write_index(place, index.model_copy(update=ours))
            steps = listed([str(step) for step in committed.steps(brought / CHECKPOINTS)], 9)
            brought.rename(all_runs / run_id)
    except StratagemError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"run {run_id} at {address} is damaged ({reason(error)}): resume another run") from None
    except Exception as error:
        raise StratagemError(f"run {run_id} cannot be fetched from {address}: {reason(error)}") from None
    at = f"checkpoints of steps {steps}" if steps else "no checkpoint yet"
    print(f"run {run_id} was fetched from {address}: {at}; it last ran on {index.host}", file=sys.stderr)


def check_still_ours(run: Run, address: str | None) -> None:
    """Before a local run is resumed, check that no other copy of the project has resumed it. Ignores a remote that
    does not answer.

    Raises:
        UserError: another copy of the project has resumed it.
    """
    if address is None:
        return
    try:
        index = read_index(open_place(address, "runs", run.run_id))
    except Exception:  # Each file system has its own errors; and there may be no copy yet.
        return
    if index.project != locks.project_id():
        raise _taken_over(run, address, index)

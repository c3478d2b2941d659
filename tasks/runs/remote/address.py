"""Where runs are copied to: an address that fsspec opens, and what is wrong with it."""

import contextlib
import errno
import functools
import importlib.util
import logging
import os
import re
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.system import files, network
from tasks.system.errors import UserError, cut, one_line

# By the scheme: what fsspec imports for it, and what brings that.
PACKAGES = {
    "abfs": ("adlfs", "'stratagem[abfs]'"),
    "gs": ("gcsfs", "'stratagem[gs]'"),
    "s3": ("s3fs", "'stratagem[s3]'"),
}
# What these print at length of missing credentials, and gcsfs at each request, is in the one message of ours.
LOGGERS = ("azure", "gcsfs")
# By the scheme: the variables of the environment that have the credentials, and the one that names a server.
AZURE = ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CONNECTION_STRING")
VARIABLES = {
    "abfs": AZURE,
    "azure": AZURE,  # As DVC calls it.
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"),
    "s3": ("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
}
# A server of S3 that hangs is given up before the run's end has waited long for it; others as their packages do.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}}
}
CHECK_SECONDS = 60.0
# As servers say it: 413 and 507 are a quota's, or a disk's.
FULL = re.compile(r"(?i)quota|EntityTooLarge|InsufficientStorage|insufficient storage|no space left|disk full|\b507\b")
DENIED = re.compile(
    r"(?i)credential|access ?denied|forbidden|signature|InvalidAccessKeyId|unauthori[sz]ed|authenticat|\b40[13]\b"
)
NO_BUCKET = re.compile(r"(?i)NoSuchBucket|bucket does not exist|(bucket|container)\S* (does not|not)")


@dataclass(frozen=True)
class Place:
    """A folder at a remote. Names are relative to it, with slashes."""

    fs: Any
    root: str
    is_local: bool

    def below(self, *names: str) -> "Place":
        """Return a folder in it."""
        return replace(self, root="/".join((self.root, *names)))

    def find(self) -> dict[str, int]:
        """Return the bytes of each file in it and below, by name; nothing where there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            found = self.fs.find(self.root, detail=True)
            return {path.removeprefix(f"{self.root}/"): int(info["size"]) for path, info in found.items()}
        return {}

    def folders(self) -> list[str]:
        """Return the names of the folders in it."""
        with contextlib.suppress(FileNotFoundError):
            found = self.fs.ls(self.root, detail=True)
            return sorted(one["name"].rpartition("/")[2] for one in found if one["type"] == "directory")
        return []

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        content: bytes = self.fs.cat_file(f"{self.root}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file: all of it is seen, or what was there before."""
        path = f"{self.root}/{name}"
        if not self.is_local:  # What is put into a bucket is there when the request has ended, and not before.
            self.fs.pipe_file(path, content)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(Path(path)) as temporary:
            temporary.write_bytes(content)

    def put(self, source: Path, name: str, callback: Any) -> None:
        """Bring a file there, whose end must not be relied upon before something that is written after it says so.

        Raises:
            OSError: less arrived than was sent.
        """
        path, size = f"{self.root}/{name}", source.stat().st_size
        if self.is_local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.fs.put_file(str(source), path, callback=callback)
        arrived = self.fs.info(path)["size"]
        if arrived != size:
            raise OSError(f"{name} has {arrived:,} bytes there, and {size:,} here")

    def get(self, name: str, target: Path) -> None:
        """Bring a file here."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.fs.get_file(f"{self.root}/{name}", str(target))

    def remove(self, name: str) -> None:
        """Remove a file, where it is there."""
        with contextlib.suppress(FileNotFoundError):
            # One by one: not every server takes a list of them as s3fs signs it (OpenStack Swift wants Content-MD5).
            self.fs.rm_file(f"{self.root}/{name}")


def open_place(address: str) -> Place:
    """Return the folder of an address, as ``checkpoint.remote`` is written. No server is asked yet.

    Raises:
        UserError: the package that its scheme needs is not installed, or wants credentials at once.
    """
    scheme = address.partition("://")[0]
    package, install = PACKAGES.get(scheme, (None, None))
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"checkpoint.remote = {address} needs the package {package}, which is not installed: pip install "
            f"{install}, or give an address of file:///"
        )
    import fsspec  # With s3fs it takes a second.

    # Listings are not kept: what another process has written since must be seen.
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        fs, path = fsspec.core.url_to_fs(address, use_listings_cache=False, **OPTIONS.get(scheme, {}))
    except Exception as error:  # Each file system has errors of its own.
        raise UserError(f"checkpoint.remote = {address}: {reason(error)}. {_credentials(scheme)}") from None
    return Place(fs, path.rstrip("/"), scheme == "file")


@functools.cache
def check(address: str) -> None:
    """Try to write, read and remove a small file at an address, once in a process.

    A server that does not answer is a warning, not a refusal: what there is to copy is kept until it answers.

    Raises:
        UserError: its package is not installed, its credentials are missing or wrong, there is no such bucket, it has
            no room, or what is read is not what was written.
    """
    place = open_place(address)
    name, content = f".stratagem-{uuid.uuid4().hex}", b"stratagem looks whether it may write here"

    def probe() -> BaseException | None:
        try:
            place.write(name, content)
            read = place.read(name)
            place.remove(name)
            return None if read == content else OSError(f"what was read of {name} is not what was written")
        except Exception as error:  # Each file system has errors of its own.
            return error

    error = network.with_timeout(CHECK_SECONDS, probe, TimeoutError(f"no answer in {CHECK_SECONDS:.0f} seconds"))
    if error is None:
        return
    key = f"checkpoint.remote = {address}"
    if (refused := refusal(error, address, key)) is not None:
        raise refused
    print(f"{no_answer(error, key)}: what there is to copy is kept until it does", file=sys.stderr)


def no_answer(error: BaseException, key: str) -> str:
    """Return what is said of a server that may be away for a while; ``key`` names the remote."""
    return f"{key} does not answer ({reason(error)})"


def reason(error: BaseException) -> str:
    """Return why something could not be copied, as a part of a sentence without passwords."""
    said = cut(network.without_secrets(one_line(error)), 300).rstrip(".")
    if is_full(error):
        return f"there is no room: {said}"
    return f"the credentials are missing or refused: {said}" if _is_denied(error) else said


def _credentials(scheme: str) -> str:
    """Return where the credentials of an address come from."""
    names, _ = VARIABLES.get(scheme, VARIABLES["s3"])
    return (
        f"Credentials come from the environment or the provider's own files, such as {names}; a key must be allowed to "
        "list, read, write and remove there"
    )


def is_full(error: BaseException) -> bool:
    """Return whether a remote has no room, or a quota of it is used up."""
    return (isinstance(error, OSError) and error.errno in files.DISK_FULL_NUMBERS) or FULL.search(
        str(error)
    ) is not None


def _is_denied(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or DENIED.search(one_line(error)) is not None


def refusal(error: BaseException, address: str, key: str) -> UserError | None:
    """Return the message for what a user must change, None where a server may be away for a while.

    Args:
        error: what the file system of the address raised.
        address: with its scheme.
        key: names the remote at the message's beginning.
    """
    said = reason(error)
    scheme = address.partition("://")[0]
    if is_full(error):
        return UserError(f"{key}: {said}. Make room there, raise the quota, or give another address")
    if scheme == "file" and isinstance(error, OSError) and error.errno != errno.ESTALE:
        return UserError(f"{key}: cannot be written ({said}). Give a folder that user {os.geteuid()} may write to")
    if isinstance(error, FileNotFoundError) or NO_BUCKET.search(str(error)):
        bucket = address.partition("://")[2].partition("/")[0]
        _, server = VARIABLES.get(scheme, VARIABLES["s3"])
        return UserError(
            f"{key}: there is no bucket '{bucket}' ({said}). Make it, or name one that is there; a different server is "
            f"named by the environment, such as {server}"
        )
    if _is_denied(error):
        return UserError(f"{key}: {said}. {_credentials(scheme)}")
    return None

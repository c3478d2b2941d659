"""Files: written whole or not at all, known by their hash; what may be removed, and what cannot be written."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd
import resource
import shutil
import struct
import tempfile
import tokenize
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from tasks.system.errors import StratagemError, UserError, causes

DISK_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# As SQLite says it, and TensorFlow and HDF5.
DISK_FULL_TEXTS = {
    "database or disk is full": errno.ENOSPC,
    "No space left on device": errno.ENOSPC,
    "File too large": errno.EFBIG,
}
# What is raised where an archive or an array is read of which a byte is another one: zipfile and NumPy pass on whatever
# they stumble over.
DAMAGED_FILE = (
    EOFError, KeyError, MemoryError, OSError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# In a scratch folder, it says who made that.
MARK = ".stratagem"


def full_disk_error(place: Path | str, number: int = errno.ENOSPC) -> StratagemError:
    """Return the one message for a full disk, by the number of its error: also one of a full quota, or of a limit on
    the size of files."""
    to_do = "Raise the file-size limit (ulimit -f)" if number == errno.EFBIG else "Make room"
    return StratagemError(f"{place} cannot be written ({os.strerror(number)}). {to_do}, and run the same command again")


def find_full_disk(error: BaseException, place: Path | str) -> StratagemError | None:
    """Return the one message for a full disk where an error has that cause, whatever library wrapped it; else None.

    Args:
        place: where, if the error does not say it.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_NUMBERS:
            return full_disk_error(cause.filename or place, cause.errno)
        said = str(cause)
        for words, number in DISK_FULL_TEXTS.items():
            if words in said:
                return full_disk_error(place, number)
        # SQLite, and this run's own Prefect server, say no more than this at the limit.
        at_limit = "disk I/O error" in said or "500 Internal Server Error' for url 'http://127.0.0.1:" in said
        if at_limit and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return full_disk_error(place, errno.EFBIG)
    return None


def find_no_access(error: BaseException) -> UserError | None:
    """Return the one message for a file that this process may not touch where an error has that cause; else None."""
    for cause in causes(error):
        if isinstance(cause, PermissionError) and isinstance(cause.filename, str):
            return no_access(Path(cause.filename))
    return None


def no_access(path: Path) -> UserError:
    """Return the one message for a file or folder that this process may not read or write: it is another user's, or
    its mode says so."""
    at = path
    while True:  # What lies in a folder that we may not enter has an owner that we cannot see.
        try:
            owner = at.stat().st_uid
            break
        except OSError:
            at = at.parent
    if owner == os.geteuid():
        return UserError(f"{path} cannot be read or written (Permission denied): change the mode of {at}")
    return UserError(
        f"{path} cannot be read or written (Permission denied): {at} belongs to {_user(owner)}, and this is "
        f"{_user(os.geteuid())}. Run the command as {_user(owner)}, or work in your own clone"
    )


def refuse_no_access(path: Path) -> None:
    """Raise ``UserError`` if this process may not read and write a file or folder that is there."""
    try:
        effective = os.access in os.supports_effective_ids
        if path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=effective):
            raise no_access(path)
    except PermissionError:  # A folder above may not be entered.
        raise no_access(path) from None


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # A container's users need no name.
        return f"user {number}"


def unwritable(place: Path | str, error: OSError) -> StratagemError:
    """Return the one message for what cannot be written: the user's mistake, but for a full disk."""
    if error.errno in DISK_FULL_NUMBERS:
        return full_disk_error(place, error.errno)
    return UserError(f"{place}: cannot be written ({error}). Check its permissions")


def is_encoding(name: str) -> bool:
    """Return whether the text of a file may be encoded so."""
    try:
        return "".encode(name) is not None
    except (LookupError, ValueError):  # `undefined` is one of Python's own that encodes nothing.
        return False


def is_locked(path: Path) -> bool:
    """Return whether a process, also this one, holds a lock on a file; the kernel frees it when that process dies.

    Raises:
        OSError: the file is not there, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path is not a symlink, and none on its way leads out of a folder."""
    return not path.is_symlink() and path.parent.resolve().is_relative_to(root.resolve())


@contextlib.contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """Give a temporary name beside a file's, to write to; when the block ends, flush that file and rename it: a reader
    sees all of it or what was there before. It goes if the block fails. After a kill, what is left is hidden and has
    `.partial` in its name, as all half-written files of ours.

    Args:
        suffix: what the temporary name ends with.
    """
    # Not tempfile's: it gives 0600 also where a team shares the folder; who may read is the process' umask.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial{suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            flush(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def damaged_json(paths: Iterable[Path]) -> Path | None:
    """Return the first of these files that is not JSON, None if all are."""
    for path in paths:
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return path
    return None


def num_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder and below it; 0 where there is none. Symlinks are not followed."""
    return sum(sizes(folder).values())


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each file and folder in a folder, by name; see ``num_bytes``."""
    return {} if folder.is_symlink() else _sizes(str(folder))


def _sizes(folder: str) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # It is another user's, or was just removed.
        for one in entries:
            is_folder = one.is_dir(follow_symlinks=False)
            found[one.name] = sum(_sizes(one.path).values()) if is_folder else one.stat(follow_symlinks=False).st_size
    return found


def read_text(path: Path, most: int = -1) -> str:
    """Return the text of a file in UTF-8, or its first ``most`` bytes.

    Raises:
        OSError: it is missing, may not be read, or is a pipe or a device, which may never end.
        UnicodeDecodeError: it is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    with path.open("rb") as file:
        return file.read(most).decode()


def flush(file: IO[Any]) -> None:
    """Bring what was written to a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for what is half-written, hold its lock, and remove it when the block ends. A killed process leaves
    it behind, and its lock is free."""
    with (
        tempfile.TemporaryDirectory(prefix=prefix, suffix=".partial", dir=folder) as name,
        (Path(name) / MARK).open("w") as mark,
    ):
        fcntl.flock(mark, fcntl.LOCK_EX)
        yield Path(name)


def remove_scratch(paths: Iterable[Path], root: Path) -> list[Path]:
    """Remove the scratch folders among these whose process was killed; return them."""
    removed = [path for path in paths if is_left(path, root)]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)  # Another process may be doing the same.
    return removed


def is_left(path: Path, root: Path) -> bool:
    """Return whether a path in the project is a scratch folder whose process was killed."""
    with contextlib.suppress(OSError):
        return is_inside(path, root) and not is_locked(path / MARK)
    return False


def set_aside(path: Path, folder: Path, name: str | None = None) -> Path:
    """Move a file or a folder into another folder; return where it now lies.

    ``name`` is its own if not given, with a number after it where something lies there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, number = name or path.name, 1
    target = folder / name
    while target.exists() or target.is_symlink():
        number += 1
        target = folder / f"{name}.{number}"
    path.rename(target)
    return target

"""Files: atomic writes, digests, locks, scratch folders, and the messages for files that cannot be read or written."""

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
# The messages of SQLite, and of TensorFlow and HDF5.
DISK_FULL_TEXTS = {
    "database or disk is full": errno.ENOSPC,
    "No space left on device": errno.ENOSPC,
    "File too large": errno.EFBIG,
}
# The errors of reading an archive or an array with a changed byte: zipfile and NumPy pass on any error.
DAMAGED_FILE = (
    EOFError, KeyError, MemoryError, OSError, OverflowError, RuntimeError, SyntaxError, TypeError, ValueError,
    struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# A file that marks a scratch folder as ours.
MARK = ".stratagem"


def full_disk_error(place: Path | str, number: int = errno.ENOSPC) -> StratagemError:
    """Return the message for a full disk, a full quota or a limit on the size of files, by the number of the error."""
    to_do = "Raise the file-size limit (ulimit -f)" if number == errno.EFBIG else "Make room"
    return StratagemError(f"{place} cannot be written ({os.strerror(number)}). {to_do}, and run the same command again")


def find_full_disk(error: BaseException, place: Path | str) -> StratagemError | None:
    """Return the message for a full disk if that caused an error of any library, else None; ``place`` is named if the
    error does not name one."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_NUMBERS:
            return full_disk_error(cause.filename or place, cause.errno)
        said = str(cause)
        for words, number in DISK_FULL_TEXTS.items():
            if words in said:
                return full_disk_error(place, number)
        # At this limit, SQLite and this run's own Prefect server give no other reason.
        at_limit = "disk I/O error" in said or "500 Internal Server Error' for url 'http://127.0.0.1:" in said
        if at_limit and resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
            return full_disk_error(place, errno.EFBIG)
    return None


def find_no_access(error: BaseException) -> UserError | None:
    """Return the message for a file that this process may not access if that caused an error, else None."""
    for cause in causes(error):
        if isinstance(cause, PermissionError) and isinstance(cause.filename, str):
            return no_access(Path(cause.filename))
    return None


def no_access(path: Path) -> UserError:
    """Return the message for a file or folder that this process may not read or write because of its owner or mode."""
    at = path
    while True:  # The owner of a path is hidden in a folder that we may not enter.
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
    """Raise ``UserError`` if this process may not read and write an existing file or folder."""
    try:
        effective = os.access in os.supports_effective_ids
        if path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=effective):
            raise no_access(path)
    except PermissionError:  # A folder above may not be entered.
        raise no_access(path) from None


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:  # A user in a container may have no name.
        return f"user {number}"


def unwritable(place: Path | str, error: OSError) -> StratagemError:
    """Return the message for a path that cannot be written: the user's mistake, unless the disk is full."""
    if error.errno in DISK_FULL_NUMBERS:
        return full_disk_error(place, error.errno)
    return UserError(f"{place}: cannot be written ({error}). Check its permissions")


def is_encoding(name: str) -> bool:
    """Return whether a name is an encoding of text."""
    try:
        return "".encode(name) is not None
    except (LookupError, ValueError):  # Python's `undefined` encodes nothing.
        return False


def is_locked(path: Path) -> bool:
    """Return whether any process, including this one, holds a lock on a file; the kernel frees it when that process
    dies.

    Raises:
        OSError: the file does not exist or cannot be opened.
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
    """Return whether a path is not a symlink and no symlink in it leads out of a folder."""
    return not path.is_symlink() and path.parent.resolve().is_relative_to(root.resolve())


@contextlib.contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary path in the same folder for writing. When the block ends, flush that file and rename it: a
    reader sees either the whole new file or the previous one. If the block fails, the temporary file is removed. A
    killed process leaves it, hidden and with `.partial` in its name, like all our half-written files.

    Args:
        suffix: the end of the temporary name.
    """
    # Not with tempfile, which sets the mode 0600 even in a team's folder; here the umask decides who may read.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial{suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            flush(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def damaged_json(paths: Iterable[Path]) -> Path | None:
    """Return the first of these files that is not valid JSON, None if all are valid."""
    for path in paths:
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return path
    return None


def num_bytes(folder: Path) -> int:
    """Return the size of the files in and below a folder; 0 if it does not exist. Symlinks are not followed."""
    return sum(sizes(folder).values())


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file and folder in a folder, by name; see ``num_bytes``."""
    return {} if folder.is_symlink() else _sizes(str(folder))


def _sizes(folder: str) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # Another user's, or just removed.
        for one in entries:
            is_folder = one.is_dir(follow_symlinks=False)
            found[one.name] = sum(_sizes(one.path).values()) if is_folder else one.stat(follow_symlinks=False).st_size
    return found


def read_text(path: Path, most: int = -1) -> str:
    """Return the text of a file in UTF-8, or its first ``most`` bytes.

    Raises:
        OSError: it does not exist, is not readable, or is a pipe or a device, which may never end.
        UnicodeDecodeError: it is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", str(path))
    with path.open("rb") as file:
        return file.read(most).decode()


def flush(file: IO[Any]) -> None:
    """Flush a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


@contextlib.contextmanager
def scratch(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield a new, locked folder for half-written files, and remove it when the block ends. A killed process leaves it
    with a free lock."""
    with (
        tempfile.TemporaryDirectory(prefix=prefix, suffix=".partial", dir=folder) as name,
        (Path(name) / MARK).open("w") as mark,
    ):
        fcntl.flock(mark, fcntl.LOCK_EX)
        yield Path(name)


def remove_scratch(paths: Iterable[Path], root: Path) -> list[Path]:
    """Remove the scratch folders of killed processes among these paths; return them."""
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
    """Move a file or a folder into another folder, as ``name`` if given; return its new path.

    A number is added to a name that already exists there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, number = name or path.name, 1
    target = folder / name
    while target.exists() or target.is_symlink():
        number += 1
        target = folder / f"{name}.{number}"
    path.rename(target)
    return target

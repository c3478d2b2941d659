"""A temporary folder of one command and its child processes, removed when the command ends.

Child processes use it as TMPDIR: they end by `os._exit` or a signal and remove nothing themselves, such as the 5 to 24
files that TensorFlow's autograph writes in each of them. The command holds a lock on the folder while it runs; the next
command removes folders whose lock is free. Programs that clear a machine's temporary folder ignore locked folders.

The name is short, because a socket's path has at most 107 characters.
"""

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tasks.system.errors import UserError
from tasks.system.files import MARK, is_left

PREFIX = "stratagem-"
NOTE = "half-written-"


@functools.cache
def folder() -> Path:
    """Return this process's temporary folder, which only this user may enter; the first call creates it.

    Raises:
        UserError: the machine's temporary folder cannot be written.
    """
    remove_leftovers()
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # Open until the process ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # Before the mark: others remove unlocked marked folders.
        (path / MARK).touch()
    except OSError as error:
        raise UserError(
            f"{tempfile.gettempdir()} cannot be written ({error.strerror}), but temporary files belong there: make "
            "room, or set TMPDIR to another folder"
        ) from None
    return path


def note(path: Path) -> None:
    """Note a temporary file or `files.scratch` folder that this command or its child process writes outside the
    project: if the command is killed, the next one removes it."""
    of_command = Path(tempfile.gettempdir())  # In a child process.
    place = of_command if (of_command / MARK).exists() else folder()
    (place / f"{NOTE}{uuid.uuid4().hex[:8]}").symlink_to(path)


def half_written() -> list[Path]:
    """Return the existing paths that this user's killed commands noted."""
    return [path for killed in _killed() for path in _noted(killed)]


def remove_leftovers() -> list[Path]:
    """Remove the temporary folders of this user's killed commands and the paths that they noted; return these paths."""
    removed = []
    for path in _killed():
        with contextlib.suppress(OSError):  # Another command may be doing the same.
            for noted in _noted(path):
                shutil.rmtree(noted) if noted.is_dir() else noted.unlink()
                removed.append(noted)
            # Renamed first, so that a child process that is still ending cannot write into it.
            shutil.rmtree(path.rename(f"{path}.gone"), ignore_errors=True)
    return removed


def _killed() -> Iterator[Path]:
    """Yield the folders of killed commands; each is locked while the caller uses it."""
    # A folder without the mark is the user's.
    for path in (mark.parent for mark in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{MARK}")):
        with contextlib.suppress(OSError):  # Removed meanwhile, a link, a file, another user's, or locked.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path
            finally:
                os.close(descriptor)


def _noted(path: Path) -> list[Path]:
    links = [link for link in path.glob(f"{NOTE}*") if link.is_symlink()]
    found = [Path(os.readlink(link)) for link in links]
    return [noted for noted in found if noted.is_file() or is_left(noted, noted.parent)]


@atexit.register  # On import, before the functions that end child processes: atexit calls the last function first.
def _remove_own() -> None:
    if folder.cache_info().currsize:
        shutil.rmtree(folder(), ignore_errors=True)

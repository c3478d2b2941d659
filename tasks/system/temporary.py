"""A temporary folder of one command and its child processes, removed when the command ends.

Child processes have it as TMPDIR: they end by `os._exit` or by a signal and then remove nothing themselves, such as the
5 to 24 files that TensorFlow's autograph writes for each of them. The command holds a lock on the folder while it
lives; the next command removes folders whose lock is free. Programs that clear a machine's temporary folder leave
locked folders alone.

Its name is short, because a socket's path has at most 107 characters.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tasks.system.errors import UserError
from tasks.system.files import MARK

PREFIX = "stratagem-"

# By process id: a fork has the descriptor too, but does not remove the folder.
_made: dict[int, tuple[Path, int]] = {}


def folder() -> Path:
    """Return this process's temporary folder; the first call makes it.

    Raises:
        UserError: the machine's temporary folder cannot be written.
    """
    if os.getpid() not in _made:
        remove_leftovers()
        try:
            _made[os.getpid()] = _make()
        except OSError as error:
            raise UserError(
                f"{tempfile.gettempdir()} cannot be written ({error.strerror}), and temporary files lie there: make "
                "room, or set TMPDIR to another folder"
            ) from None
    return _made[os.getpid()][0]


def remove_leftovers() -> None:
    """Remove the temporary folders of this user's commands that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # It is gone, a link, a file, another user's, or locked.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and _has_mark(descriptor):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Under another name: a child process that is still ending cannot write into it.
                    shutil.rmtree(path.rename(f"{path}.gone"), ignore_errors=True)
            finally:
                os.close(descriptor)


def _make() -> tuple[Path, int]:
    """Make a folder that only this user may enter; return it and the descriptor that holds its lock."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # Before the mark, which lets other commands remove it.
        os.close(os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor))
    except BaseException:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path, descriptor


def _has_mark(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(MARK, dir_fd=descriptor, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _remove_own() -> None:
    if os.getpid() in _made:
        shutil.rmtree(_made[os.getpid()][0], ignore_errors=True)


# Registered on import, before the functions that end child processes: atexit calls the last one first.
atexit.register(_remove_own)

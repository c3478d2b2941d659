"""A temporary folder for what one command and its child processes leave half-done, which goes when the command ends.

Child processes find it as TMPDIR: they end by `os._exit` or by a signal, and then remove nothing themselves, such as
the 5 to 24 files that TensorFlow's autograph writes for each of them. The command holds a lock on the folder while it
lives; the next command removes those whose lock is free. Programs that clear a machine's temporary folder leave what
is locked alone.

It lies in the machine's temporary folder and has a short name, because a socket's path has at most 107 characters.
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

# This process's, by its id: a fork has the descriptor, too, and not the duty to remove the folder.
_made: dict[int, tuple[Path, int]] = {}


def folder() -> Path:
    """Return this process's temporary folder, which is made when it is first asked for.

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
        with contextlib.suppress(OSError):  # It has just gone; or it is a link, no folder, another user's, or locked.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and _has_mark(descriptor):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Under another name no child process that is still ending can write into it.
                    shutil.rmtree(path.rename(f"{path}.gone"), ignore_errors=True)
            finally:
                os.close(descriptor)


def _make() -> tuple[Path, int]:
    """Make a folder that this user alone may enter; return it and the descriptor that holds its lock."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # Before the mark, by which others know that they may remove it.
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


# When this module is imported, so before what ends child processes is: what is registered last comes first.
atexit.register(_remove_own)

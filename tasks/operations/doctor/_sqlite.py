"""An SQLite database that a library made: whether it is whole and private. Its tables are the library's business."""

import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tasks.operations.doctor import Remark, size

# A store of a gigabyte takes longer to read than anyone waits for a doctor.
MOST_SECONDS = 1.0


def look_at(path: Path, package: str, command: str = "the next run") -> Iterator[Remark]:
    """Yield what is wrong with a database; nothing is written to it.

    Args:
        path: of the file.
        package: whose database it is, such as ``mlflow``.
        command: what makes a new one.
    """
    if not path.exists():
        yield Remark("ok", f"{path} is not there yet: the first run makes it")
        return
    place = shlex.quote(str(path))
    mend = f"mv {place} {place}.aside; {command} makes a new one"
    if (mode := stat.S_IMODE(path.stat().st_mode)) & stat.S_IROTH:
        yield Remark("warning", f"{path} can be read by every user of this machine ({mode:o})", f"chmod o-rwx {place}")
    try:
        # Not `immutable`: that would read past a journal that a killed process has left, and call it damage.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            whole = _check(connection)
    except sqlite3.Error as error:
        if "locked" in str(error):
            yield Remark("ok", f"{path} ({size(path.stat().st_size)}) is being written to, and was not looked at")
        else:
            yield Remark("error", f"{path} is not a database of {package} ({error})", mend)
        return
    if whole not in ("ok", None):
        yield Remark("error", f"{path} is damaged: {whole.splitlines()[0]}", mend)
        return
    how = "whole" if whole else f"its first {MOST_SECONDS:.0f} s of reading are whole"
    yield Remark("ok", f"{path}: {size(path.stat().st_size)}, {how}")


def _check(connection: sqlite3.Connection) -> str | None:
    """Return SQLite's judgement of a database; None where it takes too long."""
    end = time.monotonic() + MOST_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    try:
        (judgement,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            return None
        raise
    return str(judgement)

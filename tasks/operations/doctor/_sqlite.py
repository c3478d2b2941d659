"""A database of SQLite that a library made: whether it is whole, and whether the installed version knows its schema."""

import importlib.util
import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tasks.operations.doctor._here import Remark, size

# A store of a gigabyte takes longer to read than anyone waits for a doctor.
MOST_SECONDS = 1.0


def look_at(path: Path, package: str, migrations: str, mend: str) -> Iterator[Remark]:
    """Yield what is wrong with a database; nothing is written to it.

    Args:
        path: of a file that is there.
        package: whose database it is, such as ``mlflow``.
        migrations: where in that package the scripts of its schemas are; their names hold a revision each.
        mend: what to do about a database that is damaged.
    """
    place = shlex.quote(str(path))
    if (mode := stat.S_IMODE(path.stat().st_mode)) & stat.S_IROTH:
        yield Remark("warning", f"{path} can be read by every user of this machine ({mode:o})", f"chmod o-rwx {place}")
    try:
        # Not `immutable`: that would read past a journal that a killed process has left, and call it damage.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            whole = _check(connection)
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            yield Remark("ok", f"{path} ({size(path.stat().st_size)}) is being written to, and was not looked at")
            return
        yield Remark("error", f"{path} is no database of {package} ({error})", mend)
        return
    except (sqlite3.Error, TypeError) as error:
        yield Remark("error", f"{path} is no database of {package} ({error})", mend)
        return
    if whole not in ("ok", None):
        yield Remark("error", f"{path} is damaged: {whole.splitlines()[0]}", mend)
        return
    known, newest = _revisions(package, migrations)
    if revision not in known:
        yield Remark(
            "error",
            f"{path} was written by another version of {package}: its schema {revision} is not known here",
            f"make setup, or install the {package} that wrote it; or {mend}",
        )
        return
    how = "whole" if whole else f"its first {MOST_SECONDS:.0f} s of reading are whole"
    now = "" if revision in newest else ", and is brought up to date at its next use"
    yield Remark("ok", f"{path}: {size(path.stat().st_size)}, {how}, schema {revision}{now}")


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
    finally:
        connection.set_progress_handler(None, 0)
    return str(judgement)


def _revisions(package: str, migrations: str) -> tuple[set[str], set[str]]:
    """Return the schemas that an installed package knows, and those that no later one follows; the package is found,
    and not imported, because that takes seconds."""
    found = importlib.util.find_spec(package)
    known: set[str] = set()
    followed: set[str] = set()
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for path in Path(folder, migrations).glob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" = ")
                if name == "revision":
                    known.add(value.strip("\"' "))
                elif name == "down_revision":
                    followed.add(value.strip("\"' "))
    return known, known - followed

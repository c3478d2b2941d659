"""The lock for DVC, which runs one command at a time, and DVC's settings on this machine."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tasks import config
from tasks.runs import repository
from tasks.system import files
from tasks.system.errors import StratagemError, UserError

BUSY_SECONDS = 600.0


@contextlib.contextmanager
def at_work(root: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock for DVC in a project: a second command waits for it, where DVC would fail at once.

    Args:
        root: the project's folder.
        seconds: how long to wait; ``BUSY_SECONDS`` if not given.

    Raises:
        UserError: .dvc cannot be written.
        StratagemError: another command was preparing data for too long.
    """
    configure()
    try:
        with FileLock(root / ".dvc" / "tmp" / "stratagem.lock", timeout=BUSY_SECONDS if seconds is None else seconds):
            yield
    except Timeout:
        raise StratagemError("another command is preparing data: wait until it ends, then run this again") from None


def configure() -> None:
    """Create .dvc/site, which only this user may enter, for DVC's hashes of files; without git, set `core.no_scm`, too.

    By default, DVC stores them in /var/tmp/dvc, where every user may write, and its diskcache unpickles the files there
    (CVE-2025-69872). DVC does not resolve relative paths, so .dvc/config.local, which is not shared, has the absolute
    path; until that file exists, plain DVC follows .dvc/config: .dvc_site in the current folder. DVC_SITE_CACHE_DIR
    takes precedence.

    Raises:
        UserError: .dvc cannot be written.
    """
    root = config.project_root()
    site = root / ".dvc" / "site"
    try:
        (site.parent / "tmp").mkdir(parents=True, exist_ok=True)
        if not os.environ.get("DVC_SITE_CACHE_DIR"):
            site.mkdir(exist_ok=True)
            site.chmod(0o700)
        wanted = {"site_cache_dir": str(site)}
        if repository.state(root) == (None, None):
            wanted["no_scm"] = "true"
        _set_core(site.with_name("config.local"), wanted)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error}): make the project's folder writable") from None


def _set_core(path: Path, wanted: dict[str, str]) -> None:
    """Set missing values in DVC's local configuration, and correct the path of a project that was moved."""
    from configobj import ConfigObj  # Imported here, because half of the commands need no data.

    known = ConfigObj(str(path), encoding="utf-8")
    before = dict(known.get("core", {}))
    moved = before.get("site_cache_dir", "").endswith("/.dvc/site")
    core = {**wanted, **before, **({"site_cache_dir": wanted["site_cache_dir"]} if moved else {})}
    if core != before:
        known["core"] = core
        with files.replacing(path) as written:
            written.touch(0o600)  # It may contain a remote's password.
            known.filename = str(written)
            known.write()


def damaged_databases(root: Path) -> list[Path]:
    """Return the databases in .dvc/site that DVC cannot read. They only contain hashes of files, and DVC creates a
    missing database again."""
    found = []
    for path in sorted((root / ".dvc" / "site").rglob("*.db")):
        try:
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
                whole = database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        except sqlite3.OperationalError:  # Another process is writing to it.
            continue
        except sqlite3.DatabaseError:
            whole = False
        if not whole:
            found.append(path)
    return found

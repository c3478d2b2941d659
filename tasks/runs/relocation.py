"""A project that was moved or copied: MLflow's store names each file by the place where it was written.

Unmended, no registered model loads any more, and new files go to the old place, which comes back.
"""

import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from filelock import FileLock

from tasks import config
from tasks.system import files

logger = logging.getLogger(__name__)

LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def own_store() -> Path:
    """Return where the project's own store is, or will be."""
    return config.project_root() / "mlruns" / "mlflow.db"


def mend() -> None:
    """Let the project's own store name the files where they lie now, and say so, if the project was moved or copied.

    A project that is only reached by another path, such as a link, is left alone. So is a location that the user chose.

    Raises:
        UserError: the store is another user's.
    """
    path = own_store()
    files.refuse_no_access(path)
    old = _place_when_made(path)
    if old is None or old == path.parent or (old.exists() and old.samefile(path.parent)):
        return
    with (
        FileLock(path.with_name(f".{path.name}.lock"), timeout=120),
        closing(sqlite3.connect(path, timeout=20)) as connection,
        connection,
    ):
        connection.execute("BEGIN IMMEDIATE")
        mended = 0
        for table, column in LOCATIONS:
            for before, now in ((old.as_uri(), path.parent.as_uri()), (str(old), str(path.parent))):
                # Names of tables and columns are ours; sqlite3 takes only values as parameters.
                change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                start = f"{before}/artifacts/"
                values = (f"{now}/artifacts/", len(start) + 1, len(start), start)
                mended += connection.execute(change, values).rowcount
    if mended:
        left = old / "artifacts"
        only_files = left.is_dir() and not (old / "mlflow.db").exists()
        there = f". What was written to {left} since then is still there" if only_files else ""
        logger.warning(
            "this project was in %s: %d locations of files in %s are mended%s", old.parent, mended, path, there
        )


def _place_when_made(path: Path) -> Path | None:
    """Return the mlruns/ that a store was made in, as its first experiment says; None for another layout."""
    with closing(sqlite3.connect(path, timeout=20)) as connection:
        found = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
    match = re.fullmatch(r"file://(/.*/mlruns)/artifacts/0", found[0] or "") if found else None
    return Path(unquote(match[1])) if match else None

"""Corrects the paths in MLflow's store after a project was moved or copied: the store has absolute artifact locations.

Without the correction, no registered model loads, and new files go to the old folder, which is created again. MLflow
has no alternative: it makes relative locations absolute, loads `mlflow-artifacts:` only through a server, and has no
call that changes a location.
"""

import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

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
    """Return the path of the project's own store, which may not exist yet."""
    return config.project_root() / "mlruns" / "mlflow.db"


def correct_paths() -> None:
    """If the project was moved or copied, set the artifact locations in its own store to the new paths and log it.

    Does not change a project that was only opened by another path, such as a link, or locations that the user chose.

    Raises:
        UserError: the store belongs to another user.
    """
    path = own_store()
    files.refuse_no_access(path)
    old = _place_when_made(path)
    if old is None or old == path.parent or (old.exists() and old.samefile(path.parent)):
        return
    with closing(sqlite3.connect(path, timeout=20)) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")  # A second process waits here, and finds nothing to correct.
        corrected = 0
        for table, column in LOCATIONS:
            for before, now in ((old.as_uri(), path.parent.as_uri()), (str(old), str(path.parent))):
                # The names of tables and columns are constants; sqlite3 accepts only values as parameters.
                change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                start = f"{before}/artifacts/"
                values = (f"{now}/artifacts/", len(start) + 1, len(start), start)
                corrected += connection.execute(change, values).rowcount
    if corrected:
        logger.warning("this project was in %s: %d file locations in %s were corrected", old.parent, corrected, path)


def _place_when_made(path: Path) -> Path | None:
    """Return the mlruns/ in which a store was created, according to its first experiment; None for another layout."""
    with closing(sqlite3.connect(path, timeout=20)) as connection:
        found = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
    match = re.fullmatch(r"file://(/.*/mlruns)/artifacts/0", found[0] or "") if found else None
    return Path(unquote(match[1])) if match else None

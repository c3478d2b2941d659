"""The versions in the project's own MLflow registry, read from its file: MLflow itself takes seconds to import.

The tables are MLflow's own matter. A test compares what is read with what MLflow says, and where they are others by
now, whoever asks gets an ``sqlite3.Error`` and asks MLflow instead.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from tasks import config
from tasks.records import ModelVersion

VERSIONS = """
SELECT v.name, v.version, coalesce(t.value, v.run_id)
FROM model_versions v LEFT JOIN tags t ON t.run_uuid = v.run_id AND t.key = 'local_run_id'
WHERE v.current_stage IS NOT 'Deleted_Internal'
"""
ALIASES = "SELECT name, version, alias FROM registered_model_aliases ORDER BY alias"
TAGS = "SELECT name, version, key, value FROM model_version_tags"


def name_of(settings: config.Settings, dataset: str) -> str:
    """Return the name of the registered model that a run's becomes a version of."""
    return settings.register_.model_name or f"{dataset}-{settings.model.name.replace(':', '.')}"


def read(store: Path) -> list[ModelVersion]:
    """Return all versions of all registered models in a store, by name and number; nothing is written.

    Args:
        store: an SQLite file of MLflow's; one that is not there has none.

    Raises:
        sqlite3.Error: it is no such file, or of another layout.
    """
    if not store.exists():
        return []
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
        aliases: dict[tuple[str, int], list[str]] = {}
        for name, version, alias in connection.execute(ALIASES):
            aliases.setdefault((name, version), []).append(alias)
        tags: dict[tuple[str, int], dict[str, str]] = {}
        for name, version, key, value in connection.execute(TAGS):
            tags.setdefault((name, version), {})[key] = value
        found = connection.execute(VERSIONS).fetchall()
    return [
        ModelVersion(
            name=name,
            version=str(version),
            aliases=tuple(aliases.get((name, version), ())),
            run_id=run_id or None,
            tags=tags.get((name, version), {}),
        )
        for name, version, run_id in sorted(found)
    ]


def place(store: Path, name: str, version: str) -> str:
    """Return where the files of a version lie, as MLflow addresses them; nothing is written.

    Raises:
        sqlite3.Error: it is no such file, or of another layout.
    """
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
        ((found,),) = connection.execute(
            "SELECT coalesce(storage_location, source) FROM model_versions WHERE name = ? AND version = ?",
            (name, int(version)),
        ).fetchall()
    return str(found)

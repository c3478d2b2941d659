import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tasks.runs import relocation

# What of MLflow's tables is looked at, as MLflow 3.17 names it; test_register.py has the real ones.
TABLES = """
CREATE TABLE experiments (experiment_id INTEGER, artifact_location TEXT);
CREATE TABLE runs (run_uuid TEXT, artifact_uri TEXT);
CREATE TABLE logged_models (model_id TEXT, artifact_location TEXT);
CREATE TABLE model_versions (version INTEGER, source TEXT, storage_location TEXT);
"""


def make_store(mlruns: Path) -> None:
    """Make what a project with one run and one version in it leaves."""
    place = (mlruns / "artifacts").as_uri()
    (mlruns / "artifacts" / "digits").mkdir(parents=True)
    with closing(sqlite3.connect(mlruns / "mlflow.db")) as database, database:
        database.executescript(TABLES)
        rows = [
            (0, f"{place}/0"),
            (1, f"{place}/digits"),
            (2, "s3://bucket/mine"),
            (3, "file:///other/mlruns/artifacts/x"),
        ]
        database.executemany("INSERT INTO experiments VALUES (?, ?)", rows)
        database.execute("INSERT INTO runs VALUES ('r', ?)", (f"{place}/digits/r/artifacts",))
        database.execute("INSERT INTO logged_models VALUES ('m', ?)", (f"{place}/digits/models/m",))
        versions = [(1, f"{place}/digits/models/m", f"{place}/digits/models/m"), (2, "models:/m-2", None)]
        database.executemany("INSERT INTO model_versions VALUES (?, ?, ?)", versions)


def locations(mlruns: Path) -> list[str | None]:
    with closing(sqlite3.connect(mlruns / "mlflow.db")) as database:
        return [
            location
            for table, column in relocation.LOCATIONS
            for (location,) in database.execute(f"SELECT {column} FROM {table}")
        ]


def expected(mlruns: Path) -> list[str | None]:
    place = (mlruns / "artifacts").as_uri()
    model = f"{place}/digits/models/m"
    own = [f"{place}/0", f"{place}/digits", "s3://bucket/mine", "file:///other/mlruns/artifacts/x"]
    return [*own, f"{place}/digits/r/artifacts", model, model, "models:/m-2", model, None]


@pytest.mark.parametrize("name", ["moved", "with space % ü"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_project_that_was_moved_or_copied_uses_its_own_files(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, copied: bool, name: str
) -> None:
    make_store(project / "mlruns")
    before = locations(project / "mlruns")
    assert before == expected(project / "mlruns")
    new = project.with_name(name)
    shutil.copytree(project, new) if copied else project.rename(new)
    monkeypatch.chdir(new)
    for _ in range(2):
        relocation.mend()
    assert locations(new / "mlruns") == expected(new / "mlruns")
    (said,) = caplog.messages
    assert said == f"this project was in {project}: 6 locations of files in {new}/mlruns/mlflow.db are mended"
    if copied:
        assert locations(project / "mlruns") == before
        monkeypatch.chdir(project)
        relocation.mend()
        assert locations(project / "mlruns") == before
        assert len(caplog.messages) == 1


def test_an_old_place_that_came_back_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_store(project / "mlruns")
    new = project.rename(project.with_name("moved"))
    (project / "mlruns" / "artifacts" / "digits").mkdir(parents=True)
    monkeypatch.chdir(new)
    relocation.mend()
    assert caplog.messages[0].endswith(f". What was written to {project}/mlruns/artifacts since then is still there")


def test_a_project_that_is_reached_by_a_link_is_left_alone(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    project.with_name("link").symlink_to(project)
    make_store(project.with_name("link") / "mlruns")
    before = locations(project / "mlruns")
    with caplog.at_level(logging.WARNING):
        relocation.mend()
    assert locations(project / "mlruns") == before
    assert caplog.messages == []

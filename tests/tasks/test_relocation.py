import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.tracking.store import open_store
from tests.tasks.registering import Trained


@pytest.fixture
def places(store: Path, project: Path) -> list[str]:
    """Register a model, make an experiment elsewhere, and return where MLflow says that the files lie."""
    with closing(sqlite3.connect(store)) as database, database:  # As of a store that was made here.
        place = f"{project.as_uri()}/mlruns/artifacts/0"
        database.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (place,))
    Trained().register()
    open_store().create_experiment("mine", "s3://bucket/mine")
    return locations(store.parent.absolute())


def locations(mlruns: Path) -> list[str]:
    uri = f"sqlite:///{mlruns / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    experiments = client.search_experiments()
    ids = [one.experiment_id for one in experiments]
    found = [one.artifact_location for one in [*experiments, *client.search_logged_models(ids)]]
    found += [one.info.artifact_uri for one in client.search_runs(ids)]
    for one in client.search_model_versions():
        found += [str(one.source), client.get_model_version_download_uri(one.name, one.version)]
    return sorted(found)


def moved(places: list[str], old: Path, new: Path) -> list[str]:
    pairs = ((old.as_uri(), new.as_uri()), (str(old), str(new)))
    for before, now in pairs:
        places = [place.replace(f"{before}/mlruns/", f"{now}/mlruns/") for place in places]
    return sorted(places)


@pytest.mark.parametrize("name", ["moved", "with space ü"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_project_that_was_moved_or_copied_uses_its_own_files(
    project: Path,
    places: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    copied: bool,
    name: str,
) -> None:
    new = project.with_name(name)
    shutil.copytree(project, new, symlinks=True) if copied else project.rename(new)
    monkeypatch.chdir(new)
    for _ in range(2):
        open_store()
    assert locations(new / "mlruns") == moved(places, project, new) != places
    (said,) = [one for one in caplog.messages if "this project was in" in one]
    assert said.startswith(f"this project was in {project}: ")
    if copied:
        monkeypatch.chdir(project)
        open_store()
        assert locations(project / "mlruns") == places


def test_a_project_that_is_reached_by_a_link_is_left_alone(
    project: Path, places: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    project.with_name("link").symlink_to(project)
    monkeypatch.chdir(project.with_name("link"))
    with caplog.at_level(logging.WARNING):
        open_store()
    assert locations(project / "mlruns") == places
    assert not [one for one in caplog.messages if "this project was in" in one]

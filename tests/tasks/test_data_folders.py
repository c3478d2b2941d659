import socket

import pytest

from tasks import config, records
from tasks.operations import data_folders
from tasks.runs import locks, outcome
from tasks.system.errors import UserError


def test_a_name_that_is_not_there_gets_the_nearest_one(project):
    for ask in (data_folders.show, data_folders.remove):
        with pytest.raises(UserError, match=r"unknown dataset 'digtis': did you mean 'digits'.+the folders of data/"):
            ask("digtis")
    for name in ("..", "../digits", "digits/../digits", "/etc", ".", ""):
        with pytest.raises(UserError, match="unknown dataset"):
            data_folders.remove(name)
    with pytest.raises(
        UserError, match=r"dataset digits is not prepared: `stratagem data prepare --set.+data pull digits`"
    ):
        data_folders.show("digits")
    (project / "data" / "digits" / "dvc.lock").unlink()
    with pytest.raises(UserError, match=r"not prepared: `stratagem data prepare --set dataset\.name=digits`$"):
        data_folders.show("digits")


def test_a_dataset_that_a_run_is_at_work_on_is_not_removed(project):
    settings = config.load(None, ())
    run = records.Run(
        run_id="a" * 32,
        experiment="tests",
        name="tests",
        folder=f"mlruns/runs/{'a' * 32}",
        lineage=records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None),
        settings=settings.to_json(),
        key=locks.key_of(settings),
        host=socket.gethostname(),
    )
    records.save(run, project / run.folder / "records" / "run.json")
    outcome.set_status(run, "RUNNING")
    with (
        locks.lock(run.key, "tests"),
        pytest.raises(UserError, match=f"data/digits: run {run.run_id} on .+ uses it"),
    ):
        data_folders.remove("digits")
    assert (project / "data" / "digits" / "params.yaml").exists()
    with locks.lock(run.key, "tests"):
        outcome.set_status(run, "FINISHED")
        assert locks.at_work_on("digits") == [], "another one with its settings may have begun"
        outcome.set_status(run, "RUNNING")
        assert locks.at_work_on("digits") == [run]
        assert locks.at_work_on("mnist") == []
    assert data_folders.remove("digits") == [], "its process was killed"

"""Which run is there already, which member of a cluster this process is, and what a stage that comes after needs."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import config
from tasks.operations import pipeline
from tasks.records import PreparedDataset
from tasks.runs import entries, lineage
from tasks.strategies import engines
from tasks.system.errors import Interrupted, UserError
from tests.tasks.clusters import TWO, place_of
from tests.tasks.written_runs import run_id_of, write_run, write_summary

pytestmark = pytest.mark.usefixtures("on_cpus")


def test_an_alias_may_be_another_version_by_now(project):
    prepared = PreparedDataset.model_construct(name="digits", data_version="1")
    found = {}
    for number, initial in enumerate(("models:/digits@best", "models:/digits/3", "at@home.keras")):
        settings = config.load(None, {"model.initial": initial})
        traced = lineage.collect(settings, "1")
        summary = write_summary(write_run(number, overrides={"model.initial": initial}, **traced.model_dump()))
        assert entries.find_finished("digits", traced)[1] == summary
        found[initial] = pipeline.unchanged(settings, prepared)
    assert {initial: one and one.run_id for initial, one in found.items()} == {
        "models:/digits@best": None, "models:/digits/3": run_id_of(1), "at@home.keras": run_id_of(2),
    }  # fmt: skip


@pytest.mark.parametrize(("index", "name"), [(0, None), (1, "worker 1")])
def test_who_is_not_the_chief_of_a_cluster_knows_its_name(project, monkeypatch, index, name):
    settings = config.load(None, ["strategy.kind=multi_worker"])
    assert engines.members(settings.strategy)[0].is_chief, "there the chief starts the others"
    monkeypatch.setenv("TF_CONFIG", place_of("worker", index, worker=TWO))
    member = engines.members(settings.strategy)[0]
    assert (None if member.is_chief else member.name) == name
    assert engines.members(config.load().strategy)[0].is_chief, "no cluster"


def test_a_member_does_not_begin_before_the_data_are_prepared(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=TWO))
    with pytest.raises(UserError, match="dataset digits is not prepared"):
        pipeline.join(None, ["strategy.kind=multi_worker"])
    assert not (project / "mlruns" / "logs").exists()


def test_the_newest_run_is_that_on_the_same_dataset(project):
    with pytest.raises(UserError, match="no run on digits exists"):
        entries.newest("digits")
    for age, (number, dataset) in enumerate([(3, "mnist"), (2, "digits"), (1, "digits")]):
        run = write_run(number, overrides={"dataset.name": dataset})
        os.utime(Path(run.folder, "records", "run.json"), (time.time() - age * 100,) * 2)
    assert entries.newest("digits").run_id == run_id_of(2)


def test_a_run_that_cannot_be_evaluated_is_refused(project):
    run_id = "0123456789abcdef" * 2
    write_run(1, "KILLED", run_id=run_id, folder=f"mlruns/runs/{run_id}")
    with pytest.raises(UserError, match=f"unknown run '{run_id[:-1]}0': did you mean '{run_id}'"):
        pipeline.load_training(None, [], f"{run_id[:-1]}0")
    for name in (run_id, run_id[:6]):
        with pytest.raises(UserError, match=f"{run_id} did not finish its training: resume it with `stratagem train"):
            pipeline.load_training(None, [], name)


def test_a_second_signal_while_a_run_is_ended_is_no_failure_to_end_it(monkeypatch, capsys):
    """The stage runs to its end, and then says that it was interrupted."""

    def interrupted(settings, **arguments):
        raise Interrupted("end_run was interrupted")

    monkeypatch.setattr(pipeline.stages, "end_run", interrupted)
    pipeline.end_failed(None, SimpleNamespace(run_id="0a"), KeyboardInterrupt())
    assert capsys.readouterr().err == ""

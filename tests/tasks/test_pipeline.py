"""Which run is there already, which member of a cluster this process is, and what a stage that comes after needs."""

import os
import time
from pathlib import Path

import pytest

from tasks import config, records, runs
from tasks.operations import pipeline
from tasks.records import PreparedDataset, Run, RunSummary
from tasks.runs import lineage
from tasks.system.errors import UserError
from tests.tasks.clusters import TWO, place_of

pytestmark = pytest.mark.usefixtures("on_cpus")


def test_an_alias_may_be_another_version_by_now(project):
    prepared = PreparedDataset.model_construct(name="digits", data_version="1")
    found = {}
    for number, initial in enumerate(("models:/digits@best", "models:/digits/3", "at@home.keras")):
        settings = config.load(None, {"model.initial": initial})
        traced = lineage.collect(settings, "1")
        summary = RunSummary.model_validate(
            traced.model_dump()
            | {
                "run_id": f"{number}", "flow_run_id": None, "dataset": "digits", "strategy": "one_device",
                "loop": "fit", "num_replicas": 1, "epochs": 1, "steps": 2, "examples_per_second": None, "metrics": {},
                "checkpoint": "c", "weights_digest": "w", "model_uri": None, "model_version": None, "aliases": (),
                "seconds": {}, "finished_at": f"2026-01-0{number + 1}T00:00:00+00:00",
            }
        )  # fmt: skip
        # Alone, as where its record is gone.
        records.save(summary, project / "mlruns" / "runs" / f"{number}" / "summary.json")
        assert lineage.finished_run("digits", traced) == summary
        found[initial] = pipeline.unchanged(settings, prepared)
    assert {initial: one and one.run_id for initial, one in found.items()} == {
        "models:/digits@best": None, "models:/digits/3": "1", "at@home.keras": "2",
    }  # fmt: skip


@pytest.mark.parametrize(("index", "name"), [(0, None), (1, "worker 1")])
def test_who_is_not_the_chief_of_a_cluster_knows_its_name(project, monkeypatch, index, name):
    settings = config.load(None, ["strategy.kind=multi_worker"])
    assert pipeline.member_name(settings) is None, "there the chief starts the others"
    monkeypatch.setenv("TF_CONFIG", place_of("worker", index, worker=TWO))
    assert pipeline.member_name(settings) == name
    assert pipeline.member_name(config.load()) is None, "no cluster"


def test_a_member_does_not_begin_before_the_data_are_prepared(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=TWO))
    with pytest.raises(UserError, match="dataset digits is not prepared"):
        pipeline.join(None, ["strategy.kind=multi_worker"])
    assert not (project / "mlruns" / "logs").exists()


def _begin(project: Path, name: str, dataset: str) -> Path:
    """Write the record of a run as `start` does; return its folder."""
    folder = project / "mlruns" / "runs" / name
    (folder / "records").mkdir(parents=True)
    values = {
        "run_id": name, "experiment": dataset, "name": f"{dataset}-x", "folder": f"mlruns/runs/{name}",
        "settings": config.load(None, [f"dataset.name={dataset}"]).to_json(),
        "lineage": dict.fromkeys(("git_commit", "git_dirty", "data_version"))
        | {"code_digest": "", "settings_digest": ""},
    }  # fmt: skip
    records.save(Run.model_validate(values), folder / "records" / "run.json")
    return folder


def test_the_newest_run_is_that_on_the_same_dataset(project):
    with pytest.raises(UserError, match="there is no run on digits"):
        runs.newest("digits")
    for age, (name, dataset) in enumerate([("other", "mnist"), ("new", "digits"), ("old", "digits")]):
        record = _begin(project, name, dataset) / "records" / "run.json"
        os.utime(record, (time.time() - age * 100,) * 2)
    assert runs.newest("digits").run_id == "new"


def test_a_run_that_cannot_be_evaluated_is_refused(project):
    run_id = "0123456789abcdef" * 2
    _begin(project, run_id, "digits")
    with pytest.raises(UserError, match=f"unknown run '{run_id[:-1]}0': did you mean '{run_id}'"):
        pipeline.load_training(None, [], f"{run_id[:-1]}0")
    for name in (run_id, run_id[:6]):
        with pytest.raises(UserError, match=f"{run_id} was not trained to its end: resume it with `stratagem train"):
            pipeline.load_training(None, [], name)

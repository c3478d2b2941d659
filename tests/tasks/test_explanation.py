"""What `--explain` says, and that it does nothing."""

import json
import sys
from pathlib import Path

import pytest

from flows.explanation import explain as show
from tasks import config, explanation
from tasks.errors import UserError
from tests.tasks.written_runs import write_run

STRATAGEM = (sys.executable, "-c", "from flows.cli import main; main()")
# What makes the next look quicker.
CACHES = {"code.json", "catalogue.db"}


def files_of(project):
    return {
        str(path.relative_to(project)): path.stat().st_mtime_ns
        for path in project.rglob("*")
        if path.is_file() and path.name not in CACHES and "__pycache__" not in path.parts
    }


def sources(recipe=None, *overrides):
    return {one.key: (one.value, one.source) for one in explanation.explain(recipe, overrides).settings}


def test_each_setting_has_its_source(project):
    found = sources("mnist", "train.epochs=3")
    assert found["train.epochs"] == (3, "--set")
    assert found["dataset.name"] == ("mnist", "recipe mnist")
    assert found["train.seed"] == (config.load().train.seed, "params.yaml")
    assert found.keys() == config.load("mnist").flat().keys()


def test_a_rule_is_a_source(project):
    """A batch size of one sort takes the other's place."""
    found = sources(None, "train.global_batch_size=64")
    assert found["train.global_batch_size"] == (64, "--set")
    assert found["train.per_replica_batch_size"] == (None, "default rule")


def test_a_dataset_is_a_source(project, tiny):
    found = sources(None, "dataset.name=tiny")
    assert found["train.epochs"][1].startswith("dataset: 200 examples to train on")


def test_what_is_there_is_told_and_what_is_not(project, tiny):
    stages = {one.stage: one for one in explanation.explain(None, ["dataset.name=tiny"]).stages}
    assert (stages["download"].does, stages["prepare"].does, stages["train"].does) == (
        "would run", "asks DVC", "would run",
    )  # fmt: skip
    assert list(stages) == list(explanation.STAGES)
    left_out = explanation.explain(None, ["dataset.name=tiny", "register.enabled=false"]).stages[-1]
    assert left_out.does == "is left out"


def test_a_run_that_would_be_resumed_is_named(project, digits):
    from tasks import lineage

    settings = config.load()
    traced = lineage.collect(settings, lineage.data_version("digits"))
    run = write_run(1, "FAILED", **traced.model_dump())
    (train,) = explanation.explain(None, [], ["train"]).stages
    assert (train.does, run.run_id in train.why) == ("would resume", True)


def test_a_mistake_is_refused_as_the_command_would(project):
    with pytest.raises(UserError, match=r"train\.epocs"):
        explanation.explain(None, ["train.epocs=3"])
    with pytest.raises(UserError, match="--fresh with --explain"):
        show(None, [], False, beside={"--fresh": True, "--resume": None})


@pytest.mark.parametrize("command", ["run", "train", "prepare", "download"])
@pytest.mark.slow
def test_nothing_is_done(project, run, command):
    before = files_of(project)
    done = run([*STRATAGEM, command, "--explain", "--json"])
    assert done.returncode == 0, done.stderr
    assert files_of(project) == before
    assert not Path("mlruns/runs").exists()
    known = {"run": 5, "train": 1, "prepare": 2, "download": 1}
    assert len(json.loads(done.stdout)["stages"]) == known[command]

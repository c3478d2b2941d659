"""What `--explain` says, and that it does nothing."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import typer

from flows.cli.main import app
from flows.cli.training import explain_run
from flows.plan import plan, plan_of_sweep
from tasks import config, sweeps
from tasks.data import data_state, dataset_folder
from tasks.operations import dvc_data, explanation
from tasks.runs import lineage
from tasks.system.errors import UserError
from tests.tasks.written_runs import write_results, write_run

STRATAGEM = (sys.executable, "-c", "from flows.cli.main import main; main()")
# What makes the next look quicker.
CACHES = {"code.json"}


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


@pytest.fixture
def known(project):
    """Let DVC have found a dataset up to date."""

    def known(name):
        folder = project / "data" / name
        if name != "digits":
            shutil.copy(project / "data/digits/dvc.yaml", folder)
            (folder / "params.yaml").write_text(f"dataset: {{name: {name}, version: null, image_size: null}}\n")
            (folder / "raw").mkdir()
            dataset_folder.note_reader(folder)
        (project / ".dvc/tmp").mkdir(exist_ok=True)
        with data_state.remembered(project, name, trusted_after_seconds=0):
            pass

    return known


def test_a_dataset_is_a_source(project, tiny, known):
    known("tiny")
    found = sources(None, "dataset.name=tiny", "train.epochs=3")
    assert found["train.per_replica_batch_size"][1].startswith("dataset: 200 examples to train on")
    assert found["train.epochs"] == (3, "--set")


def test_nothing_is_said_that_follows_from_data_which_have_changed(project, tiny, known):
    known("tiny")
    (project / "data" / "tiny" / "params.yaml").write_text("dataset: {name: tiny, version: 2.0.0, image_size: null}\n")
    found = explanation.explain(None, ["dataset.name=tiny", "train.epochs=3"])
    assert [(one.stage, one.does, one.why) for one in found.stages][1:3] == [
        ("prepare", "would run", "data/tiny/prepared is there, and what it is made from has changed since"),
        ("train", "would run", "its data are prepared first"),
    ]
    settings = {one.key: (one.value, one.source) for one in found.settings}
    later = (None, "dataset: after prepare")
    assert {settings[key] for key in ("model.name", "train.per_replica_batch_size", "register.minimum")} == {later}
    assert settings["train.epochs"] == (3, "--set")
    assert settings["train.seed"][1] == "params.yaml"


def test_what_another_machine_trains_with_follows_from_data_that_are_up_to_date(project, tiny, known):
    assert dvc_data.settle(None, ["train.epochs=3"]).train.epochs == 3, "params.yaml says all of it"
    with pytest.raises(UserError, match=r"changed since\. First `stratagem prepare --set dataset\.name=tiny`"):
        dvc_data.settle(None, ["dataset.name=tiny"])
    known("tiny")
    assert dvc_data.settle(None, ["dataset.name=tiny"]).train.per_replica_batch_size == 8


def test_what_is_there_is_told_and_what_is_not(project, tiny):
    stages = {one.stage: one for one in explanation.explain(None, ["dataset.name=tiny"]).stages}
    assert {one.does for one in stages.values()} == {"would run"}
    assert list(stages) == list(explanation.STAGES)
    left_out = explanation.explain(None, ["dataset.name=tiny", "register.enabled=false"]).stages[-1]
    assert left_out.does == "is left out"


def test_a_run_that_would_be_resumed_is_named(project, digits, known):
    known("digits")
    settings = config.load()
    traced = lineage.collect(settings, lineage.data_version("digits"))
    run = write_run(1, "FAILED", **traced.model_dump())
    (train,) = explanation.explain(None, [], ["train"]).stages
    assert (train.does, run.run_id in train.why) == ("would resume", True)


def test_a_mistake_is_refused_as_the_command_would(project):
    with pytest.raises(UserError, match=r"train\.epocs"):
        explanation.explain(None, ["train.epocs=3"])
    with pytest.raises(UserError, match="--fresh with --explain"):
        explain_run(None, [], False, beside={"--fresh": True, "--resume": None})


def test_the_commands_that_train_or_add_data_have_it_by_both_names():
    def those(flag, group, prefix=""):
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                yield from those(flag, one, f"{name} ")
            elif flag in [option for parameter in one.params for option in parameter.opts]:
                yield f"{prefix}{name}"

    root = typer.main.get_command(app)
    explained = set(those("--explain", root))
    assert explained == {"run", "compare", "sweep", "data add", "submit"}
    assert set(those("--dry-run", root)) == explained | {"init", "reproduce", "runs prune"}


@pytest.fixture
def trained(project, digits, empty_store, known):
    """A run that was trained, evaluated and registered, as its records say."""
    known("digits")
    shutil.copy(empty_store, "mlruns")
    run = write_run(1, **lineage.collect(config.load(), lineage.data_version("digits")).model_dump())
    write_results(run, "digits-convnet2/1", accuracy=0.95)
    return run


def does(found):
    return {one.stage: (one.does, one.why) for one in found.stages}


def test_a_dataset_that_would_be_added_is_told(project):
    Path("flowers.csv").write_text("length,kind\n" + "1.5,a\n2.5,b\n" * 20)
    before = files_of(project)
    found = explanation.add("flowers.csv", None, {"target": "kind", "test": 0.25})
    assert [one.does for one in found.stages] == ["would run", "would run"]
    settings = {one.key: (one.value, one.source) for one in found.settings}
    assert settings["dataset.name"] == ("flowers", "SOURCE")
    assert settings["dataset.test"] == (0.25, "--set")
    assert settings["dataset.columns"][1] == "SOURCE, as it was read"
    assert [one.stage for one in explanation.add("mnist", None, {}).stages] == ["download", "prepare"]
    assert files_of(project) == before
    with pytest.raises(UserError, match="no such file or folder"):
        explanation.add("./none.csv", None, {})


def test_the_rows_of_a_comparison_are_told(project, digits):
    before = files_of(project)
    given = {"train.epochs": 3, "strategy.devices": 3}
    planned = plan(["one_device", "mirrored"], ["fit"], None, given)
    found = explanation.comparison(planned.rows, planned.key, None, given, digits)
    rows = does(found)
    assert rows["one_device, fit"] == ("would run", "no unfinished comparison has measured it")
    settings = {one.key: (one.value, one.source) for one in found.settings}
    assert settings["train.epochs"] == (3, "--set")
    assert settings["strategy.devices"] == ({"mirrored, fit": 3}, "--set")
    assert settings["strategy.kind"][1] == "the comparison"
    assert settings["train.seed"][1] == "params.yaml"
    assert files_of(project) == before


def test_the_trials_of_a_sweep_are_told(project, digits):
    before = files_of(project)
    space = sweeps.load("digits")
    found = explanation.sweep(space, plan_of_sweep(space, 1), 7, digits)
    assert does(found)["trials"] == ("would run", "no sweep of this space is unfinished")
    sources = {one.key: one.source for one in found.settings}
    swept = next(iter(space.parameters))
    assert sources[swept] == "digits.yaml, of which each trial takes one"
    assert files_of(project) == before


COMMANDS = {
    "run": ([], 5), "compare": (["--strategies", "one_device,mirrored"], 6), "sweep": (["digits"], 4),
    "data add": (["flowers.csv", "--target", "kind"], 2),
}  # fmt: skip


@pytest.mark.in_ci(0, 2)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_nothing_is_done(project, trained, run, command):
    Path("flowers.csv").write_text("length,kind\n" + "1.5,a\n2.5,b\n" * 20)
    before = files_of(project)
    words, num_stages = COMMANDS[command]
    done = run([*STRATAGEM, *command.split(), *words, "--explain", "--json"])
    assert done.returncode == 0, done.stderr
    assert files_of(project) == before
    assert len(json.loads(done.stdout)["stages"]) == num_stages

"""What `--dry-run` says, and that it does nothing."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import typer

from flows import pairs, plan
from flows.cli.main import app
from tasks import config, sweeps
from tasks.data import data_state, dataset_folder
from tasks.operations import dvc_data, pipeline
from tasks.runs import lineage
from tasks.system.errors import UserError
from tests.tasks.written_runs import write_results, write_run, write_summary

STRATAGEM = (sys.executable, "-c", "from flows.cli.main import main; main()")
# What makes the next look quicker.
CACHES = {"code.json"}


def files_of(project):
    return {
        str(path.relative_to(project)): path.stat().st_mtime_ns
        for path in project.rglob("*")
        if path.is_file() and path.name not in CACHES and "__pycache__" not in path.parts
    }


def of_run(recipe, overrides, if_changed=False, **resumption):
    return plan.of_run(recipe, overrides, pipeline.Resumption(**resumption), if_changed)


def sources(recipe=None, *overrides):
    return {one.key: (one.value, one.source) for one in of_run(recipe, overrides).settings}


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
        with data_state.remembered(project, name):
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
    found = of_run(None, ["dataset.name=tiny", "train.epochs=3"])
    assert [(one.stage, one.does, one.why) for one in found.stages][1:3] == [
        ("prepare", "would run", "data/tiny/prepared exists, but its sources have changed since"),
        ("train", "would run", "its data must be prepared first"),
    ]
    settings = {one.key: (one.value, one.source) for one in found.settings}
    later = (None, "dataset: after prepare")
    assert {settings[key] for key in ("model.name", "train.per_replica_batch_size", "register.minimum")} == {later}
    assert settings["train.epochs"] == (3, "--set")
    assert settings["train.seed"][1] == "params.yaml"


def test_what_another_machine_trains_with_follows_from_data_that_are_up_to_date(project, tiny, known):
    assert dvc_data.settle(None, ["train.epochs=3"]).train.epochs == 3, "params.yaml says all of it"
    with pytest.raises(UserError, match=r"changed since\. First `stratagem data prepare --set dataset\.name=tiny`"):
        dvc_data.settle(None, ["dataset.name=tiny"])
    known("tiny")
    assert dvc_data.settle(None, ["dataset.name=tiny"]).train.per_replica_batch_size == 8


def test_what_is_there_is_told_and_what_is_not(project, tiny):
    stages = {one.stage: one for one in of_run(None, ["dataset.name=tiny"]).stages}
    assert {one.does for one in stages.values()} == {"would run"}
    assert list(stages) == ["download", "prepare", "train", "evaluate", "register"]
    left_out = of_run(None, ["dataset.name=tiny", "register.enabled=false"]).stages[-1]
    assert left_out.does == "is skipped"


def test_a_run_that_would_be_resumed_is_named(project, digits, known):
    known("digits")
    settings = config.load()
    traced = lineage.collect(settings, lineage.data_version("digits"))
    run = write_run(1, "FAILED", **traced.model_dump())
    trains = {
        name: of_run(None, [], **given).stages[2]
        for name, given in {"resumed": {}, "fresh": {"fresh": True}, "named": {"run": run.run_id}}.items()
    }
    assert (trains["resumed"].does, run.run_id in trains["resumed"].why) == ("would resume", True)
    assert (trains["fresh"].does, trains["fresh"].why) == ("would run", "--fresh")
    assert (trains["named"].does, trains["named"].why) == ("would resume", f"--resume {run.run_id}")


def test_nothing_would_run_where_nothing_has_changed(trained):
    stages = of_run(None, [], if_changed=True).stages
    assert [one.does for one in stages] == ["is cached", "is cached", "is skipped", "is skipped", "is skipped"]
    assert all(trained.run_id in one.why for one in stages[2:])
    assert "`stratagem run --if-changed` would not train" in of_run(None, []).stages[2].why


def test_a_mistake_is_refused_as_the_command_would(project):
    with pytest.raises(UserError, match=r"train\.epocs"):
        of_run(None, ["train.epocs=3"])


def test_the_commands_with_a_plan_have_it_by_two_names():
    def those(flag, group, prefix=""):
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                yield from those(flag, one, f"{name} ")
            elif flag in [option for parameter in one.params for option in parameter.opts]:
                yield f"{prefix}{name}"

    root = typer.main.get_command(app)
    planned = set(those("--dry-run", root))
    assert planned >= {"run", "compare", "sweep", "data add", "submit", "init", "runs reproduce", "runs prune"}
    assert set(those("-n", root)) == planned


@pytest.fixture
def trained(project, digits, empty_store, known):
    """A run that was trained, evaluated and registered, as its records say."""
    known("digits")
    shutil.copy(empty_store, "mlruns")
    traced = lineage.collect(config.load(), lineage.data_version("digits"))
    run = write_run(1, **traced.model_dump())
    write_results(run, "digits-convnet2/1", accuracy=0.95)
    write_summary(run)
    return run


def does(found):
    return {one.stage: (one.does, one.why) for one in found.stages}


def test_a_dataset_that_would_be_added_is_told(project):
    Path("flowers.csv").write_text("length,kind\n" + "1.5,a\n2.5,b\n" * 20)
    before = files_of(project)
    found = plan.of_addition("flowers.csv", None, {"target": "kind", "test": 0.25})
    assert [one.does for one in found.stages] == ["would run", "would run"]
    settings = {one.key: (one.value, one.source) for one in found.settings}
    assert settings["dataset.name"] == ("flowers", "SOURCE")
    assert settings["dataset.test"] == (0.25, "--set")
    assert settings["dataset.columns"][1] == "SOURCE"
    assert [one.stage for one in plan.of_addition("mnist", None, {}).stages] == ["download", "prepare"]
    assert files_of(project) == before
    with pytest.raises(UserError, match="no such file or folder"):
        plan.of_addition("./none.csv", None, {})


def test_the_rows_of_a_comparison_are_told(project, digits):
    before = files_of(project)
    given = {"train.epochs": 3, "strategy.devices": 3}
    planned = pairs.plan(["one_device", "mirrored"], ["fit"], None, given)
    found = plan.of_comparison(planned, digits, fresh=False)
    rows = does(found)
    assert rows["one_device, fit"] == ("would run", "no unfinished comparison has measured it")
    settings = {one.key: (one.value, one.source) for one in found.settings}
    assert settings["train.epochs"] == (3, "--set")
    assert not [key for key in settings if key.startswith("strategy.")], "they differ by row"
    assert settings["train.seed"][1] == "params.yaml"
    assert files_of(project) == before


def test_the_trials_of_a_sweep_are_told(project, digits):
    before = files_of(project)
    space = sweeps.load("digits")
    found = plan.of_sweep(space, 1, 7, digits, fresh=False)
    assert does(found)["trials"] == ("would run", "no sweep of this space is unfinished")
    sources = {one.key: one.source for one in found.settings}
    swept = next(iter(space.parameters))
    assert sources[swept] == "digits.yaml: each trial takes one of these"
    assert files_of(project) == before


def test_the_trials_of_a_sweep_over_kinds_are_told(project, digits):
    path = project / "kinds.yaml"
    path.write_text("space: {optimizer.kind: [sgd, adam]}\nmetric: validation/accuracy\n")
    found = plan.of_sweep(sweeps.load(str(path)), 1, 2, digits, fresh=True)
    settings = {one.key: (one.value, one.source) for one in found.settings}
    assert settings["optimizer.kind"] == ("['sgd', 'adam']", "kinds.yaml: each trial takes one of these")
    assert settings["optimizer.nesterov"] == (False, "default rule")
    assert settings["checkpoint.monitor"] == ("validation/accuracy", "kinds.yaml")
    given = sweeps.load(str(path), None, {"train.epochs": 3, "model.options.dropout": 0.1})
    sources = {one.key: one.source for one in plan.of_sweep(given, 1, 2, digits, fresh=True).settings}
    assert (sources["train.epochs"], sources["model.options.dropout"]) == ("--set", "--set")
    assert sources["checkpoint.monitor"] == "kinds.yaml"


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
    done = run([*STRATAGEM, *command.split(), *words, "--dry-run", "--json"])
    assert done.returncode == 0, done.stderr
    assert files_of(project) == before
    assert len(json.loads(done.stdout)["stages"]) == num_stages

"""What `--explain` says, and that it does nothing."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import typer

from flows.cli.explanation import explain as show
from flows.cli.main import app
from flows.operate import operation_status
from flows.plan import plan, plan_of_sweep
from tasks import config, records, runs, sweeps
from tasks.operations import explanation
from tasks.runs import lineage
from tasks.system.errors import UserError
from tasks.system.machine import free_ports
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


# They look, and tell what is there.
WITHOUT = {
    "data diff", "data list", "data show", "doctor", "jobs logs", "plan", "recipes", "runs diff",
    "runs show", "status", "strategies", "trace",
}  # fmt: skip


def test_each_command_that_changes_something_has_it():
    def without(group, prefix=""):
        for name, one in group.commands.items():
            if hasattr(one, "commands"):
                yield from without(one, f"{name} ")
            elif "--explain" not in [flag for parameter in one.params for flag in parameter.opts]:
                yield f"{prefix}{name}"

    assert set(without(typer.main.get_command(app))) == WITHOUT


@pytest.fixture
def trained(project, digits, empty_store):
    """A run that was trained, evaluated and registered, as its records say."""
    shutil.copy(empty_store, "mlruns")
    run = write_run(1, **lineage.collect(config.load(), lineage.data_version("digits")).model_dump())
    write_results(run, "digits-convnet2/1", accuracy=0.95)
    return run


def does(found):
    return {one.stage: (one.does, one.why) for one in found.stages}


def test_what_comes_after_a_training_is_told(project, trained):
    before = files_of(project)
    found = explanation.evaluate(None, ["evaluate.checkpoint=best"], None)
    (what, why), folder = does(found)["evaluate"], trained.folder
    assert what == "would run"
    assert why.startswith(f"{folder}/checkpoints/41 on the test split of data/digits")
    assert f"the evaluation of {folder}/checkpoints/82 is there, and would be replaced" in why
    settings = {one.key: one.source for one in found.settings}
    assert (settings["evaluate.checkpoint"], settings["train.epochs"]) == ("--set", f"run {trained.run_id}")
    steps = does(explanation.register(None, [], trained.run_id[:4], force=False))
    assert "is version digits-convnet2/1 already; of digits-convnet2: test/accuracy is 0.95" in steps["version"][1]
    assert steps["gate"] == ("would run", "digits-convnet2 has no champion yet")
    assert does(explanation.register(None, ["register.enabled=false"], None, False))["version"][0] == "is left out"
    assert does(explanation.report("latest"))["report"][1] == f"{folder}/report/report.html is not there"
    does_export = does(explanation.export("latest", "keras", None, "best"))["export"]
    assert does_export == (
        "would run", f"{folder}/models/best.keras as keras: {project}/{folder}/exports/keras-41 is not there",
    )  # fmt: skip
    with pytest.raises(UserError, match="unknown export format"):
        explanation.export("latest", "kera", None, None)
    assert files_of(project) == before


def test_what_a_model_would_be_used_for_is_told(project, trained):
    Path("a.png").touch()
    before = files_of(project)
    found = does(explanation.predict(["a.png"], "latest", Path("a.csv"), None, False, "utf-8"))
    assert found["load"][1] == f"run {trained.run_id}: {project}/{trained.folder}/models/final.keras"
    assert (found["predict"][1], found["write"][1]) == ("a.png", "a.csv is not there; as csv")
    with pytest.raises(UserError, match=r"a\.png is there already"):
        explanation.predict(["a.png"], "latest", Path("a.png"), "csv", False, "utf-8")
    (port,) = free_ports(1)
    found = does(explanation.serve("latest", port))
    assert (found["serve"][1], found["follow"][0]) == (f"port {port} of 127.0.0.1 is free", "is left out")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match=f"--port {port} is taken"):
        explanation.serve("latest", port)
    assert files_of(project) == before


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
    planned = plan(["one_device", "mirrored"], ["fit"], None, {"train.epochs": 3, "strategy.devices": 3})
    found = explanation.comparison(planned.rows, planned.key, None, {"train.epochs": 3, "strategy.devices": 3})
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
    found = explanation.sweep(space, plan_of_sweep(space, 1), 7)
    assert does(found)["trials"] == ("would run", "no sweep of this space is unfinished")
    sources = {one.key: one.source for one in found.settings}
    swept = next(iter(space.parameters))
    assert sources[swept] == "digits.yaml, of which each trial takes one"
    assert files_of(project) == before


def test_what_would_be_removed_or_moved_is_told(project, trained):
    before = files_of(project)
    steps = does(explanation.remove("digits"))
    assert steps["remove"][1].startswith("what was made in data/digits, of ")
    assert "were trained on it (1)" in steps["keep"][1]
    version = lineage.data_version("digits")
    assert does(explanation.push(None)) == {
        "push": ("asks DVC", f"data/digits, data version {version}: which of its files the remote lacks")
    }
    assert does(explanation.pull("digits"))["pull"][1].startswith(f"data/digits, data version {version}: which of its")
    for explain in (explanation.remove, explanation.push, explanation.pull):
        with pytest.raises(UserError, match="digit"):
            explain("digitz")
    with pytest.raises(UserError, match="unknown registered model 'digitz': there is none"):
        explanation.rollback("digitz")
    assert files_of(project) == before
    runs.set_status(trained, "RUNNING")
    with runs.lock(trained.key, "a training"), pytest.raises(UserError, match="is at work on it: wait for its end"):
        explanation.remove("digits")


def test_what_would_be_ended_is_told(project, trained):
    assert does(explanation.reconcile()) == {
        "end": ("is left out", "commands that were killed at work: none"),
        "report": ("is left out", "flow runs whose end Prefect was not told of: none"),
        "deliver": ("is left out", "runs with more to tell MLflow: none"),
    }
    Path(trained.folder, "unsent.jsonl").write_text('{"create": {}}\n')
    assert does(explanation.reconcile())["deliver"] == (
        "would run", f"runs with more to tell MLflow: {trained.run_id}",
    )  # fmt: skip
    assert does(operation_status.explain_down()) == {"down": ("is left out", "nothing runs here")}


def test_what_would_be_kept_running_is_told(project, monkeypatch):
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    found = does(operation_status.explain_up())
    assert list(found) == ["prefect", "mlflow", "worker"]
    assert "prefect.db is not there yet" in found["prefect"][1]
    assert found["worker"] == ("would run", "of the deployments training, comparison, sweep, nightly")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert does(operation_status.explain_up())["mlflow"][0] == "is left out"
    assert not (project / "mlruns" / "up").exists()
    pages = does(operation_status.explain_ui())
    assert list(pages) == ["prefect", "mlflow"]
    assert str(Path.home() / ".prefect" / "prefect.db") in pages["prefect"][1], "not what `up` keeps"


def test_which_job_would_end_is_told():
    job = records.Job(
        engine="slurm", id="7", name="digits", folder="mlruns/jobs/7", num_processes=2, submitted_at="2026-11-25"
    )
    found = does(explanation.cancel(records.JobState(job=job, state="RUNNING")))
    assert found == {"cancel": ("would run", "job 7 of slurm, digits: it is RUNNING; its checkpoints stay")}


COMMANDS = {
    "run": ([], 5), "train": ([], 1), "prepare": ([], 2), "download": ([], 1), "evaluate": ([], 2), "register": ([], 3),
    "report": ([], 1), "export": (["latest", "--format", "keras"], 2), "predict": (["a.png", "--model", "latest"], 3),
    "compare": (["--strategies", "one_device,mirrored"], 6), "sweep": (["digits"], 4),
    "data add": (["flowers.csv", "--target", "kind"], 2), "sync": (["--to", "sqlite:///team.db"], 1),
    "serve-model": (["latest", "--port", "0"], 3), "up": ([], 3), "reconcile": ([], 3), "ui": ([], 2),
}  # fmt: skip


ALIKE = ("download", "evaluate", "register", "report", "export", "sync", "reconcile")


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.exhaustive if one in ALIKE else ()) for one in COMMANDS]
)
@pytest.mark.slow
def test_nothing_is_done(project, trained, run, command):
    Path("flowers.csv").write_text("length,kind\n" + "1.5,a\n2.5,b\n" * 20)
    Path("a.png").touch()
    if command == "sync":  # What MLflow is to be told of.
        Path(trained.folder, "unsent.jsonl").write_text('{"create": {}}\n')
        elsewhere = trained.model_copy(update={"store": "http://127.0.0.1:9"})
        records.save(elsewhere, Path(trained.folder, "records", "run.json"))
    before = files_of(project)
    words, num_stages = COMMANDS[command]
    as_json = [] if command in ("up", "ui") else ["--json"]
    done = run([*STRATAGEM, *command.split(), *words, "--explain", *as_json])
    assert done.returncode == 0, done.stderr
    assert files_of(project) == before
    if as_json:
        assert len(json.loads(done.stdout)["stages"]) == num_stages
    else:
        assert len([line for line in done.stdout.splitlines() if "would run" in line]) == num_stages

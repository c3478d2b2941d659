"""Whole sweeps on digits: one that is left alone, one that is killed, and what is refused."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from contextlib import closing

import mlflow
import pytest

from tasks import records
from tasks.records import Limits, Sweep

SPACE = """
set: {train.epochs: 4, train.deterministic: true, tracking.system_metrics: false, model.name: mlp,
      input.augmentation.crop_padding: 0, register.minimum: null}
space:
  schedule.learning_rate: {low: 1.0e-3, high: 1.0e-1, log: true}
  model.options.units: [[8], [16], [32]]
  optimizer.kind: [adam, rmsprop]
pruner: {min_trials: 2, factor: 2}
"""
COMMAND = ["stratagem", "sweep", "small.yaml", "--trials", "5", "--json"]


def store(project) -> mlflow.MlflowClient:
    uri = f"sqlite:///{project}/mlruns/mlflow.db"
    return mlflow.MlflowClient(uri, registry_uri=uri)


def essence(result: Sweep) -> list[dict]:
    return [one.model_dump(exclude={"run_id", "seconds"}) for one in result.trials]


@pytest.fixture(scope="module")
def swept(prepared_template, tmp_path_factory, one_prefect_server):
    """A sweep that nobody disturbed: its project and its record."""
    project = tmp_path_factory.mktemp("swept") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    (project / "small.yaml").write_text(SPACE)
    done = subprocess.run(
        COMMAND,
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if len(line.rstrip()) > 80] == []
    assert done.stdout.count("\n") == 1
    return project, Sweep.model_validate_json(done.stdout)


@pytest.mark.slow
def test_the_best_is_trained_on_all_and_put_through_the_gate(swept):
    project, result = swept
    states = [one.state for one in result.trials]
    assert set(states) == {"complete", "pruned"}
    whole = [one for one in result.trials if one.state == "complete"]
    assert result.best == max(whole, key=lambda one: (one.value, -one.number)).number
    best = result.trials[result.best]
    assert best.value == best.values[-1]
    final = result.final
    assert (final.epochs, final.steps) == (4, 180), "1,437 examples are 45 batches of 32: none is held out"
    assert (final.model_version, final.aliases) == ("digits-mlp/1", ("challenger", "champion"))
    settings = json.loads((project / "mlruns/runs" / final.run_id / "records/run.json").read_text())["settings"]
    assert settings["input"]["validation"] is None
    assert settings["schedule"]["learning_rate"] == best.params["schedule.learning_rate"]
    assert records.load(Sweep, project / result.folder / "sweep.json") == result


@pytest.mark.slow
def test_a_trial_that_was_pruned_did_no_more_steps_and_says_why(swept):
    project, result = swept
    pruned = [one for one in result.trials if one.state == "pruned"]
    for one in pruned:
        folder = project / "mlruns/runs" / one.run_id
        limits = records.load(Limits, folder / "records/limits.json")
        epochs = limits.missed(one.values)
        assert len(one.values) == epochs < 4
        steps = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
        assert steps == 41 * epochs, "1,293 examples are 41 batches of 32"
        assert one.reason.startswith(f"pruned after epoch {epochs}: validation/accuracy ")
        run = store(project).get_run(one.run_id)
        assert (run.info.status, run.data.tags["trial_state"]) == ("KILLED", "pruned")
        assert run.data.tags["reason"] == one.reason


@pytest.mark.slow
def test_mlflow_has_a_parent_and_a_child_for_each_trial_and_the_last_training(swept):
    project, result = swept
    client = store(project)
    parent = client.get_run(result.run_id)
    assert parent.info.status == "FINISHED"
    assert not {"schedule.learning_rate", "model.options.units", "optimizer.kind"} & parent.data.params.keys()
    assert parent.data.tags["best_trial"] == str(result.best)
    assert parent.data.tags["final_run"] == result.final.run_id
    assert {file.path for file in client.list_artifacts(result.run_id, "sweep")} == {
        "sweep/sweep.csv", "sweep/sweep.html", "sweep/sweep.json",
    }  # fmt: skip
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result.run_id}'")
    assert {child.info.run_id for child in children} == {
        result.final.run_id, *(one.run_id for one in result.trials if one.run_id is not None),
    }  # fmt: skip
    for one in result.trials:
        child = client.get_run(one.run_id)
        assert child.data.params["comparison"] == f"trial {one.number}"
        assert child.data.metrics["sweep/value"] == one.value
        assert child.data.params["optimizer.kind"] == one.params["optimizer.kind"]


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_with_the_trials_of_one_that_was_not(swept, prepared_project, run, start):
    (prepared_project / "small.yaml").write_text(SPACE)
    command = start(*COMMAND)
    command.wait_until("trial   1")
    before = set(_metrics(prepared_project))
    while not any("train/loss" in path.read_text() for path in set(_metrics(prepared_project)) - before):
        assert command.process.poll() is None, command.err.read_text()
        time.sleep(0.02)
    command.process.kill()
    command.process.wait()
    command.survivors()
    again = run([*COMMAND])
    assert again.returncode == 0, again.stderr
    assert "continuing sweep" in again.stderr
    result = Sweep.model_validate_json(again.stdout)
    assert essence(result) == essence(swept[1])
    assert result.final.weights_digest == swept[1].final.weights_digest
    with closing(sqlite3.connect(prepared_project / "mlruns/mlflow.db")) as database:
        states = database.execute("SELECT status, count(*) FROM runs GROUP BY status").fetchall()
    pruned = sum(one.state == "pruned" for one in result.trials)
    assert dict(states) == {"FINISHED": 7 - pruned, "KILLED": pruned}, "a sweep, five trials and the last training"


def _metrics(project):
    return (project / "mlruns/runs").glob("*/metrics.jsonl")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_trials_side_by_side_are_stopped_and_go_on(prepared_project, run, start):
    (prepared_project / "small.yaml").write_text(SPACE)
    options = ["--trials", "3", "--parallel", "2"]
    command = start("stratagem", "sweep", "small.yaml", *options)
    command.wait_until("trial   ")
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(200) == 143
    assert command.survivors() == []
    assert "Traceback" not in command.err.read_text()
    statuses = [found.info.status for found in store(prepared_project).search_runs(["1"])]
    assert "RUNNING" not in statuses
    refused = run(["stratagem", "sweep", "small.yaml", "--trials", "3"])
    assert refused.returncode == 2
    assert "parallel was 2 and is now 1" in refused.stderr
    done = run(["stratagem", "sweep", "small.yaml", *options, "--json"])
    assert done.returncode == 0, done.stderr
    assert [one.state == "running" for one in Sweep.model_validate_json(done.stdout).trials] == [False] * 3


@pytest.mark.slow
def test_bad_input_leaves_nothing(project, run):
    (project / "wrong.yaml").write_text("space: {schedule.learning_rate: {low: 1, high: 0.1}}\n")
    result = run(["stratagem", "sweep", "wrong.yaml"])
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: wrong.yaml: space.schedule.learning_rate = {'high': 0.1, 'low': 1}: `low <= high`")
    many = run(["stratagem", "sweep", "digits", "--trials", "0"])
    assert (many.returncode, many.stderr) == (2, "error: --trials = 0: use a number from 1 to 100,000\n")
    # What the code means is known from the project that this one is a copy of.
    assert {path.name for path in (project / "mlruns").iterdir()} == {".gitkeep", "code.json"}

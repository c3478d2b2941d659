"""`stratagem runs` and `stratagem trace` as they are typed, of a run that `stratagem run` made."""

import json
import re
import shutil

import mlflow
import pytest

from tasks.system import units

HEAVY = ("tensorflow", "keras", "jax", "mlflow", "prefect")


def said(done):
    """Return what a command printed, which fits a terminal."""
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    return done.stdout


def refused(done):
    """Return the one message of a command that refused what was typed."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (message,) = done.stderr.splitlines()
    return message


@pytest.mark.slow
def test_a_run_is_listed_shown_and_traced_without_a_framework(in_finished, run, record_imports):
    summary, imports = in_finished.summary, record_imports(in_finished.project)
    run_id, version = summary["run_id"], summary["model_version"]

    def do(*words):
        return run(["stratagem", *words], env=imports.environment | {"COLUMNS": "80"})

    accuracy = f"{summary['metrics']['test/accuracy']:.4f}"
    row = rf"^{run_id[:8]} .* digits +convnet2 v1 one_device fit finished +{accuracy} +\S+$"
    assert re.search(row, said(do("runs")), re.MULTILINE)
    assert said(do("runs", "--strategy", "mirrored", "--since", "1d")).startswith("No run matches these options.")
    (line,) = json.loads(do("runs", "--sort", "loss", "--status", "FINISHED", "--json").stdout)["runs"]
    for name in ("run_id", "dataset", "strategy", "loop", "metrics", "examples_per_second", "model_version"):
        assert line[name] == summary[name]
    shown = said(do("runs", "show", run_id[:6]))
    for words in (f"{version} @challenger", summary["data_version"], "train.epochs  2        15", "models/best.keras"):
        assert words in shown
    details = json.loads(do("runs", "show", "latest", "--json").stdout)
    assert details["training"]["weights_digest"] == summary["weights_digest"]
    assert summary["checkpoint"] in {f"mlruns/runs/{run_id}/{path}" for path in details["files"]}
    assert said(do("runs", "diff", "latest", run_id)) == f"{run_id[:8]} and {run_id[:8]} do not differ\n"
    assert [module for module in HEAVY if imports.of(module)] == []
    assert do("report", run_id[:6]).stdout.endswith(f"mlruns/runs/{run_id}/report/report.html\n")
    log = do("runs", "logs", run_id[:6]).stdout.splitlines()
    assert ["train/loss " in line for line in log] == [True, True, False], "two epochs"
    assert log[-1] == "finished"
    listed = said(do("models"))
    for words in (f"{version} @challenger @champion", f"run {run_id}, test/accuracy", "the first model that passes"):
        assert words in listed
    tree = said(do("trace", f"{version.split('/')[0]}@challenger"))
    for words in (run_id, summary["checkpoint"], summary["data_version"], summary["git_commit"]):
        assert words in tree
    chain = do("trace", "data/digits/prepared", "--json").stdout
    assert chain.count("\n") == 1
    assert json.loads(chain)["registry"] is None
    (of_run,) = json.loads(chain)["link"]["down"]
    assert (of_run["name"], of_run["down"][0]["name"]) == (run_id, version)
    assert "unknown reference 'nosuch': name a version of a model" in refused(do("trace", "nosuch"))
    assert f"unknown run 'nosuch': the newest runs: {run_id}" in refused(do("runs", "show", "nosuch"))
    assert [module for module in HEAVY if module != "mlflow" and imports.of(module)] == [], "trace asks MLflow"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_a_version_needs_is_pruned_when_that_is_gone(in_finished, run, tmp_path):
    summary, copy = in_finished.summary, tmp_path / "copy"
    shutil.copytree(in_finished.project, copy, symlinks=True)
    folder = copy / "mlruns" / "runs" / summary["run_id"]
    name, number = summary["model_version"].split("/")

    def do(*words):
        return run(["stratagem", *words], cwd=copy, env={"PYTHONPATH": str(copy), "COLUMNS": "80"})

    assert "choose the runs to prune" in refused(do("runs", "prune", "--dry-run"))
    kept = said(do("runs", "prune", "--keep-last", "0"))
    assert f"kept: {summary['run_id'][:8]}, it is the source of {name}/{number} @challenger @champion" in kept
    assert "There is nothing to remove." in kept
    uri = f"sqlite:///{copy}/mlruns/mlflow.db"
    mlflow.MlflowClient(uri, registry_uri=uri).delete_model_version(name, number)
    planned = json.loads(do("runs", "prune", "--keep-last", "0", "--dry-run", "--json").stdout)
    assert [one["run_id"] for one in planned["pruned"]] == [summary["run_id"]]
    assert (copy / summary["checkpoint"]).is_dir()
    done = said(do("runs", "prune", "--not-registered"))
    assert f"removed the checkpoints and models of 1 run: {units.size(planned['bytes'])}" in done
    assert not (folder / "checkpoints").exists()
    assert json.loads((folder / "summary.json").read_text()) == summary
    words = f"run {summary['run_id']} was pruned on 20"
    for needs in (["evaluate"], ["run", "--set", "train.epochs=2", "--resume", "latest"]):
        assert words in refused(do(*needs)), needs
    assert re.search(rf"^{summary['run_id'][:8]} .* one_device fit pruned ", said(do("runs")), re.MULTILINE)

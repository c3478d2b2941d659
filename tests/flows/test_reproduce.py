"""`stratagem reproduce` as it is typed: a run that was really trained, changed code and data, and a kill -9."""

import json
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.flows.test_runs import refused, said


@pytest.fixture
def temporary():
    """A temporary folder for the commands of one test: in the machine's, those of other tests come and go."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # A socket's path, which lies in it, has 107 characters.
        yield Path(folder)


@pytest.mark.slow
def test_the_same_weights_come_out_after_code_and_data_have_changed(in_finished, run, start, tmp_path, temporary):
    summary, copy = in_finished.summary, tmp_path / "copy"
    shutil.copytree(in_finished.project, copy, symlinks=True)
    environment = {"PYTHONPATH": str(copy), "COLUMNS": "80", "TMPDIR": str(temporary)}
    old = copy / "mlruns" / "runs" / summary["run_id"]

    def do(*words):
        return run(["stratagem", *words], cwd=copy, env=environment)

    def git(*words):
        return subprocess.run(["git", *words], cwd=copy, check=True, capture_output=True, text=True).stdout

    with (copy / "tasks" / "train.py").open("a") as code:
        code.write('\n\nraise SystemExit("the code of today must not run")\n')
    params = copy / "data" / "digits" / "params.yaml"
    params.write_text(params.read_text().replace("image_size: null", "image_size: [6, 6]"))
    assert do("prepare").returncode == 0
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    state = git("status", "--porcelain"), git("branch", "--all"), git("worktree", "list")
    index = (copy / ".git" / "index").read_bytes()

    killed = start("stratagem", "reproduce", "latest", cwd=copy, **environment)
    killed.wait_until("epoch")
    assert len(list(temporary.glob("stratagem-*/*/checkout"))) == 1
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert killed.survivors() == []
    planned = said(do("reproduce", summary["run_id"][:8], "--dry-run"))
    assert list(temporary.iterdir()) == [], "the next command has removed what the killed one left"
    assert re.search(rf"^data version +{summary['data_version'][:12]} +\w{{12}} +brought back", planned, re.MULTILINE)

    done = do("reproduce", summary["run_id"], "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["run_id"], found["same"]) == (summary["run_id"], True), found
    assert found["weights_digests"] == [summary["weights_digest"]] * 2
    assert found["reproduced_by"] != summary["run_id"]
    assert {name: one["second"] for name, one in found["metrics"].items()} == summary["metrics"]
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert (git("status", "--porcelain"), git("branch", "--all"), git("worktree", "list")) == state
    assert (copy / ".git" / "index").read_bytes() == index

    shown = said(do("runs", "show", found["reproduced_by"]))
    assert f"{summary['run_id']}: the same weights, bit by bit" in " ".join(shown.split())
    assert summary["git_commit"] in shown
    differs = said(do("runs", "diff", summary["run_id"], found["reproduced_by"]))
    assert "test metrics, with intervals of 95 %; the same test rows" in " ".join(differs.split())
    assert re.search(r"^accuracy +0\.\d{4} +0\.\d{4} +\+0\.0000", differs, re.MULTILINE)

    # An evaluation whose outputs are gone has no interval, and other weights are another result then.
    (old / "evaluation").rename(old / "evaluation_of_before")
    training = json.loads((old / "records" / "training.json").read_text())
    (old / "records" / "training.json").write_text(json.dumps(training | {"weights_digest": "0" * 64}))
    other = do("reproduce", summary["run_id"])
    assert other.returncode == 1, other.stderr
    assert "not reproduced: other weights, and no test metric with an interval" in " ".join(other.stdout.split())
    shutil.rmtree(copy / ".dvc" / "cache")
    assert "its data cannot be brought back" in refused(do("reproduce", summary["run_id"]))
    assert "unknown run 'nosuch': the newest runs: " in refused(do("reproduce", "nosuch"))


def recorded(done):
    """Return the record that a command with --json printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SMALL = {"model.name": "mlp", "train.epochs": 1, "tracking.system_metrics": "false"}
MANY = [
    {"strategy.kind": "data_parallel", "strategy.devices": 2},
    {"strategy.kind": "multi_worker", "strategy.workers": 2},
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", MANY, ids=lambda strategy: strategy["strategy.kind"])
def test_a_run_on_jax_and_one_of_several_workers_come_out_again(prepared_project, run, strategy):
    chosen = [word for key, value in (SMALL | strategy).items() for word in ("--set", f"{key}={value}")]
    first = recorded(run(["stratagem", "train", "--json", *chosen]))
    recorded(run(["stratagem", "evaluate", "--run", first["run_id"], "--json"]))
    found = recorded(run(["stratagem", "reproduce", first["run_id"], "--json"]))
    folder = prepared_project / "mlruns/runs" / found["reproduced_by"]
    again = json.loads((folder / "records/training.json").read_text())
    assert (again["strategy"], again["num_replicas"]) == (strategy["strategy.kind"], 2)
    # Several workers may add up in another order each time: then each metric lies within its interval.
    assert found["same"] is True
    assert found["metrics"].keys() >= {"test/accuracy", "test/loss"}
    changed = {one["what"]: one["effect"] for one in found["changes"]}
    assert changed.items() >= {"strategy.kind": "brought back", "train.epochs": "brought back"}.items()
    assert {"matters", "cannot be brought back"}.isdisjoint(changed.values())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_was_resumed_with_more_epochs_is_refused(prepared_project, run):
    chosen = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    first = recorded(run(["stratagem", "train", "--json", *chosen]))["run_id"]
    longer = [*chosen, "--set", "train.epochs=2"]
    assert recorded(run(["stratagem", "train", "--json", "--resume", first, *longer]))["run_id"] == first
    words = "was resumed as another training: train.epochs was 1 up to step 41, then 2. Trained from its beginning"
    assert words in refused(run(["stratagem", "reproduce", first, "--allow-changes"]))
    assert "resumed with" in said(run(["stratagem", "runs", "show", first]))

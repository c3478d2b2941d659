"""`stratagem runs reproduce` as it is typed: a run that was really trained, changed code and data, and a kill -9."""

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


@pytest.mark.exhaustive
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

    killed = start("stratagem", "runs", "reproduce", "latest", cwd=copy, **environment)
    killed.wait_until("epoch")
    assert len(list(temporary.glob("stratagem-*/*/checkout"))) == 1
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert killed.survivors() == []
    planned = said(do("reproduce", summary["run_id"][:8], "--dry-run"))
    assert list(temporary.iterdir()) == [], "the next command has removed what the killed one left"
    assert re.search(rf"^data version +{summary['data_version'][:12]} +\w{{12}} +restored", planned, re.MULTILINE)

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
    assert f"{summary['run_id']}: the same weights, bit for bit" in " ".join(shown.split())
    assert summary["git_commit"] in shown
    differs = said(do("runs", "diff", summary["run_id"], found["reproduced_by"]))
    assert "test metrics, with 95% intervals; the same test rows" in " ".join(differs.split())
    assert re.search(r"^accuracy +0\.\d{4} +0\.\d{4} +\+0\.0000", differs, re.MULTILINE)

    # An evaluation whose outputs are gone has no interval, and other weights are another result then.
    (old / "evaluation").rename(old / "evaluation_of_before")
    training = json.loads((old / "records" / "training.json").read_text())
    (old / "records" / "training.json").write_text(json.dumps(training | {"weights_digest": "0" * 64}))
    other = do("reproduce", summary["run_id"])
    assert other.returncode == 1, other.stderr
    assert "not reproduced: different weights, and no test metric with an interval" in " ".join(other.stdout.split())
    shutil.rmtree(copy / ".dvc" / "cache")
    assert "its data cannot be restored" in refused(do("reproduce", summary["run_id"]))
    assert "unknown run 'nosuch': the newest runs: " in refused(do("reproduce", "nosuch"))

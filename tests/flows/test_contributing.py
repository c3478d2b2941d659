"""What CONTRIBUTING says that an addition takes is all that it takes: each of its diffs, in a copy of the project."""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tasks.modeling import losses

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DIFFS = {
    heading.partition("\n")[0]: diff
    for heading in CONTRIBUTING.split("\n### ")[1:]
    for diff in re.findall(r"^```diff\n(.*?)^```$", heading, re.MULTILINE | re.DOTALL)
}
# Each names what its diff adds.
USES = {
    "run digits-wide": [
        "optimizer={kind: adagrad}",
        "schedule={kind: linear, learning_rate: 0.1}",
        "strategy.kind=one_replica",
        "train.loss=mean_absolute_error",
        "checkpoint.monitor=validation/log_loss",
    ],
    "run": [
        "dataset.name=black_or_white",
        "model={name: linear, options: {}}",
        "strategy={kind: multi_worker, launcher: one_core}",
    ],
}


@pytest.mark.parametrize("heading", DIFFS)
def test_an_addition_is_a_diff_of_at_most_eighteen_lines(heading):
    diff = DIFFS[heading]
    assert 0 < len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)) <= 18
    applies = ["git", "apply", "--check", "-"]
    applied = subprocess.run(applies, input=diff, capture_output=True, text=True, cwd=ROOT, check=False)
    assert applied.returncode == 0, applied.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_project_trains_with_all_additions(prepared_project, run):
    for heading, diff in DIFFS.items():
        applied = subprocess.run(["git", "apply", "-"], input=diff, capture_output=True, text=True, check=False)
        assert applied.returncode == 0, f"{heading}: {applied.stderr}"
    for lint in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["lint-imports"]):
        linted = run(lint)
        assert linted.returncode == 0, linted.stdout
    # What is added is another choice, and never what everybody else gets.
    told = "import json; from tasks.modeling import losses; print(json.dumps(losses.USUAL))"
    assert json.loads(run(["python", "-c", told]).stdout) == losses.USUAL
    digits = load_digits()
    np.savetxt("pixels.csv", np.column_stack([digits.target, digits.data * 15]), "%d", ",")
    added = run(["stratagem", "data", "add", "pixels.csv", "--set", "dataset.kind=pixel_rows", "--json"])
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["splits"]["train"]["num_examples"] == 1438
    quality = json.loads(Path("data/pixels/report/quality.json").read_text())
    assert quality["checks"]["rare_classes"]["text"] == "0 classes have fewer than 30 examples"
    summaries = []
    for command, overrides in USES.items():
        given = [word for override in [*overrides, "train.epochs=1"] for word in ("--set", override)]
        done = run(["stratagem", *command.split(), "--json", *given])
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads(done.stdout))
    first, second = summaries
    assert first["strategy"] == "one_replica"
    assert {"test/log_loss", "test/balanced_accuracy"} <= first["metrics"].keys()
    assert (second["dataset"], second["num_replicas"]) == ("black_or_white", 2)
    exported = run(["stratagem", "models", "export", first["run_id"], "--format", "unzipped", "--json"])
    assert exported.returncode == 0, exported.stderr
    assert "model/config.json" in json.loads(exported.stdout)["files"]

"""The pages of docs/tutorials, as they stand there: own photos, tables, texts and builders become models by two
commands; killed in the middle they end with the same bits; and what MLflow loads takes raw inputs. `make test-slow` has
each page under one strategy, and `make test-exhaustive` under the three others."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000), pytest.mark.usefixtures("one_prefect_server")]

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
STRATEGIES = {
    "one_device": [],
    "mirrored": ["strategy.devices=2"],
    "multi_worker": ["strategy.workers=2"],
    "data_parallel": ["strategy.devices=2"],
}
# What the run reaches, what the last command of the page tells, each at least; and the strategy of `make test-slow`, or
# None for once a week.
PAGES = {
    "photos": (("test/accuracy", 0.8), 0.8, None),
    "wine": (("test/accuracy", 0.9), 0.9, "mirrored"),
    "diabetes": (("test/r2", 0.3), 0.25, "data_parallel"),
    "reviews": (("test/accuracy", 0.95), 0.95, "multi_worker"),
    "shades-large": (("test/accuracy", 0.8), 0.8, None),
}
EACH = [
    pytest.param(name, strategy, marks=() if strategy == PAGES[name][-1] else pytest.mark.exhaustive)
    for name in PAGES
    for strategy in STRATEGIES
]


def test_each_page_is_tried():
    assert {page.stem for page in TUTORIALS.iterdir()} == {*PAGES, "laptop-to-cluster"}


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(("name", "strategy"), EACH)
def test_a_tutorial_leads_to_a_model_that_takes_raw_inputs(name, strategy, project, run, monkeypatch):
    (metric, reached), told, _ = PAGES[name]
    dataset = name.replace("-", ".")  # shades-large.md is of shades/large.
    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    for file, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (project / file).write_text(code)
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    *make, add, train, use = (shlex.split(line) for block in blocks for line in block.splitlines())
    for command in make:
        made = run(command)
        assert made.returncode == 0, made.stderr
    added = run(add)
    assert added.returncode == 0, added.stderr
    assert f"stratagem run --set dataset.name={dataset}" in added.stdout

    settings = [
        f"strategy.kind={strategy}",
        *STRATEGIES[strategy],
        "train.deterministic=true",
        "checkpoint.every_steps=5",
    ]
    train += ["--json", *(word for setting in settings for word in ("--set", setting))]
    whole = run(train)
    assert whole.returncode == 0, whole.stderr
    assert f"chosen for {dataset}: " in whole.stderr
    summary = json.loads(whole.stdout)
    assert summary["metrics"][metric] > reached
    (model,) = re.findall(r"models:/([\w.-]+)@challenger", page)
    assert summary["model_version"] == f"{model}/1"

    cut = killed_in_the_middle([*train, "--fresh"], project)
    rest = run(train)
    assert rest.returncode == 0, rest.stderr
    assert f"resuming run {cut}" in rest.stderr
    resumed = json.loads(rest.stdout)
    assert resumed["run_id"] == cut
    assert resumed["weights_digest"] == summary["weights_digest"]
    assert resumed["metrics"] == summary["metrics"]

    # In a process that imports nothing of the project.
    monkeypatch.delenv("PYTHONPATH")
    used = run([use[0], "-P", *use[1:]])
    assert used.returncode == 0, used.stderr
    assert float(used.stdout.split()[0]) > told, used.stdout


def killed_in_the_middle(command, project):
    """Kill a run and all that it started once it has a checkpoint; return its id."""
    before = {path.name for path in (project / "mlruns" / "runs").iterdir()}
    with (project / "killed.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None:
                new = [path for path in (project / "mlruns" / "runs").iterdir() if path.name not in before]
                if new and len([one for one in new[0].glob("checkpoints/*") if one.name.isdigit()]) >= 2:
                    break
                time.sleep(0.05)
            assert process.poll() is None, (project / "killed.log").read_text()
            os.killpg(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    return new[0].name

"""docs/tutorials/laptop-to-cluster.md, as it stands there: the same settings at home, and for two kinds of clusters.

test_ray.py runs what the page has for Ray.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tasks import records, runs

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "laptop-to-cluster.md"


@pytest.mark.exhaustive
def test_the_same_settings_go_from_one_process_to_a_cluster(prepared_project, run):
    page = PAGE.read_text(encoding="utf-8")
    one, two, _, slurm, kubernetes = (  # test_ray.py has the one between.
        shlex.split(block) for block in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    )
    summaries = []
    for command in (one, two):
        done = run([*command, "--json"])
        assert done.returncode == 0, done.stderr
        summaries.append(json.loads(done.stdout))
    alone, together = summaries
    assert (alone["num_replicas"], together["num_replicas"]) == (1, 2)
    assert alone["steps"] == together["steps"], "the batch is the same"
    assert abs(alone["metrics"]["test/accuracy"] - together["metrics"]["test/accuracy"]) < 0.1

    script = run(slurm)
    assert script.returncode == 0, script.stderr
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks=2", "#SBATCH --time=01:00:00"} < set(script.stdout.splitlines())
    printed = run(kubernetes)
    assert printed.returncode == 0, printed.stderr
    made = {one["kind"]: one for one in yaml.safe_load_all(printed.stdout)}
    assert list(made) == ["ConfigMap", "Service", "Job"]
    assert made["Job"]["spec"]["completions"] == 2
    assert list(Path("mlruns").glob("jobs/*")) == [], "nothing was handed over"

    # What the cluster is told is what was trained here, but for who starts the processes.
    trained = records.load(
        records.Run, Path(runs.find_run(together["run_id"]).folder) / "records" / "run.json"
    ).settings
    told = yaml.safe_load(made["ConfigMap"]["data"]["settings.yaml"])
    assert told["strategy"].pop("launcher") == "kubernetes"
    expected = {key: dict(value) if isinstance(value, dict) else value for key, value in trained.items()}
    assert expected["strategy"].pop("launcher") is None
    assert told == expected

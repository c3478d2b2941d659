"""Own parts in whole runs: under every strategy, from Python, and in a project that `stratagem init` made."""

import json
import sys
from pathlib import Path

import pytest

from tasks import config
from tests.tasks.training.test_own_parts import AUGMENTATION, CUSTOM, OPTIMIZER, PARTS, SCHEDULE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("one_prefect_server")]

OWN = (*OPTIMIZER, *SCHEDULE, *CUSTOM, "train.callbacks=[{parts:Slower: {factor: null}}]", "train.epochs=2",
       "model.name=mlp", "model.options={units: [16]}", "input.augmentation.crop_padding=0", "register.enabled=false",
       "train.per_replica_batch_size=null", "train.global_batch_size=32", "train.steps_per_epoch=20")  # fmt: skip
STRATEGIES = [
    ["strategy.kind=mirrored", "strategy.devices=2", "train.loop=custom"],
    ["strategy.kind=multi_worker", "strategy.workers=2", "train.loop=fit"],
    ["strategy.kind=parameter_server", "strategy.workers=2", "strategy.ps=1", "train.loop=custom"],
    ["strategy.kind=data_parallel", "strategy.devices=2"],
]


# As a notebook does, in whatever folder it is.
SCRIPT = """
import json, sys, stratagem
print(stratagem.run(settings=json.loads(sys.argv[1]), project=sys.argv[2]).model_dump_json())
"""


def trained(run, *overrides):
    """Run to the end; return the numbers of each epoch."""
    sets = [part for one in (*OWN, *overrides) for part in ("--set", one)]
    return epochs_of(run(["stratagem", "run", "--json", *sets]))


def epochs_of(done):
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    lines = Path("mlruns/runs", summary["run_id"], "metrics.jsonl").read_text().splitlines()
    epochs = [{name: value for name, value, *_ in json.loads(line)} for line in lines if "train/loss" in line]
    assert len(epochs) == 2
    assert epochs[1]["train/seen"] > epochs[0]["train/seen"] > 0
    return epochs


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy[0].partition("=")[2])
def test_own_parts_train_alike_under_every_strategy(prepared_project, run, strategy):
    (prepared_project / "parts.py").write_text(PARTS.replace("import keras\n", AUGMENTATION, 1))
    alone, there = ([one["train/loss"] for one in trained(run, *overrides)] for overrides in ((), strategy))
    # Steps without an order, and JAX's own first weights, end elsewhere.
    other = strategy[0] in ("strategy.kind=parameter_server", "strategy.kind=data_parallel")
    assert there == pytest.approx(alone, rel=0.5 if other else 1e-3)


def test_own_parts_from_a_notebook(prepared_project, run, tmp_path):
    (prepared_project / "parts.py").write_text(PARTS.replace("import keras\n", AUGMENTATION, 1))
    settings = json.dumps(config.read_overrides(list(OWN)))
    epochs_of(run([sys.executable, "-c", SCRIPT, settings, prepared_project], cwd=tmp_path))


@pytest.mark.exhaustive
def test_own_parts_in_a_project_that_was_made_from_the_package(project, run, tmp_path, monkeypatch):
    made = tmp_path / "made"
    assert run(["stratagem", "init", made]).returncode == 0
    (made / "parts.py").write_text(PARTS.replace("import keras\n", AUGMENTATION, 1))
    monkeypatch.chdir(made)
    trained(run)

"""A checkpoint of one strategy is evaluated, and goes on, under every other one, on either backend."""

import contextlib
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tasks import config, records
from tasks.strategies.environment import stage_environment
from tasks.training.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

# The last batch is short, and odd: 1437 - 1280 = 157 examples are 4 * 32 + 29.
SHARED = {
    "dataset.name": "digits",
    "input.validation": 1280,
    "input.augmentation": {"flip": False, "crop_padding": 0},
    "model": {"name": "mlp", "options": {"units": [24, 16]}},
    # What every backend keeps as it is: Keras rounds Adam's 0.9 on TensorFlow alone.
    "optimizer": {"kind": "sgd", "momentum": 0.5},
    "schedule": {"kind": "constant", "learning_rate": 0.0625},
    "train.global_batch_size": 32,
    "checkpoint.every_steps": 3,
    "checkpoint.keep": 9,
}
LAYOUTS = {
    "one_device": {"strategy.kind": "one_device", "strategy.device": "cpu", "train.loop": "custom"},
    "mirrored": {"strategy.kind": "mirrored", "strategy.devices": 2},
    "multi_worker": {"strategy.kind": "multi_worker", "strategy.workers": 2, "train.loop": "custom"},
    "data_parallel": {"strategy.kind": "data_parallel", "strategy.devices": 4},
    "model_parallel": {
        "strategy.kind": "model_parallel",
        "strategy.devices": 4,
        "strategy.mesh_shape": [2, 2],
        "strategy.layout": {"dense1/kernel": [None, "model"], "dense2/kernel": ["model", None]},
    },
    # The kernels lie on two processes.
    "model_parallel in pieces": {
        "strategy.kind": "model_parallel",
        "strategy.workers": 2,
        "strategy.mesh_shape": [1, 2],
        "strategy.layout": {"dense1/kernel": [None, "model"], "dense2/kernel": ["model", None]},
    },
}
FIRST, INSIDE = 5, 3  # The steps of an epoch, and one in its middle.
# From one device to a cluster, from there to pieces on the other backend, and back: once a week all pairs.
OFTEN = (
    ("one_device", "multi_worker"),
    ("multi_worker", "model_parallel in pieces"),
    ("model_parallel in pieces", "one_device"),
)
PAIRS = [
    pytest.param(source, layout, marks=() if (source, layout) in OFTEN else pytest.mark.exhaustive)
    for source in LAYOUTS
    for layout in LAYOUTS
]


def main(layout, sources):
    """Train an epoch; then, when all have done so, evaluate the checkpoint of each source, and train on from it to the
    end of the second epoch. A process of its own for each layout does both: to import TensorFlow takes longer."""
    from tasks import evaluate, strategies, train

    prepared = records.load(records.PreparedDataset, Path("data/digits/prepared/manifest.json"))
    origin = records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None)
    helps = bool(json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index"))

    def run(run_id, epochs):
        settings = config.load(None, SHARED | LAYOUTS[layout] | {"train.epochs": epochs})
        if helps:
            train.assist(settings, prepared)
            save(None, run_id)
            return
        one = records.Run(
            run_id=run_id,
            experiment="e",
            name="n",
            folder=f"mlruns/runs/{run_id}",
            lineage=origin,
            settings=settings.to_json(),
        )
        result = train.train(settings, prepared, one, lambda step, metrics: None)
        save(result, run_id)

    def save(result, name):
        settings = config.load(None, SHARED | LAYOUTS[layout])
        if helps:
            evaluate.assist(settings, prepared)
            return
        records.save(result, Path(f"{name}.result.json"))
        records.save(evaluate.evaluate(settings, prepared, result), Path(f"{name}.evaluation.json"))

    # Before an evaluation uses a device.
    strategies.build(config.load(None, SHARED | LAYOUTS[layout]).strategy)
    run(layout, 1)
    if not helps:
        Path(f"{layout}.trained").touch()
    while not all(Path(f"{source}.trained").exists() for source in sources):
        assert not Path("failed").exists()
        time.sleep(0.1)
    for source in sources:
        if not helps:
            # What a run leaves that was stopped in the middle of its first epoch.
            checkpoint = f"checkpoints/{INSIDE}"
            shutil.copytree(f"mlruns/runs/{source}/{checkpoint}", f"mlruns/runs/{source} then {layout}/{checkpoint}")
        save(records.load(records.TrainingResult, Path(f"{source}.result.json")), f"{source} under {layout}")
        run(f"{source} then {layout}", 2)


@pytest.fixture(scope="module")
def found(request, shared_project, start):
    """The folder with results and evaluations after all strategies went through others' checkpoints: those that the
    tests of this run ask for."""
    asked = {
        (item.callspec.params["source"], item.callspec.params["layout"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }

    involved = [layout for layout in LAYOUTS if any(layout in pair for pair in asked)]

    def work(layout):
        options = LAYOUTS[layout]
        sources = [source for source in involved if source == layout or (source, layout) in asked]
        environment = stage_environment(config.load(None, SHARED | options))
        try:
            start("test_checkpoints_between", [layout, sources], options.get("strategy.workers", 1), environment)
        except BaseException:
            Path("failed").touch()
            raise

    with contextlib.chdir(shared_project), ThreadPoolExecutor(len(LAYOUTS)) as pool:
        list(pool.map(work, involved))
    return shared_project


def evaluation(found, name):
    return records.load(records.EvaluationResult, found / f"{name}.evaluation.json")


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_a_checkpoint_is_evaluated_alike_under_every_strategy(found, source, layout):
    expected, again = evaluation(found, source), evaluation(found, f"{source} under {layout}")
    assert (again.step, again.num_examples) == (FIRST, 360)
    assert again.metrics == pytest.approx(expected.metrics, abs=1e-6, rel=1e-6)
    assert again.confusion_matrix == expected.confusion_matrix, "the same predictions"


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_a_checkpoint_goes_on_under_every_strategy(found, source, layout):
    with contextlib.chdir(found):
        # Of the source, because Keras draws other initial weights on another backend.
        expected = records.load(records.TrainingResult, Path(f"{source} then {source}.result.json"))
        result = records.load(records.TrainingResult, Path(f"{source} then {layout}.result.json"))
        assert (result.strategy, result.steps, result.epochs) == (layout.split()[0], 2 * FIRST, 2)
        assert result.history.keys() == expected.history.keys()
        for name, values in expected.history.items():
            assert result.history[name] == pytest.approx(values, rel=1e-4), name
        (arrays, state), (expected_arrays, _) = (_last(Path(one.checkpoints)) for one in (result, expected))
        assert (state.step, state.epoch) == (2 * FIRST, 2)
        assert arrays.keys() == expected_arrays.keys()
        for key, array in expected_arrays.items():  # Those in pieces are read now.
            np.testing.assert_allclose(arrays[key], array, rtol=1e-4, atol=1e-5, err_msg=key)


def _last(folder):
    with Checkpoints(folder, read_only=True) as saved:
        return saved.restore(saved.find("latest"))

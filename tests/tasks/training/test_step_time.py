"""Where a step's time goes, by steps after a training: nothing else of them is kept."""

import json
from pathlib import Path

import pytest

from tasks.records import StepTime
from tasks.training import trace


def kept(result):
    """What a training leaves, without its own times and without the traced steps."""
    own = {"examples_per_second", "setup_seconds", "first_call_seconds", "epoch_seconds", "step_time", "traced_seconds"}
    return json.loads(result.model_dump_json(exclude={*own, "run_id"}).replace("mlruns/runs/" + result.run_id, "run"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("train.loop=fit",), marks=pytest.mark.exhaustive),
        ("train.loop=custom", "train.steps_per_execution=3"),
    ],
    ids=str,
)
def test_a_training_that_is_traced_afterwards_leaves_the_same(tiny, train, options):
    plain = train(tiny, *options, run_id="plain")
    traced = train(tiny, *options, "train.traced_steps=8", run_id="traced")
    assert kept(traced) == kept(plain)
    assert (plain.step_time, plain.traced_seconds) == (None, 0.0)
    assert traced.step_time.num_steps >= 8
    assert min(traced.step_time.parts.values()) >= 0
    assert traced.step_time.compute_ms > 0
    assert traced.step_time.collectives_ms == 0, "there is one device"
    assert traced.traced_seconds > 0
    checkpoints = [sorted(path.name for path in Path("mlruns/runs", one, "checkpoints").iterdir()) for one in RUNS]
    assert checkpoints[0] == checkpoints[1]
    assert not Path("mlruns/runs/traced/tensorboard").exists(), "the trace itself is not kept"


RUNS = ("plain", "traced")


def test_one_epoch_of_one_step_is_enough(tiny, train):
    found = train(tiny, "train.epochs=1", "train.steps_per_epoch=1", "train.traced_steps=5").step_time
    assert found.num_steps == 5


@pytest.mark.parametrize("options", [("train.loop=fit",), ("train.loop=custom", "train.steps_per_execution=3")])
def test_tensorboard_shows_the_trace(tiny, train, options):
    found = train(tiny, *options, "train.epochs=1", "train.tensorboard=true", "train.traced_steps=5").step_time
    (written,) = Path("mlruns/runs/first/tensorboard").glob("plugins/profile/*/*.xplane.pb")
    assert trace.split(written, found.num_steps) == found.parts
    assert found.compute_ms > 0


def test_the_parts_are_the_step():
    step = StepTime(num_steps=3, compute_ms=1.5, collectives_ms=0.25, input_wait_ms=0.5, host_ms=0.75)
    assert step.total_ms == 3.0
    assert step.parts == {"compute": 1.5, "collectives": 0.25, "input_wait": 0.5, "host": 0.75}

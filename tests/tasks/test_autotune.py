import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from tasks import autotune, callbacks, config
from tasks import train as train_module
from tasks.errors import Interrupted, UserError

# Each: seconds of a step of one a call, not compiled and compiled; examples/s by (many steps a call, compiled); what is
# chosen.
NO, YES, MANY, BOTH = (False, False), (False, True), (True, False), (True, True)
SPEEDS = [
    ((0.0025, 0.0051), {NO: 10.0, YES: 2.0, MANY: 17.0}, (100, False)),
    ((0.0025, 0.0049), {NO: 10.0, YES: 6.0, MANY: 17.0, BOTH: 4.0}, (100, False)),
    ((0.0005, 0.0005), {NO: 10.0, YES: 11.0, MANY: 17.0, BOTH: 30.0}, (200, True)),
    ((0.0025, 0.0040), {NO: 18.0, YES: 8.0, MANY: 17.0, BOTH: 4.0}, (1, False)),
    ((0.5, 0.4), {NO: 10.0, YES: 12.0}, (1, True)),
]


@pytest.fixture
def places(tmp_path):
    return tmp_path / "tuning.json", tmp_path / "cache"


@pytest.mark.parametrize(("seconds", "speeds", "chosen"), SPEEDS)
def test_the_fastest_is_chosen_and_kept(project, places, seconds, speeds, chosen):
    tried = []

    def trial(section, too_long):
        tried.append((section.steps_per_execution > 1, section.jit_compile))
        assert too_long == (2 * seconds[0] if tried[-1] == YES else math.inf)
        return seconds[section.jit_compile], speeds[tried[-1]]

    settings = config.load(None, {"train.autotune": True})
    found = autotune.choose(settings, "k" * 64, 1000, *places, trial)
    assert (found.steps_per_execution, found.jit_compile) == chosen
    assert tried == list(speeds)
    assert [one.examples_per_second for one in found.measured] == list(speeds.values())
    again = autotune.choose(settings, "k" * 64, 1000, places[0].with_name("other run"), places[1], pytest.fail)
    assert again == found, "of the cache"


def test_a_run_keeps_its_choice_and_another_key_is_measured(project, places):
    settings = config.load(None, {"train.autotune": True})

    def trial(section, too_long):
        return 0.001, section.steps_per_execution - section.jit_compile

    found = autotune.choose(settings, "k" * 64, 30, *places, trial)
    assert (found.steps_per_execution, found.jit_compile) == (30, False), "no call is longer than an epoch"
    other = autotune.choose(settings, "x" * 64, 30, *places, pytest.fail)
    assert other == found, "a run that is resumed elsewhere goes on as it began"
    with pytest.raises(ZeroDivisionError):
        autotune.choose(settings, "x" * 64, 30, places[0].with_name("new"), places[1], lambda *_: 1 / 0)


def test_a_run_does_not_keep_xla_under_a_strategy_that_has_none(project, places):
    def fastest(section, too_long):
        return 0.001, 1 + section.jit_compile

    found = autotune.choose(config.load(None, {"train.autotune": True}), "k" * 64, 30, *places, fastest)
    mirrored = config.load(None, {"train.autotune": True, "strategy.kind": "mirrored"})
    assert (found.jit_compile, autotune.choose(mirrored, "x" * 64, 30, *places, fastest).jit_compile) == (True, False)


def test_xla_is_not_tried_where_the_strategy_has_none(project, places):
    for overrides in ({"strategy.kind": "mirrored"}, {"strategy.kind": "data_parallel"}):
        settings = config.load(None, {"train.autotune": True, **overrides})
        found = autotune.choose(settings, overrides["strategy.kind"] * 9, 30, *places, lambda *_: (1e-3, 1))
        assert [one.jit_compile for one in found.measured] == [False, False]
        places[0].unlink()


def test_what_decides_is_in_the_key_and_nothing_else(project):
    def key(shape=(8, 8, 1), devices=("/device:CPU:0",), num_steps=1000, **overrides):
        settings = config.load(None, {name.replace("__", "."): value for name, value in overrides.items()})
        return autotune.key_of(settings, shape, devices, num_steps)

    same = [key(), key(train__epochs=3), key(train__seed=3), key(tracking__system_metrics=False), key(num_steps=999)]
    assert len(set(same)) == 1
    other = [
        key(shape=(28, 28, 1)),
        key(model__name="mlp", model__options={}),
        key(train__per_replica_batch_size=64),
        key(train__dtype_policy="mixed_bfloat16"),
        key(train__loop="custom"),
        key(strategy__kind="mirrored"),
        key(devices=("/device:GPU:0",)),
        key(num_steps=10),
        key(optimizer__kind="adamw"),
        key(input__shuffle=False),
    ]
    (project / "tasks" / "models" / "lenet.py").write_text("# Another one.")
    other.append(key())
    assert len({*same, *other}) == 1 + len(other)


def test_under_several_workers_it_is_refused_with_the_reason(project):
    with pytest.raises(UserError, match=r"train\.autotune = true: not under strategy\.kind=multi_worker, because all"):
        config.load(None, {"train.autotune": True, "strategy.kind": "multi_worker"})


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_tuned_training_is_the_one_with_the_chosen_settings(tiny, train, loop):
    options = (f"train.loop={loop}", "train.deterministic=true", "train.epochs=2")
    tuned = train(tiny, *options, "train.autotune=true", run_id="tuned")
    chosen = json.loads(Path("mlruns/runs/tuned/records/tuning.json").read_text())
    assert len(chosen["measured"]) == 2, "with deterministic kernels Keras compiles none"
    named = [f"train.{name}={json.dumps(chosen[name])}" for name in ("steps_per_execution", "jit_compile")]
    plain = train(tiny, *options, *named, run_id="plain")
    assert tuned.weights_digest == plain.weights_digest, "the trial leaves no trace"
    assert np.array_equal(tuned.history["train/loss"], plain.history["train/loss"])


def test_a_trial_ends_when_the_training_is_told_to_stop(tiny, train):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(tiny, "train.autotune=true", stop=stop)
    assert not Path("mlruns/runs/first/records/tuning.json").exists(), "nothing was chosen"


@pytest.mark.parametrize(("enough_seconds", "too_long", "number"), [(0, 1e9, 5), (1e9, 0, 5), (1e9, 1e9, 12)])
def test_a_trial_lasts_as_long_as_is_enough_and_not_less_than_three_calls(
    tiny, train, monkeypatch, enough_seconds, too_long, number
):
    calls = []

    class Clock(callbacks.CallClock):
        def __init__(self, enough, _, stop):
            super().__init__(enough, too_long, stop)

        def on_train_end(self, logs=None):
            calls.append(len(self.seconds))

    monkeypatch.setattr(train_module, "CallClock", Clock)
    monkeypatch.setattr(train_module, "TRIAL_SECONDS", enough_seconds)
    monkeypatch.setattr(train_module, "TRIAL_STEPS", 10)
    train(tiny, "train.autotune=true", "train.deterministic=true", "train.epochs=1")
    assert calls[0] == number


def test_a_trial_on_a_stream_caches_nothing(digits, train):
    options = ("input.source=stream", "input.cache=file", "train.deterministic=true", "train.epochs=1")
    train(digits, *options, "train.autotune=true")
    assert list(Path("mlruns").glob(".cache.*")) == []

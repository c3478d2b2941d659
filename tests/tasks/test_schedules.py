import math

import pytest

from tasks import config
from tasks.modeling import schedules

STEPS = 10  # in one epoch


def load(*overrides):
    return config.load(None, overrides)


def rates(settings, steps, epochs=10, scale=1.0):
    """The learning rate of each of the given steps, counted from 0 as optimizers do."""
    rate = schedules.learning_rate(settings.schedule, STEPS, epochs, scale)
    return [float(rate(step)) if callable(rate) else rate for step in steps]


@pytest.mark.parametrize(
    ("epoch", "expected"), [(0, 1e-3), (1, 1e-3), (2, 1e-3), (3, 1e-4), (6, 1e-4), (7, 1e-5), (9, 1e-5), (30, 1e-5)]
)
def test_piecewise_is_the_tutorials_from_the_first_to_the_last_step_of_an_epoch(epoch, expected):
    # The tutorial's decay(): 1e-3 for epoch < 3, 1e-4 for 3 <= epoch < 7, then 1e-5.
    settings = load("schedule.kind=piecewise")
    first, last = epoch * STEPS, (epoch + 1) * STEPS - 1
    assert rates(settings, [first, last]) == pytest.approx([expected, expected], rel=1e-6)


def test_piecewise_with_its_own_boundaries():
    settings = load(
        "schedule={kind: piecewise, boundaries_epochs: [1, 2, 4], learning_rates: [0.4, 0.3, 0.2, 0.1]}",
    )
    assert rates(settings, [9, 10, 19, 20, 39, 40], scale=2.0) == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.4, 0.2])


def test_constant():
    assert rates(load("schedule={kind: constant, learning_rate: 0.02}"), [0, 99], scale=4.0) == [0.08, 0.08]


def test_cosine_with_warm_up():
    settings = load(
        "schedule={kind: cosine, learning_rate: 0.1, warmup_epochs: 2.0, final_learning_rate: 0.01}",
    )
    # Rises by 0.1 / 20 a step for 20 steps, then half a cosine over the 80 steps that are left, down to 0.01.
    expected = [0.0, 0.005, 0.05, 0.095, 0.1]
    expected += [0.01 + 0.09 * 0.5 * (1 + math.cos(math.pi * (step - 20) / 80)) for step in (30, 60, 99)]
    expected += [0.01, 0.01]
    assert rates(settings, [0, 1, 10, 19, 20, 30, 60, 99, 100, 500]) == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert rates(settings, [10, 60, 100], scale=3.0) == pytest.approx([0.15, 0.165, 0.03], rel=1e-4)


def test_cosine_without_warm_up_starts_at_the_top():
    settings = load("schedule={kind: cosine, learning_rate: 0.1, warmup_epochs: 0, final_learning_rate: 0.0}")
    assert rates(settings, [0, 50, 100]) == pytest.approx([0.1, 0.05, 0.0], abs=1e-8)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_warm_up_as_long_as_the_training_still_gives_numbers(epochs):
    settings = load("schedule={kind: cosine, learning_rate: 0.1, warmup_epochs: 2.0, final_learning_rate: 0.0}")
    found = rates(settings, range(epochs * STEPS), epochs)
    assert found == pytest.approx([0.1 * step / 20 for step in range(epochs * STEPS)], abs=1e-7)

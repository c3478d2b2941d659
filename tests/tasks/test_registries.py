from typing import get_args

import pytest

from tasks import config, losses, metrics, optimizers, schedules


def kinds(section, key):
    """What a key of the settings can be: values, or the kinds of its sections."""
    for one in get_args(section.model_fields[key].annotation):
        yield from [one] if isinstance(one, str) else get_args(one.model_fields["kind"].annotation)


@pytest.mark.parametrize(
    ("registry", "section", "key"),
    [
        (losses.LOSSES, config.Train, "loss"),
        (optimizers.OPTIMIZERS, config.Settings, "optimizer"),
        (schedules.SCHEDULES, config.Settings, "schedule"),
    ],
)
def test_what_can_be_asked_for_is_there(registry, section, key):
    assert list(registry) == list(kinds(section, key))


def test_a_metric_can_be_asked_for_where_one_is():
    names = list(metrics.find_all())
    assert "accuracy" in names
    parts = ("train", "validation")
    assert list(kinds(config.Checkpoint, "monitor")) == [
        f"{part}/{name}" for part in parts for name in ("loss", *names)
    ]
    assert list(kinds(config.Register, "metric")) == [*(f"test/{name}" for name in names), "test/loss"]
    assert [metrics.better(name) for name in ("validation/loss", "train/accuracy", "test/loss", "test/accuracy")] == [
        "lower", "higher", "lower", "higher",
    ]  # fmt: skip

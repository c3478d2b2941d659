import inspect
from typing import get_args

import keras

from tasks import config, records
from tasks.modeling import losses, metrics, optimizers, schedules


def test_every_schedule_can_be_asked_for():
    assert list(schedules.SCHEDULES) == list(config.kinds_of("schedule"))


def test_every_optimizer_is_a_class_of_keras():
    *sections, _ = config.kinds_of("optimizer").values()  # The last is the user's own.
    classes = {section: getattr(keras.optimizers, section.__name__) for section in sections}
    assert set(optimizers.ON_TENSORFLOW) < {section.__name__ for section in sections}
    for section, made in classes.items():
        assert get_args(section.model_fields["kind"].annotation) == (section.__name__.lower(),)
        options = section.model_fields.keys() - {"kind"}
        assert options <= inspect.signature(made).parameters.keys(), section


def test_every_loss_can_be_asked_for():
    asked = list(get_args(get_args(config.Train.model_fields["loss"].annotation)[0]))
    assert asked[0] == "auto"
    assert sorted(asked[1:]) == sorted({name for of_task in losses.LOSSES.values() for name in of_task})


def test_every_task_has_metrics_and_measures_its_headline():
    for task, name in records.HEADLINES.items():
        assert metrics.of_task(task)[name].in_training is not None
    offered = {name for task in records.HEADLINES for name in metrics.of_task(task)}
    assert offered == set(config.names_of("modeling/metrics"))


def test_a_metric_can_be_asked_for_where_one_is():
    names = config.names_of("modeling/metrics")
    assert "accuracy" in names
    parts = ("train", "validation")
    # The other half of each is a pattern for metrics of a user's own.
    monitored, gates = (
        get_args(get_args(section.model_fields[key].annotation)[0])
        for section, key in ((config.Checkpoint, "monitor"), (config.Register, "metric"))
    )
    assert list(monitored) == [f"{part}/{name}" for part in parts for name in ("loss", *names)]
    assert list(gates) == [*(f"test/{name}" for name in names), "test/loss"]
    assert [metrics.better(name) for name in ("validation/loss", "train/accuracy", "test/loss", "test/accuracy")] == [
        "lower", "higher", "lower", "higher",
    ]  # fmt: skip

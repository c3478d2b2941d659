"""What is printed of a prepared dataset, and what differs between two."""

import pytest

from flows.cli import data
from tasks.operations import data_folders
from tasks.records import Column, Feature, PreparedDataset, PreparedSplit, Target


def dataset(*columns, mean, deviation):
    """A dataset of a table of numbers."""
    split = PreparedSplit(
        num_examples=2, features={"number": "numbers.npy"}, labels="labels.npy", sha256={}, class_counts=(1, 1)
    )
    number = Feature(
        kind="number", shape=(len(mean),), dtype="float32", mean=mean, deviation=deviation, columns=columns
    )
    return PreparedDataset(
        name="own", kind="table", version="1", folder="data/own/prepared", features={"number": number},
        target=Target.of_classes("ab"), splits={"train": split}, sha256={},
    )  # fmt: skip


@pytest.fixture
def scaled():
    return dataset(
        Column(name="age", kind="number"),
        Column(name="income", kind="number", quantiles=(0, 900, 120_000)),
        mean=(47.5, 0.5),
        deviation=(12, 0.25),
    )


def test_of_numbers_that_quantiles_scale_the_values_are_told_and_not_their_places(scaled, capsys):
    data.print_dataset(scaled)
    lines = [line.rstrip().split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["age", "number", "0", "mean 47.5, deviation 12"] in lines
    assert ["income", "number", "0", "from 0 to 120,000, scaled by quantiles"] in lines


def test_another_scale_is_a_difference(scaled):
    plain = dataset(
        Column(name="age", kind="number"), Column(name="income", kind="number"), mean=(47.5, 0.5), deviation=(12, 0.25)
    )
    assert data_folders.compare(plain, scaled, ("a", "b")).differences == {
        f"features.number.columns.income.quantiles.{place}": (None, value)
        for place, value in enumerate(("0", "900", "120,000"))
    }


def test_of_many_numbers_in_one_column_no_mean_is_printed(capsys):
    data.print_dataset(
        dataset(Column(name="pixels", kind="number", width=784), mean=(0.5,) * 784, deviation=(0.25,) * 784)
    )
    out = capsys.readouterr().out
    assert "pixels" in out
    assert "mean" not in out

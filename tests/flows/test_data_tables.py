"""What is printed of a prepared dataset, and what differs between two."""

import hashlib
import json
from pathlib import Path

import pytest

from flows.cli import data
from tasks.evaluation import slices
from tasks.operations import data_folders
from tasks.records import Column, Feature, PreparedDataset, PreparedSplit, Target
from tasks.system.errors import UserError
from tests.tasks import made_up


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
    assert ["income", "number", "0", "from 0 to 1.2e+05, scaled by quantiles"] in lines


def test_another_scale_is_a_difference(scaled):
    plain = dataset(
        Column(name="age", kind="number"), Column(name="income", kind="number"), mean=(47.5, 0.5), deviation=(12, 0.25)
    )
    assert data_folders.compare(plain, scaled, ("a", "b")).differences == {
        "number: column income": ("number", "number, scaled by quantiles")
    }


def test_a_difference_counts_as_what_is_shown_of_each(scaled):
    """None missing is 0, and the places of a missing and an unknown value are not values."""
    town = Feature(
        kind="category", shape=(1,), dtype="int32", vocabulary_sizes=(4,),
        columns=(Column(name="town", kind="category"),),
    )  # fmt: skip
    missing = scaled.splits["train"].model_copy(update={"num_missing": {"age": 3}})
    more = {"features": {**scaled.features, "category": town}, "splits": {"train": missing}}
    found = data_folders.compare(scaled, scaled.model_copy(update=more), ("a", "b")).differences
    assert found["train: missing values of age"] == ("0", "3")
    assert found["town: different values"] == (None, "2")
    assert "train: missing values of income" not in found


def test_how_a_run_draws_its_validation_examples_is_told_where_one_draws_them(scaled):
    by_class = scaled.model_copy(update={"validation_by_class": True})
    found = data_folders.compare(scaled, by_class, ("a", "b")).differences
    assert found == {"validation examples of a run": ("drawn from all", "drawn by class")}
    both = {"splits": {**scaled.splits, "validation": scaled.splits["train"]}}
    given = scaled.model_copy(update=both), by_class.model_copy(update=both)
    assert data_folders.compare(*given, ("a", "b")).differences == {}


def test_metadata_are_shown_as_the_test_split_has_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))
    kept = {
        "clinic": {"kind": "category", "values": ["north", None, "south", "north"]},
        "dose": {"kind": "number", "values": [2.5, 0.125, None, None]},
        "seen": {"kind": "datetime", "values": [19723.75, 19800.0, 19724.0, 19724.0]},
        "ever": {"kind": "datetime", "values": [-1e6, None, None, 1e9]},
        "empty": {"kind": "number", "values": [None] * 4},
    }
    digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    Path("test_metadata.json").write_text(json.dumps(kept))
    plain = dataset(Column(name="age", kind="number"), mean=(0.5,), deviation=(1.0,))
    assert data_folders.metadata(plain) == {}
    data.print_metadata({})
    assert capsys.readouterr().out == ""
    test = plain.splits["train"].model_copy(update={"num_examples": 4, "features": {}})
    beside = {"metadata": "test_metadata.json", "sha256": {"test_metadata.json": digest}}
    prepared = plain.model_copy(update={**beside, "splits": {"test": test}})
    data.print_metadata(data_folders.metadata(prepared))
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["metadata", "kind", "missing", "in", "the", "test", "split"],
        ["clinic", "category", "1", "2", "different", "values"],
        ["dose", "number", "2", "from", "0.125", "to", "2.5"],
        ["seen", "datetime", "0", "from", "2024-01-01", "to", "2024-03-18"],
        ["ever", "datetime", "2", "from", "-768-02-04", "to", "2739877-01-03"],
        ["empty", "number", "4", "0", "different", "values"],
    ]
    for damaged in ("[", json.dumps({**kept, "dose": {"kind": "number", "values": [1, 2, 3, 4]}})):
        Path("test_metadata.json").write_text(damaged)
        with pytest.raises(UserError, match=r"test_metadata\.json: missing or damaged\. Rebuild it: stratagem prepare"):
            data_folders.metadata(prepared)
        assert slices.load(prepared) is None, "a report then has no slices by column"


def test_of_many_numbers_in_one_column_no_mean_is_printed(capsys):
    data.print_dataset(
        dataset(Column(name="pixels", kind="number", width=784), mean=(0.5,) * 784, deviation=(0.25,) * 784)
    )
    out = capsys.readouterr().out
    assert "pixels" in out
    assert "mean" not in out

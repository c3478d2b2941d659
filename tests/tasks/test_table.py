"""Tables: what is read, guessed, split and fitted, and what is refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from sklearn.datasets import load_diabetes, load_wine
from sklearn.preprocessing import QuantileTransformer

from tasks import config
from tasks import prepare as stage
from tasks.data import dataset_folder, kinds, prepared_data
from tasks.data.encoding import Encoder
from tasks.data.kinds import table
from tasks.evaluation import slices
from tasks.system.errors import UserError

CITIES = ("Bonn", "Köln", "Ulm")
WORDS = ("good", "bad", "fine", "nice", "awful", "place", "food")


def visits(count=200):
    """A table of each kind of column."""
    generator = np.random.default_rng(0)
    words = [" ".join(generator.choice(WORDS, generator.integers(4, 9))) for _ in range(count)]
    ages = generator.integers(18, 80, count).astype(float)
    ages[::10] = np.nan
    return pd.DataFrame(
        {
            "age": ages,
            "city": generator.choice(CITIES, count),
            "note": words,
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(generator.integers(0, 10**7, count), "s"),
            "person": [f"p{number}" for number in generator.integers(0, 25, count)],
            "back": generator.choice(["yes", "no"], count),
        }
    )


def describe(source, **values):
    (Path("data") / "own").mkdir(exist_ok=True)
    return config.describe({"kind": "table", "name": "own", "source": str(source), **values}, "test")


def prepare(source, **values):
    """Prepare as `data add` does: what is guessed is in the description."""
    dataset, _ = table.guess(describe(source, **values))
    prepared = stage.prepare(dataset)
    prepared_data.verify(prepared)
    return prepared


def write(frame, path):
    frame.to_csv(path, index=False)
    return path


def array(prepared, name, split="train"):
    return np.load(prepared.splits[split].features[name])


def labels(prepared, split="train"):
    return np.load(prepared.splits[split].labels)


def files_of(prepared):
    found = {path.name: path.read_bytes() for path in sorted(Path(prepared.folder).iterdir())}
    manifest = json.loads(found["manifest.json"])
    manifest.get("csv", {}).pop("encodings", None)  # It says how the same values are written.
    return found | {"manifest.json": {**manifest, "csv": manifest.get("csv") or {}}}


def message_of(source, **values):
    """What a dataset is refused with; nothing is left behind."""
    with pytest.raises(UserError) as caught:
        prepare(source, **values)
    assert "\n" not in str(caught.value)
    assert not list(Path("data/own").iterdir())
    return str(caught.value)


def test_numbers_and_classes_of_a_real_table(source):
    data = load_wine(as_frame=True)
    prepared = prepare(write(data.frame, source / "own.csv"), target="target")
    target, number = prepared.target, prepared.features["number"]
    assert (target.task, target.class_names) == ("classification", tuple(map(str, range(len(data.target_names)))))
    assert [column.name for column in number.columns] == list(data.feature_names)
    rows = {
        split: np.column_stack([array(prepared, "number", split), labels(prepared, split)]) for split in prepared.splits
    }
    expected = data.frame.to_numpy(np.float32)
    together = np.concatenate(list(rows.values()))
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, expected.tolist()))
    share = np.bincount(labels(prepared, "test")) / np.bincount(data.target)
    np.testing.assert_allclose(share, 0.2, atol=0.02)
    train = array(prepared, "number").astype(np.float64)
    np.testing.assert_allclose(number.mean, train.mean(0), rtol=1e-12)
    np.testing.assert_allclose(number.deviation, train.std(0), rtol=1e-12)
    assert prepared.held_out.num_examples == len(rows["test"])
    assert prepared.validation_by_class


def test_a_regression_has_mean_and_deviation_of_its_training_split(source):
    data = load_diabetes(as_frame=True)
    prepared = prepare(write(data.frame, source / "own.csv"), target="target")
    found = labels(prepared)
    assert (prepared.target.task, prepared.target.num_outputs) == ("regression", 1)
    assert "validation_by_class" not in (Path(prepared.folder) / "manifest.json").read_text()
    assert (found.dtype, found.shape) == (np.float32, (354, 1))
    np.testing.assert_allclose(prepared.target.mean, found.astype(float).mean(0), rtol=1e-12)
    np.testing.assert_allclose(prepared.target.deviation, found.astype(float).std(0), rtol=1e-12)
    assert prepared.splits["train"].class_counts == ()


def test_columns_are_guessed_and_encoded_by_what_is_served(source):
    frame = visits()
    prepared = prepare(write(frame, source / "own.csv"), target="back")
    assert {name: one.shape for name, one in prepared.features.items()} == {
        "number": (8,), "category": (2,), "note": (8,),
    }  # fmt: skip
    assert [column.kind for column in prepared.features["number"].columns] == ["number", "datetime"]
    assert prepared.splits["train"].num_missing["age"] + prepared.splits["test"].num_missing["age"] == 20
    vocabularies = {
        name: json.loads(Path(one.vocabulary).read_text(encoding="utf-8"))
        for name, one in prepared.features.items()
        if one.vocabulary
    }
    assert sorted(vocabularies["category"][0]) == sorted(CITIES)
    assert sorted(vocabularies["note"][0]) == sorted(WORDS)
    sizes = {name: tuple(len(texts) + 2 for texts in columns) for name, columns in vocabularies.items()}
    assert sizes == {name: prepared.features[name].vocabulary_sizes for name in sizes}
    assert set(prepared.sha256) == {prepared.features[name].vocabulary for name in vocabularies}
    # The raw rows, as a client would send them, become the rows that were prepared.
    encoder = Encoder({name: one.model_dump() for name, one in prepared.features.items()}, vocabularies)
    raw = {name: frame[name].astype(object).where(frame[name].notna(), None).tolist() for name in encoder.columns}
    served = encoder.encode(raw)
    for name in prepared.features:
        both = np.concatenate([array(prepared, name, split) for split in ("train", "test")])
        assert sorted(map(tuple, served[name].tolist())) == sorted(map(tuple, both.tolist()))


def test_all_files_of_one_table_give_the_same_bytes(source):
    frame = visits()
    frame.to_csv(source / "own.csv", index=False)
    frame.to_csv(source / "own.tsv", index=False, sep="\t")
    frame.to_csv(source / "german.csv", index=False, sep=";", encoding="latin-1")
    frame.to_parquet(source / "own.parquet")
    frame.set_index(frame.columns[-1]).to_parquet(source / "indexed.parquet")
    rows = frame.assign(when=frame["when"].astype(str)).to_json(orient="records", lines=True, force_ascii=False)
    (source / "own.jsonl").write_text(rows, encoding="utf-8")
    (source / "own.ndjson").write_text(rows, encoding="utf-8")
    expected = files_of(prepare(source / "own.csv", target="back"))
    assert files_of(prepare(source / "own.csv", target="back")) == expected
    for name in ("own.tsv", "german.csv", "own.parquet", "indexed.parquet", "own.jsonl", "own.ndjson"):
        text = "latin-1" if name == "german.csv" else "utf-8"
        assert files_of(prepare(source / name, target="back", encoding=text)) == expected, name


@pytest.fixture
def read_in_chunks(monkeypatch):
    """``read_in_chunks(20, kept=False)``: files are read so many rows at a time, and count as large ones."""

    def read_in_chunks(rows, kept):
        monkeypatch.setattr("tasks.data.tables.CHUNK_ROWS", rows)
        if not kept:
            monkeypatch.setattr("tasks.data.tables.KEPT_BYTES", 0)

    return read_in_chunks


def test_a_large_file_is_read_in_parts_to_the_same_bytes(source, read_in_chunks):
    path = write(visits(), source / "own.csv")
    expected = prepare(path, target="back", group="person")
    before = files_of(expected)
    read_in_chunks(30, kept=False)
    found = prepare(path, target="back", group="person")
    for moment in ("mean", "deviation"):
        own, other = (getattr(one.features["number"], moment) for one in (expected, found))
        np.testing.assert_allclose(own, other, rtol=1e-9)
    in_parts = files_of(found)
    del before["manifest.json"], in_parts["manifest.json"]  # Its sums were taken in another order.
    assert in_parts == before


@pytest.fixture(params=["at once", "in parts"])
def small_chunks(request, read_in_chunks):
    """A file is read 7 rows at a time, once as a small one, or again and again as a large one."""
    read_in_chunks(7, kept=request.param == "at once")


@pytest.mark.usefixtures("small_chunks")
def test_a_number_that_pandas_does_not_read_is_read_as_it_is_served(source):
    values = [*map(str, range(99)), "\N{FULLWIDTH DIGIT SEVEN}"]  # 7 to Python.
    frame = pd.DataFrame({"own": values, "y": ["a", "b"] * 50})
    prepared = prepare(write(frame, source / "own.csv"), target="y")
    found = np.concatenate([array(prepared, "number", split)[:, 0] for split in prepared.splits])
    assert sorted(found) == sorted([*range(99), 7])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_of_any_encoding_gives_the_same_bytes(source, encoding):
    frame = visits().assign(own=['Größe "ä",\nÉtage 2', "no"] * 100)
    columns = {"own": "category", "note": "text"}
    expected = files_of(prepare(write(frame, source / "own.csv"), target="back", columns=columns))
    frame.to_csv(source / "other.csv", index=False, encoding=encoding)
    assert files_of(prepare(source / "other.csv", target="back", columns=columns, encoding=encoding)) == expected


@pytest.mark.parametrize(("most", "expected"), [(9, ["c", "a", "b", "d"]), (2, ["c", "a"])])
def test_a_vocabulary_begins_with_the_most_frequent(source, most, expected):
    frame = pd.DataFrame({"own": [*"dbbaacccee"], "y": [*"xyxyxyxyxy"], "part": ["train"] * 8 + ["test"] * 2})
    path = write(frame, source / "own.csv")
    prepared = prepare(path, target="y", split_column="part", max_vocabulary=most)
    assert json.loads(Path(prepared.features["category"].vocabulary).read_text()) == [expected]
    places = [expected.index(text) + 2 if text in expected else 1 for text in frame["own"]]
    assert [*array(prepared, "category")[:, 0], *array(prepared, "category", "test")[:, 0]] == places


def test_an_older_model_encodes_the_test_rows_of_a_table_that_grew(source, tmp_path):
    def described(frame, **values):
        dataset, _ = table.guess(describe(write(frame, source / "own.csv"), target="back", **values))
        Path("data/own/params.yaml").write_text(json.dumps({"dataset": dataset.model_dump(mode="json")}))
        return stage.prepare(dataset)

    older = prepared_data.encoder_config(described(visits()))
    grown = pd.concat([visits(), visits(60).assign(city="Wien", age=99.0)], ignore_index=True)
    prepared = described(grown)
    known = json.loads(Path(prepared.features["category"].vocabulary).read_text())[0]
    assert "Wien" in known
    places = kinds.encode_test_rows(prepared, older, tmp_path)
    found = {name: np.load(place) for name, place in places.items()}
    words = [known[place - 2] for place in array(prepared, "category", "test")[:, 0]]
    of_older = older["vocabularies"]["category"][0]
    assert found["category"][:, 0].tolist() == [of_older.index(word) + 2 if word in of_older else 1 for word in words]
    assert 1 in found["category"]
    assert found.keys() == prepared.features.keys()

    write(grown.assign(back=grown["back"].iloc[::-1].to_numpy()), source / "own.csv")
    with pytest.raises(UserError, match=r"own.csv' has changed since data/own/prepared was made"):
        kinds.encode_test_rows(prepared, older, tmp_path)
    prepared = described(grown.drop(columns="note"))
    with pytest.raises(UserError, match=r"own.csv': these columns are missing: 'note'"):
        kinds.encode_test_rows(prepared, older, tmp_path)


def test_what_is_fitted_never_saw_the_test_split(source):
    frame = visits()
    first = prepare(write(frame, source / "own.csv"), target="back")
    ages = {round(age, 3) for age in array(first, "number", "test")[:, 1].tolist()}  # Of days since 1970: of one row.
    days = (frame["when"] - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    in_test = days.astype(np.float32).round(3).isin([np.float32(age) for age in ages]) | days.map(
        lambda day: round(float(np.float32(day)), 3) in ages
    )
    assert in_test.sum() == first.splits["test"].num_examples
    frame.loc[in_test, ["age", "city", "note"]] = [99_999.0, "Atlantis", "quite new words of a long test " * 9]
    second = prepare(write(frame, source / "own.csv"), target="back")
    assert second.features == first.features
    assert second.sha256 == first.sha256
    for name in first.features:
        path = first.splits["train"].features[name]
        assert second.splits["train"].sha256[path] == first.splits["train"].sha256[path]
    assert (array(second, "category", "test")[:, 0] == 1).all(), "unknown"
    assert (array(second, "number", "test")[:, 0] == 99_999).all()
    assert (array(second, "note", "test")[:, 0] == 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_group_lies_in_one_split(source, seed):
    frame = visits().assign(row=np.arange(200.0))
    prepared = prepare(
        write(frame, source / "own.csv"), target="back", group="person", validation=0.2, seed=seed,
        columns={"person": "ignore", "age": "ignore", "when": "ignore", "row": "number"},
    )  # fmt: skip
    person = {
        split: set(frame["person"][array(prepared, "number", split)[:, 0].astype(int)]) for split in prepared.splits
    }
    assert set(person) == {"train", "validation", "test"}
    assert not any(person[one] & person[other] for one, other in (("train", "test"), ("train", "validation")))
    assert not person["test"] & person["validation"]
    sizes = {split: part.num_examples for split, part in prepared.splits.items()}
    assert sum(sizes.values()) == 200
    assert abs(sizes["test"] - 40) < 12
    assert abs(sizes["validation"] - 40) < 12


METADATA = {"person": "category", "when": "datetime", "dose": "number", "site": "category"}


def measured(count=300):
    """A table whose feature `row` says which row it is."""
    frame = visits(count)[["person", "when", "back"]].assign(row=np.arange(count) + 0.5, dose=np.arange(count) % 97 / 4)
    frame["site"] = np.where(frame["row"] % 3 == 0.5, "north", np.where(frame["row"] % 3 == 1.5, "south", None))
    frame.loc[::7, "dose"] = np.nan
    return frame


def test_metadata_are_kept_of_the_test_rows_and_nothing_is_learnt_from_them(source):
    frame = measured()
    path = write(frame, source / "own.csv")
    without = prepare(path, target="back", group="person", columns=dict.fromkeys(("when", "dose", "site"), "ignore"))
    assert without.metadata is None
    assert "metadata" not in (Path(without.folder) / "manifest.json").read_text()
    before = files_of(without)
    prepared = prepare(path, target="back", group="person", metadata=METADATA)
    after = files_of(prepared)
    assert after.keys() - before.keys() == {"test_metadata.json"}
    assert {name for name in before if after[name] != before[name]} == {"manifest.json"}
    assert [column.name for column in prepared.features["number"].columns] == ["row"]
    assert list(prepared.features) == ["number"]

    rows = frame.iloc[array(prepared, "number", "test")[:, 0].astype(int)]
    kept = json.loads((Path(prepared.folder) / "test_metadata.json").read_text())
    assert {name: one["kind"] for name, one in kept.items()} == METADATA
    assert kept["person"]["values"] == rows["person"].tolist()
    assert kept["site"]["values"] == [site if isinstance(site, str) else None for site in rows["site"]]
    assert [np.nan if one is None else one for one in kept["dose"]["values"]] == pytest.approx(
        rows["dose"].tolist(), nan_ok=True
    )
    days = (rows["when"] - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    assert kept["when"]["values"] == pytest.approx(days.tolist())


def test_metadata_are_slices(source):
    frame = measured()
    prepared = prepare(write(frame, source / "own.csv"), target="back", columns={"row": "number"}, metadata=METADATA)
    rows = frame.iloc[array(prepared, "number", "test")[:, 0].astype(int)]
    every = list(slices.every("classification", ("no", "yes"), labels(prepared, "test"), slices.load(prepared)))
    found, ends = {one.full_name: one.rows for one in every}, {one.full_name: one.ends for one in every}
    for name, expected in (("north", rows["site"] == "north"), ("missing", rows["site"].isna())):
        np.testing.assert_array_equal(found[f"site: {name}"], expected)
    person = rows["person"].iloc[0]
    np.testing.assert_array_equal(found[f"person: {person}"], rows["person"] == person)
    doses = [name for name in found if name.startswith("dose: ")]
    assert doses == [f"dose: {which} quarter" for which in ("lowest", "second", "third", "highest")]
    assert sum(found[name].sum() for name in doses) == rows["dose"].notna().sum()
    days = [name for name in found if name.startswith("when: ")]
    assert ends["when: lowest quarter"].startswith(f"{rows['when'].min():%Y-%m-%d} to 2024-0")
    assert sum(found[name].sum() for name in days) == len(rows)


def test_a_validation_split_that_is_made_is_told(source, capsys):
    path = write(visits(), source / "own.csv")
    prepared = prepare(path, target="back", group="person", columns={"person": "ignore"})
    count = prepared.splits["validation"].num_examples
    said = f"the table has no validation split, so {count} of its rows become the validation split"
    assert said in capsys.readouterr().err
    prepare(path, target="back", validation=20)
    assert "the table has no validation split, so 20 of its rows become the" in capsys.readouterr().err
    prepare(path, target="back")
    assert "validation split" not in capsys.readouterr().err


@pytest.mark.parametrize("column", ["when", "year"])
def test_the_newest_rows_are_the_test_split(source, column):
    frame = visits().assign(row=np.arange(200.0))
    frame["year"] = frame["when"].dt.day_of_year // 10  # Many rows of each.
    columns = {"age": "ignore", "row": "number"}
    prepared = prepare(write(frame, source / "own.csv"), target="back", time=column, columns=columns)
    place = 0 if column == "when" else 7  # A datetime is before it.
    rows = {split: array(prepared, "number", split)[:, place].astype(int) for split in prepared.splits}
    times = {split: frame[column][own] for split, own in rows.items()}
    assert times["train"].max() < times["validation"].min()
    assert times["validation"].max() < times["test"].min()
    assert len(times["test"]) >= 40
    assert sum(map(len, times.values())) == 200


def test_splits_and_weights_are_columns(source):
    frame = visits().assign(part=["train", "Test", "val", "train"] * 50, counts=np.arange(200) / 2)
    prepared = prepare(write(frame, source / "own.csv"), target="back", split_column="part", weight="counts")
    assert {name: part.num_examples for name, part in prepared.splits.items()} == {
        "test": 50, "train": 100, "validation": 50,
    }  # fmt: skip
    weights = np.load(prepared.splits["test"].weights)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, np.arange(1, 200, 4) / 2)
    assert prepared.held_out is None
    assert not {"part", "counts"} & {column.name for one in prepared.features.values() for column in one.columns}


@pytest.mark.parametrize("group", [None, "person"])
@pytest.mark.parametrize("missing", ["test", "validation", "both"])
def test_a_split_that_a_column_does_not_name_is_drawn_from_train(source, group, missing):
    other = {"test": "val", "validation": "test", "both": "train"}[missing]
    frame = visits().assign(row=np.arange(200.0))
    frame["person"] = np.where(frame["row"] % 4 == 3, "other ", "") + frame["person"].astype(str)
    frame["part"] = np.where(frame["row"] % 4 == 3, other, "train")
    prepared = prepare(
        write(frame, source / "own.csv"), target="back", split_column="part", group=group, validation=0.2,
        columns={"person": "ignore", "age": "ignore", "when": "ignore", "row": "number"},
    )  # fmt: skip
    rows = {split: array(prepared, "number", split)[:, 0].astype(int) for split in prepared.splits}
    assert set(rows) == {"train", "validation", "test"}
    assert sorted(np.concatenate(list(rows.values()))) == list(range(200))
    if missing != "both":
        assert rows[{"val": "validation"}.get(other, other)].tolist() == list(range(3, 200, 4))
    for split in ("test", "validation") if missing == "both" else (missing,):
        assert 15 <= len(rows[split]) <= 55
    if group:
        persons = [set(frame["person"][own]) for own in rows.values()]
        assert len(set().union(*persons)) == sum(map(len, persons))
    assert (prepared.held_out is None) == (missing == "validation")
    if prepared.held_out:
        assert prepared.held_out.num_examples == len(rows["test"])


def test_labels_are_columns_or_stand_in_one(source):
    frame = visits()
    sets = [{"hot": number % 2 == 0, "wet": number % 3 == 0, "dark": number % 5 < 3} for number in range(200)]
    columns = frame.assign(**{name: [int(one[name]) for one in sets] for name in ("dark", "hot", "wet")})
    together = frame.assign(weather=["; ".join(name for name, on in one.items() if on) for one in sets])
    first = prepare(write(columns, source / "own.csv"), target="dark,hot,wet")
    assert (first.target.task, first.target.class_names) == ("multilabel", ("dark", "hot", "wet"))
    assert labels(first).dtype == np.uint8
    assert first.splits["train"].class_counts == tuple(labels(first).sum(0))
    second = prepare(write(together, source / "own.csv"), target="weather", separator=";")
    assert second.target.class_names == first.target.class_names
    np.testing.assert_array_equal(labels(second), labels(first))
    several = prepare(write(columns.assign(hot=np.arange(200) / 7), source / "own.csv"), target=["hot", "wet"])
    assert (several.target.task, labels(several).shape) == ("regression", (160, 2))


@pytest.mark.parametrize("mark", [";", "|", ", ", "/"])
def test_labels_that_may_be_classes_are_asked_for(source, mark):
    sets = [("hot",), ("wet",), ("hot", "wet"), ("dark", "hot"), ()] * 20
    path = write(pd.DataFrame({"x": np.arange(100) / 4, "y": [mark.join(one) for one in sets]}), source / "own.csv")
    told = message_of(path, target="y")
    assert f"dataset.target = 'y': 'hot{mark}wet' may be 2 labels or one class" in told
    assert f"For labels: --set \"dataset.separator='{mark.strip()}'\"; for a class: --set dataset.task=class" in told
    said = re.search(r'--set "dataset\.separator=(.+?)"', told)
    separator = config.read_texts([f"dataset.separator={said[1]}"])["dataset.separator"]
    assert prepare(path, target="y", separator=separator).target.class_names == ("dark", "hot", "wet")
    shutil.rmtree("data/own")
    prepared = prepare(path, target="y", task="classification", on_broken="skip")
    assert len(prepared.target.class_names) == 4
    # These are names, of which no part is a value, and an empty part is no label.
    for names in (["Doe, Jo", "Doe, Al", "Roe, Jo", "Roe", "Poe"], [f"w{mark}", "w", f"v{mark}", "v", "u"]):
        write(pd.DataFrame({"x": np.arange(100) / 4, "y": names * 20}), path)
        assert len(prepare(path, target="y").target.class_names) == 5


def test_names_of_columns_never_lead_out_of_the_folder(source):
    texts = [f"a few words {number}" for number in range(40)]
    names = ["../../escaped", "Label", "note", "Note", "número/größe", "${x}", "1st", "number", "数"]
    frame = pd.DataFrame(dict.fromkeys(names, texts) | {"y": ["a", "b"] * 20})
    prepared = prepare(write(frame, source / "own.csv"), target="y")
    assert list(prepared.features) == [
        "escaped", "label_2", "note", "note_2", "n_mero_gr_e", "x", "column_1st", "number_2", "column",
    ]  # fmt: skip
    assert [one.columns[0].name for one in prepared.features.values()] == names
    assert prepared_data.made_in(Path("data/own")) == {path.name for path in Path(prepared.folder).iterdir()}
    (Path(prepared.folder) / "manifest.json").write_text("{")
    Path("data/own/dvc.lock").touch()
    prepared_data.set_foreign_aside("own")
    assert not Path("data/own/set_aside").exists()


def test_missing_values_are_filled_refused_or_drop_their_row(source):
    path = write(visits(), source / "own.csv")
    filled = prepare(path, target="back")
    age = filled.features["number"].columns[0]
    own = array(filled, "number")[:, 0]
    assert (own == np.float32(age.fill)).sum() == filled.splits["train"].num_missing["age"]
    assert own[own != np.float32(age.fill)].mean() == pytest.approx(age.fill, rel=1e-6)
    dropped = prepare(path, target="back", columns={"age": {"kind": "number", "missing": "drop"}})
    assert sum(part.num_examples for part in dropped.splits.values()) == 180
    assert dropped.features["number"].columns[0].fill is None
    with pytest.raises(
        UserError, match=r"columns.age.missing = 'stop': 20 of 200 values are missing, the first in row 1"
    ):
        prepare(path, target="back", columns={"age": {"kind": "number", "missing": "stop"}})


def test_a_number_may_be_its_place_among_the_quantiles_of_the_training_split(source):
    frame = visits(1000).assign(age=np.random.default_rng(1).lognormal(10, 2, 1000))
    frame.loc[::10, "age"] = np.nan
    path = write(frame, source / "own.csv")
    plain = prepare(
        path, target="back", columns=dict.fromkeys(("city", "note", "when", "person"), "ignore") | {"age": "number"}
    )
    raw = array(plain, "number").astype(np.float64), array(plain, "number", "test").astype(np.float64)
    assert plain.features["number"].columns[0].quantiles == ()
    columns = dict.fromkeys(("city", "note", "when", "person"), "ignore") | {
        "age": {"kind": "number", "scale": "quantiles"}
    }
    prepared = prepare(path, target="back", columns=columns)
    (column,) = prepared.features["number"].columns
    present = raw[0][raw[0] != np.float32(column.fill)]
    peer = QuantileTransformer(n_quantiles=256, subsample=None).fit(present[:, np.newaxis])
    for split, values in zip(("train", "test"), raw, strict=True):
        # Of values that float32 rounded.
        np.testing.assert_allclose(array(prepared, "number", split), peer.transform(values), rtol=0, atol=1e-5)
    assert prepared.splits["train"].num_missing["age"] == plain.splits["train"].num_missing["age"] > 50
    served = Encoder(**prepared_data.encoder_config(prepared)).encode({"age": [1e30, -1.0, None]})["number"]
    assert served[:2, 0].tolist() == [1, 0]
    assert served[2, 0] == pytest.approx(peer.transform([[column.fill]])[0, 0], abs=1e-5)


@pytest.mark.parametrize("thousands", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_decimal_commas_give_the_numbers_of_decimal_points(source, thousands):
    """As spreadsheets of half of Europe save a table."""
    amounts = np.random.default_rng(0).normal(0, 3000, 60).round(2)
    frame = pd.DataFrame({"amount": amounts, "city": ["Ulm", "Bonn"] * 30, "weight": np.arange(60) / 4})
    frame["y"] = (amounts / 7).round(3)
    frame.loc[3, "amount"] = np.nan
    plain = prepare(write(frame, source / "own.csv"), target="y", weight="weight")
    expected = {name: content for name, content in files_of(plain).items() if name.endswith(".npy")}
    european = frame.astype(object)
    for name in ("amount", "weight", "y"):
        texts = frame[name].map(lambda value: f"{value:,.6f}" if thousands else f"{value:.6f}")
        european[name] = texts.str.translate({ord(","): ".", ord("."): ","}).where(frame[name].notna(), None)
    european.to_csv(source / "own.csv", index=False, sep=";")
    dataset, lines = table.guess(describe(source / "own.csv", target="y", weight="weight"))
    assert (dataset.decimal, dataset.delimiter, dataset.task) == (",", ";", "regression")
    assert "  note      numbers are written as 3,14" in lines
    prepared = stage.prepare(dataset)
    assert {name: content for name, content in files_of(prepared).items() if name.endswith(".npy")} == expected
    # What a registered model has of the data takes the file's rows as they are, and numbers.
    encoder = Encoder(
        {name: one.model_dump() for name, one in prepared.features.items()}, {"category": [["Bonn", "Ulm"]]}
    )
    raw = {name: european[name].tolist() for name in encoder.columns}
    as_numbers = {**raw, "amount": frame["amount"].tolist()}
    assert (encoder.encode(raw)["number"] == encoder.encode(as_numbers)["number"]).all()


def test_points_in_one_column_and_commas_in_another_are_refused(source):
    frame = pd.DataFrame({"own": ["1,5", "2,25"] * 10, "x": np.arange(20) / 4, "y": ["a", "b"] * 10})
    path = source / "own.csv"
    frame.to_csv(path, index=False, sep=";")
    message = message_of(path, target="y")
    assert "the column 'own' has numbers with a decimal comma, such as '1,5', and 'x' some with a decimal" in message
    dataset, _ = table.guess(describe(path, target="y", columns={"own": "category"}))
    assert dataset.columns["own"].kind == "category", "as the message says"
    assert dataset.columns["x"].kind == "number"
    labels = pd.DataFrame({"x": np.arange(20) * 1.5, "y": ["1,2", "2,3"] * 10})
    labels.to_csv(path, index=False, sep=";")
    assert table.guess(describe(path, target="y", separator=","))[0].decimal == ".", "these are several labels"


def test_what_was_guessed_is_kept(source):
    path = write(visits(), source / "own.csv")
    dataset, lines = table.guess(describe(path, target="back", columns={"age": "category"}))
    assert {name: one.kind for name, one in dataset.columns.items()} == {
        "age": "category", "city": "category", "note": "text", "when": "datetime", "person": "category",
    }  # fmt: skip
    assert max(map(len, lines)) <= 80
    assert "  task      classification of back" in lines
    assert table.guess(dataset) == (dataset, [])
    more = write(visits().assign(extra=1.5), source / "own.csv")
    with pytest.raises(UserError, match=r"the column 'extra' is not in dataset.columns"):
        table.examples(config.describe({**dataset.model_dump(), "source": str(more)}, "test"))


GUESSES = [
    ([1, 2.5, None], "number"),
    (["01234", "99999", "10115"], "category"),
    (["2024-01-31", None, "2024-02-01T10:00:00Z"], "datetime"),
    (["20240131", "20240201", "20240202"], "datetime"),
    ([True, False, True], "category"),
    ([*range(19), "many"], "number"),
    ([*["2024-01-31"] * 19, "soon"], "datetime"),
    (["a.png", None, "b.JPG"], "image"),
    ([None, None, None], "ignore"),
    (["same", "same", "same"], "ignore"),
    ([f"x{number}" for number in range(30)], "ignore"),
    ([f"three words {number}" for number in range(30)], "text"),
    (["New York City", "Rio de Janeiro"] * 10, "category"),
]


@pytest.mark.parametrize(("values", "kind"), GUESSES)
def test_a_column_says_its_kind(source, values, kind):
    frame = pd.DataFrame({"own": values, "x": np.arange(len(values)) / 4, "y": np.arange(len(values)) * 0.5})
    path = write(frame, source / "own.csv")
    dataset, _ = table.guess(describe(path, target="y"))
    assert dataset.columns["own"].kind == kind


TARGETS = [
    (["a", "b"] * 10, {}, "classification"),
    (["1", "2", "none of them", "2"] * 5, {}, "classification"),
    ([0, 1] * 10, {}, "classification"),
    ([1.0, 2.0] * 10, {}, "classification"),
    ([True, False] * 10, {}, "classification"),
    (list(range(20)), {}, "regression"),
    ([0.5, 1] * 10, {}, "regression"),
    ([0, 1] * 10, {"task": "regression"}, "regression"),
]


@pytest.mark.parametrize(("values", "given", "task"), TARGETS)
def test_a_target_says_its_task(source, values, given, task):
    path = write(pd.DataFrame({"x": np.arange(20) / 3, "y": values}), source / "own.csv")
    prepared = prepare(path, target="y", **given)
    assert prepared.target.task == task
    if task == "classification":
        assert list(prepared.target.class_names) == sorted(prepared.target.class_names)


def pets(source, count=20):
    """A table beside pictures, each of one shade, 4 high and 6 wide."""
    for number in range(count):
        path = source / "pictures" / ("cats" if number % 2 else "dogs") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), (number, 0, 200)).save(path)
    paths = [path.relative_to(source).as_posix() for path in sorted((source / "pictures").rglob("*.png"))]
    shades = [int(Path(path).stem) for path in paths]
    return pd.DataFrame({"photo": paths, "shade": shades, "pet": [path.split("/")[1] for path in paths]})


def test_images_are_paths_beside_the_table(source):
    frame = pets(source)
    dataset, _ = table.guess(describe(write(frame, source / "own.csv"), target="pet"))
    assert (dataset.columns["photo"].kind, dataset.images) == ("image", ("pictures",))
    assert dataset.sources == (str(source / "own.csv"), str(source / "pictures"))
    prepared = prepare(source / "own.csv", target="pet", columns={"shade": "number"})
    photo = prepared.features["photo"]
    assert (photo.shape, photo.dtype, photo.columns[0].name) == ((4, 6, 3), "uint8", "photo")
    for split in prepared.splits:
        shades = array(prepared, "number", split)[:, 0]
        np.testing.assert_array_equal(array(prepared, "photo", split)[:, 0, 0], [(shade, 0, 200) for shade in shades])
    train = array(prepared, "photo").astype(float)
    assert photo.mean == pytest.approx(train.mean((0, 1, 2)))


def test_a_row_without_an_image_has_a_black_one_or_goes(source):
    frame = pets(source)
    frame.loc[::7, "photo"] = None
    path = write(frame, source / "own.csv")
    prepared = prepare(path, target="pet")
    black = [int((array(prepared, "photo", split).reshape(-1, 72) == 0).all(1).sum()) for split in prepared.splits]
    assert black == [split.num_missing.get("photo", 0) for split in prepared.splits.values()]
    assert sum(black) == 3
    dropped = prepare(path, target="pet", columns={"photo": {"kind": "image", "missing": "drop"}})
    assert sum(split.num_examples for split in dropped.splits.values()) == 17


def broken_pets(source):
    """30 of 60 rows name an image that cannot be used, for six reasons."""
    frame = pets(source, 60).sample(frac=1, random_state=0, ignore_index=True)
    outside = source.with_name("outside.png")
    Image.new("RGB", (6, 4)).save(outside)
    (source / "link.png").symlink_to(outside)
    (source / "beside.png").write_bytes(outside.read_bytes())
    wrong = ["../outside.png", str(outside), "link.png", "pictures", "gone.png", "gone too.png"]
    frame.loc[:5, "photo"] = wrong
    noise = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    for row in range(6, 30):
        place = source / frame["photo"][row]
        if row % 2:
            place.write_text("no image")
        else:  # Its first bytes are whole.
            Image.fromarray(noise).save(place)
            place.write_bytes(place.read_bytes()[:60])
    return write(frame, source / "own.csv")


def test_all_images_that_cannot_be_used_are_counted_and_twenty_are_named(source):
    message = message_of(broken_pets(source), target="pet", columns={"photo": "image"})
    assert "30 of its images cannot be used" in message
    for named in (
        "../outside.png (it leads out",
        "link.png (it leads out",
        "pictures (no such file)",
        "gone.png (no such file)",
    ):
        assert named in message
    assert message.count("(no image of png") >= 5
    assert message.count("(image file is truncated") >= 5
    assert " and 10 more. Fix or remove them" in message


def test_rows_whose_image_is_broken_can_be_left_out(source, capsys):
    path = broken_pets(source)
    prepared = prepare(path, target="pet", columns={"photo": "image", "shade": "number"}, on_broken="skip")
    assert sum(split.num_examples for split in prepared.splits.values()) == 30
    for split in prepared.splits:
        shades = array(prepared, "number", split)[:, 0]
        np.testing.assert_array_equal(array(prepared, "photo", split)[:, 0, 0, 0], shades)
        np.testing.assert_array_equal(labels(prepared, split), shades % 2 == 0)  # Cats are odd.
        assert prepared.splits[split].num_examples == len(labels(prepared, split))
    said = capsys.readouterr().err
    assert "left out because they are not whole images (18)" in said
    assert "left out because they are not whole images (12)" in said


def test_dvc_looks_at_the_images_of_a_table(source):
    dataset, _ = table.guess(describe(write(pets(source), source / "own.csv"), target="pet"))
    pipeline = dataset_folder.local_pipeline(dataset, source)
    assert f'      - "{source}/pictures"\n' in pipeline
    outside = dataset.model_copy(update={"images": ()})
    with pytest.raises(UserError, match=r"20 of its images cannot be used: .+not in dataset.images, which DVC tracks"):
        stage.prepare(outside)


SMALL = "x,word,y\n1,a,no\n2,b,yes\n3,a,no\n4,b,yes\n"


def frame_of(**columns):
    return pd.DataFrame({"x": np.arange(20) / 3, "y": ["a", "b"] * 10, **columns})


REFUSED = [
    ("", {}, "it is empty"),
    ("x,y\n", {}, "it has no rows"),
    (SMALL + "5,a\n6\n", {}, "2 of its rows do not have the 3 values of its header: line 6 has 2: '5,a'"),
    (SMALL + '5,"a\n6,b,no\n', {}, "line 6 opens a quote that no delimiter follows (unexpected end of data)"),
    (SMALL.replace("a", "é").encode("latin-1"), {}, "its text is not utf-8 (b'"),
    (SMALL.replace("word", "w\xf6rd").encode("latin-1"), {}, r"its text is not utf-8 (b'x,w\xf6rd,y\n1,"),
    (SMALL, {"encoding": "klingon"}, "dataset.encoding = 'klingon': no such encoding"),
    (SMALL.replace("word", "x"), {}, "1 of its columns has the name of another one: 'x'. Rename the columns"),
    (SMALL, {"target": "yy"}, "unknown column 'yy': did you mean 'y'? Allowed: word, x, y"),
    (
        SMALL,
        {"target": []},
        "dataset.target: a table needs the column that a model learns to predict. Use --target COLUMN",
    ),
    (SMALL, {"target": "y,z"}, "unknown column 'z'"),
    (SMALL, {"target": "y,y"}, "names a column twice"),
    (SMALL, {"target": "word,y"}, "the column 'word' has values that are not numbers"),
    (SMALL, {"group": "persn"}, "dataset.group: unknown column 'persn'"),
    (SMALL, {"time": "wrd"}, "dataset.time: unknown column 'wrd': did you mean 'word'"),
    (
        SMALL,
        {"time": "word"},
        "the column 'word' has the value 'a' in row 1, counted without the header, which is not a date or time",
    ),
    (SMALL, {"time": "x", "group": "word"}, "Set only one"),
    (SMALL, {"split_column": "word"}, "unknown split 'a'"),
    (SMALL, {"columns": {"wrod": "text"}}, "unknown column 'wrod': did you mean 'word'"),
    (SMALL, {"columns": {"y": "category"}}, "the column is dataset.target, from which a model must not learn"),
    (SMALL, {"metadata": {"wrod": "category"}}, "dataset.metadata: unknown column 'wrod': did you mean 'word'"),
    (SMALL, {"metadata": {"word": "text"}}, "dataset.metadata = {'word': 'text'}"),
    (
        SMALL,
        {"metadata": {"y": "category"}},
        "dataset.metadata.y: the column is dataset.target, so it already has",
    ),
    (
        SMALL,
        {"columns": {"word": "category"}, "metadata": {"word": "category"}},
        "dataset.metadata.word: the column is of kind category in dataset.columns, so it already has slices",
    ),
    (
        SMALL,
        {"metadata": {"word": "number"}},
        "the column 'word' has the value 'a' in row 1, counted without the header, which is not a num",
    ),
    (SMALL, {"columns": {"x": "ignore", "word": "ignore"}, "task": "classification"}, "leaves no column to learn from"),
    (
        SMALL,
        {"columns": {"word": "number"}},
        "counted without the header, which is not a number",
    ),
    (
        SMALL,
        {"columns": {"word": "datetime"}},
        "counted without the header, which is not a date or time of ISO 8601",
    ),
    (
        SMALL.replace("4,b,yes", "4,b,"),
        {},
        "dataset.target = 'y': no value in 1 of 4 rows. Counted without the header, they are 4. Fix them",
    ),
    (SMALL.replace("4,b,yes", "4,b,no"), {}, "the class 'yes' has too few examples (1)"),
    (SMALL.replace("yes", "no"), {}, "has only the value 'no': a classification needs two classes"),
    (re.sub("yes|no", "3.5", SMALL), {"task": "regression"}, "has only the value 3.5: nothing is left to learn"),
    (SMALL, {"group": "word", "validation": 0.1}, "has 2 values, but 3 splits need at least one each"),
    (SMALL, {"weight": "word"}, "has the value 'a' in row 1, counted without the header"),
    (SMALL.replace("3,a", "-3,a"), {"weight": "x"}, "dataset.weight = 'x': has a value below 0 in row 3"),
    (SMALL, {"test": 4}, "dataset.test = 4"),
    (SMALL, {"task": "multilabel"}, "set their separator, such as dataset.separator=';'"),
    (
        frame_of(a=[*range(19), "nothing"]),
        {},
        "in row 20, counted without the header",
    ),
    (frame_of(a=[*range(19), 1e39]), {}, "which does not fit in float32"),
    (frame_of(a=[*range(19), "inf"]), {}, "which does not fit in float32"),
    (frame_of(a=[""] * 20), {"columns": {"a": "text"}}, "no text of the training split has a word"),
    (
        frame_of().assign(x=[""] * 20),
        {},
        "no column is left to learn from. Their kinds: task classification",
    ),
    (
        frame_of().assign(x=["one"] * 20),
        {},
        "of y; ignore x (the same in all rows). Set the kind of one: --set dataset.col",
    ),
    (frame_of(a=[None] * 20), {"columns": {"a": "number"}}, "no row of the training split has a value"),
    (frame_of(a=[None] * 20), {"columns": {"a": "category"}}, "no row of the training split has a value"),
    (frame_of(w=[0] * 20), {"weight": "w"}, "all rows of the training split have the weight 0"),
    (
        frame_of(z=[1e39, *range(19)]),
        {"target": "z", "task": "regression"},
        "which does not fit in float32. Fix it, or set dataset.task=classification",
    ),
    (
        frame_of(part=["train", "test"] * 10, who=["a"] * 20),
        {"split_column": "part", "group": "who"},
        "1 of its values are in several splits of 'part', such as 'a'",
    ),
    (
        "x,y\n1,a\n2,b\n".encode("utf-16-le"),
        {},
        "seems to be UTF-16 without a byte order mark: --set dataset.encoding=utf-16-le",
    ),
    (frame_of(part=["test"] * 20), {"split_column": "part"}, "has test: it also needs rows to train on"),
    (frame_of(who=["a", None] * 10), {"group": "who"}, "dataset.group = 'who': no value in 10 of 20 rows"),
    (frame_of(a=[1] * 20), {"time": "a"}, "no rows older than the 4 newest are left to train on"),
    (
        frame_of(b=[0, 2] * 10, c=[0, 1] * 10),
        {"target": "b,c", "task": "multilabel"},
        "has 2 in row 2, but labels are 0",
    ),
]


@pytest.mark.parametrize(("content", "values", "message"), REFUSED)
def test_a_table_that_cannot_be_trained_on_is_refused(source, content, values, message):
    path = source / "own.csv"
    if isinstance(content, pd.DataFrame):
        write(content, path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in message_of(path, **{"target": "y", **values})


OTHERS = [
    ("own.jsonl", '{"x": 1, "y": "a"}\n{"x": 2\n', "line 2 is not JSON"),
    ("own.jsonl", '{"x": 1, "y": "a"}\n[1]\n', "line 2 is not a JSON object: [1]"),
    ("own.jsonl", "", "it is empty"),
    ("own.parquet", "no parquet", "cannot be read"),
    ("own.jsonl", '{"x": 1, "y": {"a": 1}}\n' * 9, "dataset.target = 'y': the column has nested values"),
    ("gone.csv", None, "no such file"),
]


@pytest.mark.parametrize(("name", "content", "message"), OTHERS)
def test_a_file_that_is_no_table_is_refused(source, name, content, message):
    if content is not None:
        (source / name).write_text(content)
    assert message in message_of(source / name, target="y")


def test_rows_without_a_target_can_be_left_out(source):
    path = source / "own.csv"
    path.write_text(SMALL * 1 + "5,a,\n6,b,NA\n")
    prepared = prepare(path, target="y", on_broken="skip")
    assert sum(part.num_examples for part in prepared.splits.values()) == 4
    assert prepared.target.class_names == ("no", "yes")

"""What others wrote, or a disk damaged: whatever it holds, the answer is what it means or one message."""

import csv
import io
import json
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import config
from tasks.data import dataset_folder, fitting, tables
from tasks.data.encoding.pictures import inside
from tasks.data.kinds import arrays, table
from tasks.operations import preconditions
from tasks.system.errors import UserError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
"""A link holds links."""


def message_of(error):
    """Return the text of an error, which must be one line that fits a terminal."""
    message = str(error)
    assert message
    assert len(message) <= 1500
    assert not {"\n", "\r", "\0", "\x1b"} & set(message), repr(message)
    message.encode()
    return message


# Tables.

SIGNS = ",;\t|\"'\n\r \0\ufeff\u2028\x85\x1b.-0123456789eEäß日\U0001f600NaTrue{}[]:\\#"
KNOWN = (
    "|NA|nan|inf|-0|1e400|1,5|1.234,5|2024-01-31|2024-01-31 18:30|9999-12-31T23:59:59Z|0001-01-01|a.png|../a.png|"
    f"/etc/passwd|{'x' * 300}|１|1_0|true|FALSE|007"
)
CELLS = st.text(SIGNS, max_size=6) | st.sampled_from(KNOWN.split("|"))
ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=8)
)


def described(path, **values):
    return config.describe({"kind": "table", "name": "own", "source": str(path), "target": "y", **values}, "test")


def prepared_of(path, **values):
    """Return what `data add` makes of a table: what is guessed, then each example."""
    dataset, lines = table.guess(described(path, **values))
    "\n".join(lines).encode()
    json.dumps(dataset.model_dump(mode="json"), allow_nan=False)
    found = table.examples(dataset)
    blocks = [
        (one.split, {name: array.tobytes() for name, array in one.features.items()}, one.labels.tobytes())
        for one in found.blocks()
    ]
    json.dumps(found.vocabularies, ensure_ascii=False).encode()
    return dataset, found.features, found.target, blocks


def works_or_is_refused(path, **values):
    try:
        first = prepared_of(path, **values)
    except UserError as error:
        message_of(error)
    else:
        assert prepared_of(path, **values) == first


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A project without anything in it: what is there can be read."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@settings(max_examples=30)
@given(rows=ROWS, delimiter=st.sampled_from(",;\t|"), ending=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_whatever_a_csv_file_holds_it_is_prepared_alike_or_refused(here, rows, delimiter, ending, mark):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=ending)
    names = [f"own {number}" for number in range(len(rows[0]) - 1)]
    writer.writerow([*names, "y"])
    writer.writerows(rows)
    (here / "own.csv").write_bytes(text.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    works_or_is_refused(here / "own.csv")


@settings(max_examples=40)
@given(content=st.text(SIGNS + "y", max_size=60).map(str.encode) | st.binary(max_size=40))
def test_whatever_bytes_are_called_a_table_they_are_prepared_alike_or_refused(here, content):
    for name in ("own.csv", "own.tsv", "own.jsonl"):
        (here / name).write_bytes(content)
        works_or_is_refused(here / name)


@settings(max_examples=40)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["x", "y", "ö", ""]) | st.text(max_size=3), JSON | CELLS), max_size=5)
)
def test_whatever_json_lines_hold_they_are_prepared_alike_or_refused(here, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (here / "own.jsonl").write_text(text, encoding="utf-8")
    works_or_is_refused(here / "own.jsonl")


VALUES = [
    pa.array([1, None, 2**63 - 1]),
    pa.array([2**64 - 1, 0, 1], pa.uint64()),
    pa.array([b"\xff\x00", None, b""]),
    pa.array([1.5, math.nan, math.inf]),
    pa.array([2**31 - 1, -(2**31), 0], pa.int32()).cast(pa.date32()),
    pa.array([253402300800, 0, None], pa.int64()).cast(pa.timestamp("s")),
    pa.array([2**62, 1, None], pa.int64()).cast(pa.timestamp("ns", tz="Pacific/Kiritimati")),
    pa.array([1, 2, None], pa.int64()).cast(pa.duration("ms")),
    pa.array([1, 2, 3], pa.int32()).cast(pa.time32("s")),
    pa.array([None, None, None]),
    pa.array([[1], None, [2, 3]]),
    pa.array([{"a": 1}, None, {"a": 2}]),
    pa.array(["a", None, "ä\0"]).dictionary_encode(),
    pa.array([True, None, False]),
    pa.array(["b", "b", "c"]),
    pa.array(["1.5", "2", None]).cast(pa.decimal128(20, 2)),
    pa.array(["x", "y", None], pa.large_string()),
    pa.array([0.5, None, 2], pa.float16()),
]


@settings(max_examples=40)
@given(columns=st.lists(st.sampled_from(VALUES), min_size=2, max_size=4))
def test_whatever_types_a_parquet_file_has_it_is_prepared_alike_or_refused(here, columns):
    names = [*(f"own {number}" for number in range(1, len(columns))), "y"]
    pa.parquet.write_table(pa.table([pa.concat_arrays([one] * 3) for one in columns], names), here / "own.parquet")
    works_or_is_refused(here / "own.parquet")


@settings(max_examples=30)
@given(rows=ROWS, delimiter=st.sampled_from(",;\t|"), mark=st.booleans(), at_once=st.booleans())
def test_the_values_of_a_csv_file_are_those_that_were_written(here, rows, delimiter, mark, at_once):
    names = [f"own {number}" for number in range(len(rows[0]))]
    with (here / "own.csv").open("w", encoding="utf-8-sig" if mark else "utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    described = {"kind": "table", "name": "own", "source": str(here / "own.csv"), "target": names[0]}
    file = tables.TableFile(config.describe({**described, "delimiter": delimiter}, "test"))
    wanted = dict.fromkeys(names, "text")
    chunks = list(file.chunks(wanted, wanted) if at_once else file.read(wanted, 10**9))
    found = zip(*([value for chunk in chunks for value in chunk[name]] for name in names), strict=True)
    assert file.names == names
    assert list(found) == [tuple(row) for row in rows]


# Archives and arrays.


def header(text):
    """Return a file of NumPy's with this header, and 64 bytes behind it."""
    padded = text.encode("latin-1", "replace")[:60_000] + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + bytes(64)


# Names and references.

PLACES = (
    "..|.||/|../digits|digits/../digits|/etc/passwd|~|~root|~nobody there|-x|--help|digits@|digits@HEAD|HEAD^{/|HEAD:|"
    ":/|@{-1}|latest|models:/|models:/a|models:/a@b|models:/a/1|models:/../1|models:/m-1|0001|x.keras|a\0.keras|"
    "~nobody there/x.keras|\x1b[2J|\udcff|é|e\u0301|digits\n|mlruns/runs/..|%2e%2e|C:\\x|con"
)
LONG = ["a" * 300, "a/" * 2000, "0" * 32, f"{'a' * 300}.keras", f"{'a' * 300}.csv"]
NAMES = st.text(max_size=12) | st.sampled_from(PLACES.split("|") + LONG)


@pytest.fixture(scope="module")
def module_project(project_template, tmp_path_factory):
    """A project, which is only read."""
    folder = tmp_path_factory.mktemp("any") / "project"
    shutil.copytree(project_template, folder, symlinks=True)
    return folder


@settings(max_examples=40)
@given(name=NAMES)
def test_no_name_leads_out_of_its_folder(module_project, monkeypatch, name):
    monkeypatch.chdir(module_project)
    word = fitting.feature_name(name, {})
    assert Path("data", word).parent == Path("data")
    assert word.isascii()
    try:
        assert Path("data", dataset_folder.check_name(name, asked=True)).resolve().parent == module_project / "data"
    except UserError as error:
        message_of(error)
    try:
        dataset = config.load(None, {"dataset.name": name}).dataset
        assert Path("data", dataset.name).resolve().parent == module_project / "data"
        for key in ("tracking.experiment", "register.model_name"):
            config.load(None, {key: name})
            assert Path("mlruns", name).resolve().parent == module_project / "mlruns"
    except UserError as error:
        message_of(error)
    try:
        assert inside(module_project, name).resolve().is_relative_to(module_project)
    except ValueError as error:
        reason = str(error)
        assert reason


# What these once ended with a traceback, by itself.


def test_an_array_that_promises_more_than_its_file_has_is_refused_before_memory_is_asked_for(here):
    (here / "own").mkdir()
    np.save(here / "own" / "y.npy", np.array([0, 1, 0, 1]))
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**18}, 2)}}"
    (here / "own" / "x.npy").write_bytes(header(text))
    with pytest.raises(UserError, match=r"cannot be read \("):
        arrays.examples(config.describe({"kind": "arrays", "name": "own", "source": str(here / "own")}, "test"))


@pytest.mark.parametrize("sign", ["?", "%", "[", "{", "}"])
def test_a_path_that_a_library_reads_otherwise_is_refused(here, monkeypatch, sign):
    place = here / f"a {sign} project"
    (place / ".dvc").mkdir(parents=True)
    (place / "params.yaml").touch()
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=f"has '\\{sign}' in its path"):
        preconditions.check_writable()

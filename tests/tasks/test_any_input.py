"""What others wrote, or a disk damaged: whatever it holds, the answer is what it means or one message."""

import csv
import io
import json
import math
import shutil
import struct
import zipfile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from tasks import config, records, runs
from tasks.data import dataset_folder, source_files, table_files
from tasks.data.encoding.pictures import inside
from tasks.data.kinds import _columns, arrays, image_folder, table
from tasks.operations import data_folders, model_use, preconditions, trace
from tasks.records import Record
from tasks.runs import lineage
from tasks.serving import raw_inputs
from tasks.system.errors import UserError
from tasks.tracking import trained_models
from tests.tasks.written_runs import write_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
PLAIN = {
    str: st.text(max_size=8),
    int: st.integers(-(2**70), 2**70),
    float: st.floats(),
    bool: st.booleans(),
    NoneType: st.none(),
    Any: JSON,
}
DEEPEST = 3
"""A link holds links."""


def made(kind, depth=0):
    """Return what makes any value of a type that records have."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Annotated:
        marks = [mark for one in inner[1:] for mark in (one.metadata if isinstance(one, FieldInfo) else [one])]
        patterns = [mark.pattern for mark in marks if getattr(mark, "pattern", None)]
        return st.from_regex(patterns[0]) if patterns else made(inner[0], depth)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of([made(one, depth) for one in inner])
    if origin is tuple and inner[1:] == (...,):
        return st.just(()) if depth > DEEPEST else st.lists(made(inner[0], depth + 1), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[made(one, depth) for one in inner])
    if origin is dict:
        return st.dictionaries(made(inner[0], depth), made(inner[1], depth), max_size=2)
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: made(hints[name], depth) for name in kind.model_fields})


def damage(content, data):
    """Return bytes that lack some, have others in their place, or more."""
    place = data.draw(st.integers(0, len(content)), "place")
    length = data.draw(st.sampled_from([0, 1, 4, len(content)]), "length")
    return content[:place] + data.draw(st.binary(max_size=4), "bytes") + content[place + length :]


def message_of(error):
    """Return the text of an error, which must be one line that fits a terminal."""
    message = str(error)
    assert message
    assert len(message) <= 1500
    assert not {"\n", "\r", "\0", "\x1b"} & set(message), repr(message)
    message.encode()
    return message


RECORDS = sorted(
    (one for one in vars(records).values() if isinstance(one, type) and issubclass(one, Record) and one is not Record),
    key=lambda one: one.__name__,
)


@settings(max_examples=50)
@given(kind=st.sampled_from(RECORDS), data=st.data())
def test_any_record_is_read_back_as_it_was(kind, data):
    record = data.draw(made(kind))
    text = record.model_dump_json()
    text.encode()
    again = kind.model_validate_json(text)
    assert again.model_dump_json() == text


RUN = records.Run(
    run_id="a" * 32,
    experiment="é",
    name="a run",
    folder=f"mlruns/runs/{'a' * 32}",
    settings={"train": {"epochs": 1}},
    lineage=records.Lineage(git_commit=None, git_dirty=None, code_digest="c", settings_digest="s", data_version=None),
)


@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_record_is_one_message_that_names_it(tmp_path, data):
    path = records.save(RUN, tmp_path / "run.json")
    path.write_bytes(damage(path.read_bytes(), data))
    try:
        again = records.load(records.Run, path)
    except UserError as error:
        message = message_of(error)
        assert str(path) in message
    else:
        assert records.Run.model_validate_json(again.model_dump_json()) == again


# Tables.

SIGNS = ",;\t|\"'\n\r \0\ufeff\u2028\x85\x1b.-0123456789eEäß日\U0001f600NaTrue{}[]:\\#"
CELLS = st.text(SIGNS, max_size=6) | st.sampled_from(
    [
        "",
        "NA",
        "nan",
        "inf",
        "-0",
        "1e400",
        "1,5",
        "1.234,5",
        "2024-01-31",
        "2024-01-31 18:30",
        "9999-12-31T23:59:59Z",
        "0001-01-01",
        "a.png",
        "../a.png",
        "/etc/passwd",
        "x" * 300,
        "１",
        "1_0",
        "true",
        "FALSE",
        "007",
    ]
)
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


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_parquet_file_is_prepared_alike_or_refused(here, data):
    content = io.BytesIO()
    pa.parquet.write_table(pa.table({"x": [1.5, 2.5, None] * 4, "y": ["a", "b", "a"] * 4}), content)
    (here / "own.parquet").write_bytes(damage(content.getvalue(), data))
    works_or_is_refused(here / "own.parquet")


@settings(max_examples=30)
@given(rows=ROWS, delimiter=st.sampled_from(",;\t|"), mark=st.booleans(), at_once=st.booleans())
def test_the_values_of_a_csv_file_are_those_that_were_written(here, rows, delimiter, mark, at_once):
    names = [f"own {number}" for number in range(len(rows[0]))]
    with (here / "own.csv").open("w", encoding="utf-8-sig" if mark else "utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    file = table_files.TableFile(here / "own.csv", "own.csv", delimiter)
    wanted = dict.fromkeys(names, "text")
    chunks = list(file.chunks(wanted) if at_once else file.first(wanted, 10**9))
    found = zip(*([value for chunk in chunks for value in chunk[name]] for name in names), strict=True)
    assert file.names == names
    assert list(found) == [tuple(row) for row in rows]


ENCODINGS = [
    "utf-8",
    "UTF-8",
    "latin-1",
    "utf-16",
    "utf-32",
    "cp1252",
    "ascii",
    "utf-7",
    "undefined",
    "idna",
    "punycode",
    "unicode_escape",
    "raw_unicode_escape",
    "rot13",
    "hex",
    "no such",
    "",
    "utf_8_sig",
    "shift_jis",
    "big5",
]


@settings(max_examples=30)
@given(
    delimiter=st.none() | st.characters(max_codepoint=0x1F600) | st.sampled_from('"\n\r \0,ä'),
    code=st.sampled_from(ENCODINGS) | st.text(max_size=8),
)
def test_whatever_a_table_is_said_to_be_it_is_prepared_alike_or_refused(here, delimiter, code):
    (here / "own.csv").write_bytes(b"x,y\n1,a\n2,b\n3,a\n4,b\n")
    try:
        described(here / "own.csv", delimiter=delimiter, encoding=code)
    except UserError as error:
        message_of(error)
    else:
        works_or_is_refused(here / "own.csv", delimiter=delimiter, encoding=code)


# Archives and arrays.


def npz(**values):
    content = io.BytesIO()
    np.savez_compressed(content, **values)
    return content.getvalue()


ARCHIVE = npz(x=np.arange(24, dtype=np.uint8).reshape(6, 2, 2), y=np.array([0, 1, 0, 1, 0, 1]))


def header(text):
    """Return a file of NumPy's with this header, and 64 bytes behind it."""
    padded = text.encode("latin-1", "replace")[:60_000] + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + bytes(64)


HEADERS = st.sampled_from(
    [
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({number}, 2)}}"
        for number in (4, 0, -4, 10**6, 10**18, 10**30, "None", "4.0", "'4'", "[4]")
    ]
    + [
        f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (4, 2)}}"
        for kind in ("|O", "<M8[D]", "|V8", "<c8", "<U2", "|S2", "|b1", "<f2", "x", "|S0", "<U0")
    ]
    + [
        "",
        "{",
        "(",
        "'",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,)}",
        "{'shape': ()}",
        "1" * 9999,
    ]
) | st.text("{}()[],:'\"\\ \n\t01descrshapefortran_orderTrueFalse<f4|", max_size=60)


def arrays_of(path):
    """Return all examples of a file or folder of arrays."""
    found = arrays.examples(config.describe({"kind": "arrays", "name": "own", "source": str(path)}, "test"))
    return [(one.split, one.labels.tobytes(), *(x.tobytes() for x in one.features.values())) for one in found.blocks()]


def read_or_refused(path):
    try:
        first = arrays_of(path)
    except UserError as error:
        message_of(error)
    else:
        assert arrays_of(path) == first


@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_archive_of_arrays_is_read_alike_or_refused(here, data):
    (here / "own.npz").write_bytes(damage(ARCHIVE, data))
    read_or_refused(here / "own.npz")


@settings(max_examples=30)
@given(text=HEADERS)
def test_an_array_with_any_header_is_read_alike_or_refused(here, text):
    (here / "own").mkdir(exist_ok=True)
    np.save(here / "own" / "y.npy", np.array([0, 1, 0, 1]))
    (here / "own" / "x.npy").write_bytes(header(text))
    read_or_refused(here / "own")
    with zipfile.ZipFile(here / "own.npz", "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.write(here / "own" / name, name)
    read_or_refused(here / "own.npz")


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_archive_of_what_is_to_be_predicted_is_read_or_refused(here, data):
    (here / "own.npz").write_bytes(damage(npz(x=np.zeros((3, 2), np.float32)), data))
    reader = raw_inputs.Reader(raw_inputs.Wanted({}, ("x",)), here, 2, "utf-8")
    try:
        assert sum(len(part.places) for part in reader.read(["own.npz"])) == 3
    except UserError as error:
        message_of(error)


# What describes a dataset.


# Names and references.

NAMES = st.text(max_size=12) | st.sampled_from(
    [
        "..",
        ".",
        "",
        "/",
        "../digits",
        "digits/../digits",
        "/etc/passwd",
        "~",
        "~root",
        "~nobody there",
        "-x",
        "--help",
        "a" * 300,
        "a/" * 2000,
        "digits@",
        "digits@HEAD",
        "HEAD^{/",
        "HEAD:",
        ":/",
        "@{-1}",
        "latest",
        "models:/",
        "models:/a",
        "models:/a@b",
        "models:/a/1",
        "models:/../1",
        "models:/m-1",
        "0" * 32,
        "0001",
        "x.keras",
        "a\0.keras",
        f"{'a' * 300}.keras",
        "~nobody there/x.keras",
        "a" * 300 + ".csv",
        "\x1b[2J",
        "\udcff",
        "é",
        "e\u0301",
        "digits\n",
        "mlruns/runs/..",
        "%2e%2e",
        "C:\\x",
        "con",
    ]
)


@pytest.fixture(scope="module")
def module_project(project_template, tmp_path_factory):
    """A project with a run, which is only read."""
    folder = tmp_path_factory.mktemp("any") / "project"
    shutil.copytree(project_template, folder, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_run(1)
    return folder


LOOKS = {
    "trace": trace.trace,
    "a run": runs.resolve,
    "a model": trained_models.find_trained_model,
    "a dataset": data_folders.show,
    "a difference": lambda name: data_folders.diff(name, "digits"),
    "a dataset's removal": data_folders.remove,
    "a source": source_files.kind_of,
    "a time": lambda name: runs.moment(name, "--since"),
    "what is predicted": lambda name: model_use.predict([name], "latest"),
    "where predictions go": lambda name: model_use.predict(["params.yaml"], "latest", Path(name)),
    "an encoding": lambda name: model_use.predict(["params.yaml"], "latest", encoding=name),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
@settings(max_examples=50)
@given(name=NAMES)
def test_any_name_means_something_or_is_refused(module_project, monkeypatch, look, name):
    monkeypatch.chdir(module_project)
    try:
        look(name)
    except UserError as error:
        message_of(error)


@settings(max_examples=40)
@given(name=NAMES)
def test_no_name_leads_out_of_its_folder(module_project, monkeypatch, name):
    monkeypatch.chdir(module_project)
    word = _columns.feature_name(name, {})
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


def test_a_description_that_goes_too_deep_is_refused(here):
    (here / "data" / "own").mkdir(parents=True)
    for name in ("params.yaml", "dvc.lock"):
        (here / "data" / "own" / name).write_text("dataset: " + "[" * 1000)
    with pytest.raises(UserError, match=r"data/own/params\.yaml is there already, and does not say what"):
        config.read_description(here / "data" / "own")
    with pytest.raises(UserError, match=r"data/own/dvc\.lock cannot be read"):
        lineage.data_version("own")


def test_an_array_that_promises_more_than_its_file_has_is_refused_before_memory_is_asked_for(here):
    (here / "own").mkdir()
    np.save(here / "own" / "y.npy", np.array([0, 1, 0, 1]))
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**18}, 2)}}"
    (here / "own" / "x.npy").write_bytes(header(text))
    with pytest.raises(UserError, match="the array 'x' ends too early"):
        arrays_of(here / "own")


def test_a_damaged_description_of_what_a_model_tells_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "target.json").write_text('{"task": "guess"}')
    with pytest.raises(UserError, match=r"target\.json is not a readable Target"):
        trained_models.of_folder(tmp_path, "own/1", {"keras_file_sha256": "0" * 64})


def test_a_class_has_one_name_however_its_letters_are_put_together(here):
    for split, name in (("train", "e\u0301t\u00e9"), ("test", "\u00e9te\u0301")):
        for other in (name, "b"):
            (here / "own" / split / other).mkdir(parents=True)
            (here / "own" / split / other / "a.png").touch()
    described = config.describe({"kind": "image_folder", "name": "own", "source": "own"}, "test")
    assert image_folder._scan(described).names == ("b", "\u00e9t\u00e9")


@pytest.mark.parametrize("sign", ["?", "%", "[", "{", "}"])
def test_a_path_that_a_library_reads_otherwise_is_refused(here, monkeypatch, sign):
    place = here / f"a {sign} project"
    (place / ".dvc").mkdir(parents=True)
    (place / "params.yaml").touch()
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=f"has '\\{sign}' in its path"):
        preconditions.check_writable()


def test_an_error_is_one_line_of_signs_that_can_be_read():
    assert str(UserError("a\x1b[2J\nb\udcff")) == r"a\x1b[2J\nb\udcff"

"""predict.py of an exported folder: what it takes, what it refuses in one message, and what is an error of one row."""

import base64
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.data.encoding import rows
from tasks.serving.formats import _predict


def column(name, kind, **values):
    return {"name": name, "kind": kind, "width": 1, "fill": None, **values}


FLATS = {
    "number": {
        "kind": "number", "shape": [2], "dtype": "float32",
        "columns": [column("rooms", "number", fill=3.0), column("floor", "number", fill=100.0)],
    },
    "town": {"kind": "category", "shape": [1], "dtype": "int32", "columns": [column("town", "category")]},
}  # fmt: skip
PHOTO = {"photo": {"kind": "image", "shape": [2, 2, 1], "dtype": "uint8", "columns": [column("photo", "image")]}}


def total(batch):
    """A model whose output is the sum of what it is given."""
    arrays = list(batch.values()) if isinstance(batch, dict) else [batch]
    return sum(np.asarray(one, np.float64).reshape(len(one), -1).sum(1, keepdims=True) for one in arrays)


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Return what makes a folder with predict.py: a function of what is asked to the exit code, lines and message."""
    folder = tmp_path / "exported"
    folder.mkdir()
    (tmp_path / "asked").mkdir()
    monkeypatch.chdir(tmp_path / "asked")
    monkeypatch.setattr(_predict, "load_model", lambda folder: total)
    monkeypatch.setattr(_predict, "__file__", str(folder / "predict.py"))

    def make(features=None, inputs=()):
        target = {"task": "regression", "num_outputs": 1, "class_names": [], "columns": ["sum"]}
        (folder / "target.json").write_text(json.dumps(target))
        takes = [{"name": name, "shape": [None, *shape], "dtype": dtype} for name, shape, dtype in inputs]
        (folder / "export.json").write_text(json.dumps({"inputs": takes}))
        if features:
            vocabularies = {name: [["Ulm"]] for name, one in features.items() if one["kind"] == "category"}
            (folder / "encoding.json").write_text(json.dumps({"features": features, "vocabularies": vocabularies}))

        def ask(*names):
            code = _predict.main(names)
            said = capsys.readouterr()
            assert said.err.count("\n") == (code == 2), said.err
            return code, [json.loads(line) for line in said.out.splitlines()], said.err

        return ask

    return make


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "rooms,town\n1,2,3\n1,Ulm\n", "is missing the column 'floor'. It has: 'rooms'"),
        ("a.csv", "rooms,town\n", "is missing the column 'floor'. It has: 'rooms', 'town'"),
        ("a.csv", "", "is missing the columns 'rooms', 'floor', 'town'. It has: nothing"),
        ("a.jsonl", '[1]\n{"rooms": 1, "town": "Ulm"}\n', "is missing the column 'floor'. It has: "),
        ("a.csv", "rooms,floor,town,town\n1,2,Ulm,Jena\n", "has the column 'town' more than once: leave one"),
    ],
)
def test_columns_that_are_missing_are_refused_whatever_the_first_row_is(program, file, content, message):
    Path(file).write_text(content)
    code, lines, said = program(FLATS)(file)
    assert (code, lines) == (2, [])
    assert said.startswith(f"error: '{file}' {message}")


def test_what_is_broken_in_a_table_is_the_error_of_its_row(program):
    deep = "[" * 100_000
    rows = [
        '{"rooms": 1}',
        '{"floor": 2, "town": "Ulm"}',
        '{"rooms": 1, "floor": 2, "town": ["Ulm"]}',
        "{",
        deep,
        "[1]",
    ]
    Path("a.jsonl").write_text("\n".join(rows))
    code, lines, _ = program(FLATS)("a.jsonl")
    assert code == 1
    assert [line["prediction"] for line in lines] == [101, 7, None, None, None, None]
    said = [None, None, "column 'town': has values in a value", "no JSON (", "no JSON (", "no JSON object: [1]"]
    for line, error in zip(lines, said, strict=True):
        assert (line["error"] or "").startswith(error or "")
        assert (line["error"] is None) is (error is None)


def test_a_value_beyond_what_csv_takes_is_the_error_of_its_row(program):
    Path("a.csv").write_text(f"rooms,floor,town\n1,2,Ulm\n{'1' * (2**26 + 1)},2,Ulm\n\n3,2,Ulm\n")
    code, lines, _ = program(FLATS)("a.csv")
    assert code == 1
    assert [line["prediction"] for line in lines] == [5, None, 7]
    assert lines[1]["error"] == f"no row of CSV (field larger than field limit ({2**26}))"


def test_the_delimiter_is_what_gives_most_of_the_columns_and_a_column_without_a_name_has_its_place(program):
    features = {"number": FLATS["number"] | {"columns": [column("column 1", "number"), column("floor", "number")]}}
    # More commas than semicolons, in a name that the model does not take.
    Path("a.csv").write_text(";floor;a,b,c,d,e\n1;2;x\n1;2\n")
    code, lines, _ = program(features)("a.csv")
    assert (code, [line["prediction"] for line in lines]) == (1, [3, None])
    assert lines[1]["error"] == "the row has 2 values, and the header 3"


def test_arrays_of_another_type_are_taken_where_it_holds_their_numbers(program):
    ask = program(inputs=[("pixels", [2], "uint8")])
    np.save("wide.npy", np.array([[1, 2], [0, 255]], np.int64))
    assert [line["prediction"] for line in ask("wide.npy")[1]] == [3, 255]
    wrong = {
        "beyond.npy": (np.array([[1, 256]]), "has numbers beyond uint8, which the model takes"),
        "below.npy": (np.array([[1, -1]], np.int8), "has numbers beyond uint8, which the model takes"),
        "float.npy": (np.array([[1.0, 2.0]]), "is float64 (1, 2), and the model takes uint8 (n, 2)"),
        "text.npy": (np.array([["1", "2"]]), "is <U1 (1, 2), and the model takes uint8 (n, 2)"),
    }
    for name, (array, why) in wrong.items():
        np.save(name, array)
        code, lines, said = ask(name)
        assert (code, lines) == (2, [])
        assert said == f"error: '{name}' cannot be read as arrays (.npy; .npz with 'pixels'): 'pixels' {why}\n"
    np.save("none.npy", np.zeros((0, 2), np.uint8))
    assert ask("none.npy") == (0, [], "")


def test_of_an_archive_the_arrays_that_the_model_takes_are_read_alone(program):
    ask = program(inputs=[("a", [2], "float32"), ("b", [], "int32")])
    wanted = {"a": np.ones((2, 2), np.float32), "b": np.array([10, 20])}
    np.savez("a.npz", **wanted, other=np.array([{}], object))  # Which NumPy would have to unpickle.
    assert [line["prediction"] for line in ask("a.npz")[1]] == [12, 22]
    np.savez("short.npz", **wanted | {"b": np.array([1])})
    assert ask("short.npz")[2] == "error: 'short.npz': its arrays have different lengths: 1, 2\n"
    np.savez("half.npz", a=wanted["a"], c=wanted["b"])
    assert ask("half.npz")[2].endswith("(.npy; .npz with 'a', 'b'): these arrays are missing: b\n")


def test_a_file_that_holds_no_arrays_is_one_message(program):
    ask = program(inputs=[("a", [2], "float32"), ("b", [2], "float32")])
    np.savez_compressed("a.npz", a=np.random.default_rng(0).normal(size=(99, 2)), b=np.zeros((99, 2)))
    whole = Path("a.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[:-30])
    with zipfile.ZipFile("a.npz") as archive:
        start = archive.infolist()[0].header_offset + 200
    Path("changed.npz").write_bytes(whole[:start] + bytes(50) + whole[start + 50 :])
    Path("empty.npy").touch()
    Path("a.csv").write_text("a,b\n1,2\n")
    for name in ("cut.npz", "changed.npz", "empty.npy", "a.csv"):
        code, lines, said = ask(name)
        assert (code, lines) == (2, [])
        assert said.startswith(f"error: '{name}' cannot be read as arrays (.npy; .npz with 'a', 'b'): ")
        assert "allow_pickle" not in said
    assert ask("-")[2] == (
        "error: '-': the model takes arrays, 'a', 'b', which cannot come by standard input: name a file\n"
    )


def saved(format, shade=9):
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, format)
    return file.getvalue()


def test_a_program_takes_more_formats_by_path_than_as_bytes(program):
    program(PHOTO)
    model = _predict.load(Path(_predict.__file__).parent)
    for format in ("PNG", "TIFF"):
        Path(f"a.{format}").write_bytes(saved(format))
    content = saved("PNG")
    given = [Path("a.PNG"), Path("a.TIFF"), content, base64.b64encode(content).decode()]
    assert model(given).tolist() == [[36]] * 4
    assert model({"photo": given}).tolist() == [[36]] * 4
    assert model(np.full((1, 2, 2, 1), 9)).tolist() == [[36]]
    for one in (saved("TIFF"), base64.b64encode(saved("TIFF")).decode()):
        with pytest.raises(ValueError, match="it is none of PNG, JPEG, BMP, GIF, WEBP"):
            model([one])
    with pytest.raises(ValueError, match="a text is base64 of an image here, and no path"):
        model(["a.PNG"])
    with pytest.raises(ValueError, match="give the values of each column by its name: photo"):
        model({"other": given})


@pytest.mark.filterwarnings("ignore:Image size")  # As in a program that does not make the warning an error.
def test_a_program_refuses_an_image_that_unpacks_to_too_much(program):
    program(PHOTO)
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"Image size \(100000000 pixels\) exceeds limit of 89478485 pixels"):
        _predict.load(Path(_predict.__file__).parent)([file.getvalue()])


@pytest.mark.parametrize(("shape", "expected"), [([2], 1024), ([512, 512, 4], 8), ([4096, 4096, 1], 1)])
def test_examples_are_computed_as_many_at_once_as_8_mib_hold(shape, expected):
    assert rows.part_size({"pixels": (tuple(shape), "uint8")}) == expected


def test_a_reader_that_wants_no_more_ends_it_quietly(program):
    program(FLATS)
    Path("a.csv").write_text("rooms,floor,town\n" + "1,2,Ulm\n" * 9)
    code = (
        "import sys; from tasks.serving.formats import _predict; _predict.__file__ = sys.argv[1]; "
        "_predict.load_model = lambda folder: lambda batch: batch['number'][:, :1]; "
        "sys.exit(_predict.main(['a.csv']))"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", code, _predict.__file__], stdout=closed, stderr=-1, check=False)
    assert (done.returncode, done.stderr) == (141, b"")

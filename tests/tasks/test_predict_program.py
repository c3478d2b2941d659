"""predict.py of an exported folder: what it takes, what it refuses in one message, and what is an error of one row."""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.data.encoding.answers import part_size
from tasks.data.encoding.program import Predictor, main


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

    def make(features=None, inputs=()):
        target = {"task": "regression", "num_outputs": 1, "class_names": [], "columns": ["sum"]}
        (folder / "target.json").write_text(json.dumps(target))
        takes = [{"name": name, "shape": [None, *shape], "dtype": dtype} for name, shape, dtype in inputs]
        (folder / "export.json").write_text(json.dumps({"inputs": takes}))
        if features:
            vocabularies = {name: [["Ulm"]] for name, one in features.items() if one["kind"] == "category"}
            (folder / "encoding.json").write_text(json.dumps({"features": features, "vocabularies": vocabularies}))

        def ask(*names):
            code = main(None, lambda: Predictor(folder, total), names)
            said = capsys.readouterr()
            assert said.err.count("\n") == (code == 2), said.err
            return code, [json.loads(line) for line in said.out.splitlines()], said.err

        ask.model = lambda: Predictor(folder, total)
        return ask

    return make


def test_what_is_broken_is_the_error_of_its_row_and_what_is_no_table_one_message(program):
    ask = program(FLATS)
    Path("a.csv").write_text("rooms;floor;town\n1;2;Ulm\n1;2\n;2;Ulm\n")
    code, lines, _ = ask("a.csv")
    assert (code, [line["prediction"] for line in lines]) == (1, [5, None, 7])
    assert [(line["source"], line["row"]) for line in lines] == [("a.csv", 1), ("a.csv", 2), ("a.csv", 3)]
    assert lines[1]["error"] == "the number of values is 2, but the header has 3"
    Path("b.csv").write_text("rooms,town\n1,Ulm\n")
    assert ask("b.csv") == (2, [], "error: 'b.csv' is missing the column 'floor'. It has: 'rooms', 'town'\n")


def test_a_table_has_the_encoding_of_the_training_unless_another_one_is_given(program):
    ask = program(FLATS)
    file = ask.model().folder / "encoding.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"csv": {"encodings": {"csv": "cp1252"}}}))
    Path("a.csv").write_text("rooms,floor,town\n1,2,Köln\n", "cp1252")
    assert [line["error"] for line in ask("a.csv")[1]] == [None]
    (line,) = ask("a.csv", "--encoding", "utf-8")[1]
    assert line["error"] == "is not utf-8: set its encoding, such as --encoding latin-1"


def test_arrays_of_another_type_are_taken_where_it_holds_their_numbers(program):
    ask = program(inputs=[("pixels", [2], "uint8")])
    np.save("wide.npy", np.array([[1, 2], [0, 255]], np.int64))
    assert [line["prediction"] for line in ask("wide.npy")[1]] == [3, 255]
    wrong = {
        "beyond.npy": (np.array([[1, 256]]), "has numbers outside uint8, which the model takes"),
        "below.npy": (np.array([[1, -1]], np.int8), "has numbers outside uint8, which the model takes"),
        "float.npy": (np.array([[1.0, 2.0]]), "is float64 (1, 2), but the model takes uint8 (n, 2)"),
        "text.npy": (np.array([["1", "2"]]), "is <U1 (1, 2), but the model takes uint8 (n, 2)"),
    }
    for name, (array, why) in wrong.items():
        np.save(name, array)
        code, lines, said = ask(name)
        assert (code, lines) == (2, [])
        assert said == f"error: '{name}': 'pixels' {why}\n"
    np.save("none.npy", np.zeros((0, 2), np.uint8))
    assert ask("none.npy") == (0, [], "")
    ask = program(inputs=[("pixels", [2, 2, 1], "uint8")])
    for shape in ((3, 2, 2), (3, 2, 2, 1)):  # As `data add` takes grey images.
        np.save("grey.npy", np.ones(shape, np.uint8))
        assert [line["prediction"] for line in ask("grey.npy")[1]] == [4, 4, 4]
    np.save("row.npy", np.ones((3, 2), np.uint8))
    assert "is uint8 (3, 2), but the model takes uint8 (n, 2, 2, 1)" in ask("row.npy")[2]


def test_arrays_come_by_name_from_files(program):
    ask = program(inputs=[("a", [2], "float32"), ("b", [], "int32")])
    np.savez("a.npz", a=np.ones((2, 2), np.float32), b=np.array([10, 20]))
    assert [line["prediction"] for line in ask("a.npz")[1]] == [12, 22]
    Path("cut.npz").write_bytes(Path("a.npz").read_bytes()[:-30])
    for name, said in {
        "cut.npz": "cannot be read (File is not a zip file), but this model takes arrays (.npy; .npz with a, b)",
        "-": "this model takes arrays (.npy; .npz with a, b), but not from standard input",
    }.items():
        code, lines, message = ask(name)
        assert (code, lines) == (2, [])
        assert said in message


def saved(format, shade=9):
    file = io.BytesIO()
    Image.new("L", (4, 4), shade).save(file, format)
    return file.getvalue()


def test_a_program_takes_more_formats_by_path_than_as_bytes(program):
    model = program(PHOTO).model()
    for format in ("PNG", "TIFF"):
        Path(f"a.{format}").write_bytes(saved(format))
    content = saved("PNG")
    given = [Path("a.PNG"), Path("a.TIFF"), content, base64.b64encode(content).decode()]
    assert model(given).tolist() == [[36]] * 4
    assert model({"photo": given}).tolist() == [[36]] * 4
    assert model(np.full((1, 2, 2, 1), 9)).tolist() == model(np.full((1, 2, 2), 9)).tolist() == [[36]]
    for one in (saved("TIFF"), base64.b64encode(saved("TIFF")).decode()):
        with pytest.raises(ValueError, match="allowed: PNG, JPEG, BMP, GIF, WEBP"):
            model([one])
    with pytest.raises(ValueError, match="a text must be an image as base64, not a path"):
        model(["a.PNG"])
    with pytest.raises(ValueError, match="these columns are missing: 'photo'"):
        model({"other": given})


@pytest.mark.filterwarnings("ignore:Image size")  # As in a program that does not make the warning an error.
def test_a_program_refuses_an_image_that_unpacks_to_too_much(program):
    model = program(PHOTO).model()
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"Image size \(100000000 pixels\) exceeds limit of 89478485 pixels"):
        model([file.getvalue()])


@pytest.mark.parametrize(("shape", "expected"), [([2], 1024), ([512, 512, 4], 8), ([4096, 4096, 1], 1)])
def test_examples_are_computed_as_many_at_once_as_8_mib_hold(shape, expected):
    assert part_size({"pixels": (tuple(shape), "uint8")}) == expected


def test_a_reader_that_wants_no_more_ends_it_quietly(program):
    folder = program(FLATS).model().folder
    Path("a.csv").write_text("rooms,floor,town\n" + "1,2,Ulm\n" * 9)
    code = (
        "import sys; from pathlib import Path; from tasks.data.encoding.program import Predictor, main; "
        "compute = lambda batch: batch['number'][:, :1]; "
        "sys.exit(main(None, lambda: Predictor(Path(sys.argv[1]), compute), ['a.csv']))"
    )
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", code, folder], stdout=closed, stderr=-1, check=False)
    assert (done.returncode, done.stderr) == (141, b"")

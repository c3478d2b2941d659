"""What a person names to be predicted: read in parts, with a reason in the place of what is broken."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest

from tasks.data.encoding.inputs import BadInput, Reader, Wanted

TABLE = Wanted({"size": "number", "city": "category"}, ("number", "category"))
LINES = Wanted({"note": "text"}, ("note",))
IMAGES = Wanted({"image": "image"}, ("image",))
ARRAYS = Wanted({}, ("left", "right"))


def read(wanted, *inputs, part_rows=3, encoding=None, stdin=None, **more):
    reader = Reader(wanted, Path.cwd(), part_rows, encoding, stdin, **more)
    reader.check(inputs)
    try:
        return list(reader.read(inputs))
    finally:
        if stdin is not None:
            stdin.close()


def flat(parts, column):
    return [value for part in parts for value in part.columns[column]]


def broken(parts):
    """Return the reasons by the place in all parts."""
    found, first = {}, 0
    for part in parts:
        found |= {first + place: reason for place, reason in part.broken.items()}
        first += len(part.places)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def piped(content):
    """Return the end of a pipe that gives this."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as file:
        file.write(content)
    return os.fdopen(read_end, "rb", 0)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_read_by_its_names_whatever_stands_between_them(delimiter):
    rows = [
        ["id", "city", "size"],
        ["1", "Köln", "3"],
        ["2", f'"a{delimiter}b\nc"', ""],
        ["3", "Ulm", "4"],
        ["4", "", "5"],
    ]
    Path("t.csv").write_text("\ufeff" + "\n".join(delimiter.join(row) for row in rows) + "\n\n", encoding="utf-8")
    parts = read(TABLE, "t.csv")
    assert [len(part.places) for part in parts] == [3, 1]
    assert flat(parts, "size") == ["3", "", "4", "5"]
    assert flat(parts, "city") == ["Köln", f"a{delimiter}b\nc", "Ulm", ""]
    assert [place for part in parts for place in part.places] == [("t.csv", row) for row in (1, 2, 3, 4)]
    assert broken(parts) == {}


def test_a_row_that_is_broken_breaks_itself_alone():
    content = "size,city\n1,a\n2\n3,b,c\n4,\xfcx\n5,e\n".encode("latin-1")
    Path("t.csv").write_bytes(content)
    parts = read(TABLE, "t.csv")
    assert broken(parts) == {
        1: "the number of values is 1, but the header has 2",
        2: "the number of values is 3, but the header has 2",
        3: "is not utf-8: set its encoding, such as --encoding latin-1",
    }
    assert [flat(parts, "size")[row] for row in (0, 4)] == ["1", "5"]
    assert flat(read(TABLE, "t.csv", encoding="latin-1"), "city")[3] == "üx"


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_table_of_columns_without_names_is_read_by_their_places(delimiter):
    wanted = Wanted({"column_1": "number", "column_3": "category"}, ("number", "category"))
    rows = [["1", "x", "a"], ["2", "y", "b"]]
    for head in ([], [["column_1", "column_2", "column_3"]]):
        Path("t.csv").write_text("".join(f"{delimiter.join(row)}\n" for row in [*head, *rows]))
        parts = read(wanted, "t.csv")
        assert (flat(parts, "column_1"), flat(parts, "column_3")) == (["1", "2"], ["a", "b"])
    Path("t.csv").write_text("1,x\n")
    with pytest.raises(BadInput, match="is missing the column 'column_3'"):
        read(wanted, "t.csv")


def test_json_lines_and_parquet():
    rows = [{"size": 1, "city": "a", "other": [1]}, {"city": "b"}, {"size": 2.5, "city": None}, {"size": {"a": 1}}]
    Path("t.jsonl").write_text(
        "\n".join(
            [*map(json.dumps, rows[:3]), "", "{", "[1]", json.dumps(rows[3]), "[" * 100_000, '{"city": "\\ud83d"}']
        )
    )
    parts = read(TABLE, "t.jsonl")
    assert flat(parts, "size")[:3] == [1, None, 2.5]
    assert list(broken(parts)) == [3, 4, 5, 6, 7]
    assert broken(parts)[4] == "not a JSON object: [1]"
    assert broken(parts)[7].startswith("not valid text: it has half of a character")
    assert broken(parts)[5] == "column 'size': contains a list or an object"
    Path("t.jsonl").write_text('{"size": 1}\n{"city": "b"}\n')
    assert flat(read(TABLE, "t.jsonl", part_rows=1), "city") == [None, "b"], "the first row may lack a column"
    pandas.DataFrame({"size": [1.5, None, 2.0, 7.0], "city": ["a", None, "b", "c"], "x": 1}).to_parquet("t.parquet")
    parts = read(TABLE, "t.parquet")
    assert [len(part.places) for part in parts] == [3, 1]
    np.testing.assert_array_equal(flat(parts, "size"), [1.5, np.nan, 2, 7])
    assert flat(parts, "city") == ["a", None, "b", "c"]
    pandas.DataFrame({"size": [1.0, 2.0], "city": ["a", "b"]}).set_index("city").iloc[[1, 0]].to_parquet("t.parquet")
    assert flat(read(TABLE, "t.parquet"), "city") == ["b", "a"], "an index that is stored is a column"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.csv", "size,town\n1,2,3\n1,Ulm\n", "is missing the column 'city'. It has: 'size', 'town'"),
        ("a.csv", "", "is missing the columns 'size', 'city'. It has: nothing"),
        ("a.jsonl", '[1]\n{"Size": 1, "city": "Ulm"}\n', "is missing the column 'size'. It has: 'Size', 'city'"),
        ("a.csv", "size,city,city\n2,Ulm,Jena\n", "has the column 'city' more than once: keep only one"),
        ("a.parquet", {"Size": [1.0], "city": ["a"]}, "is missing the column 'size'. It has: 'Size', 'city'"),
    ],
)
def test_columns_that_do_not_fit_are_one_message_whatever_the_first_row_is(file, content, message):
    if isinstance(content, dict):
        pandas.DataFrame(content).to_parquet(file)
    else:
        Path(file).write_text(content)
    with pytest.raises(BadInput, match=re.escape(f"'{file}' {message}")):
        read(TABLE, file)


def test_the_delimiter_is_what_gives_most_of_the_columns_and_a_column_without_a_name_has_its_place():
    # More commas than semicolons, in a name that the model does not take.
    Path("a.csv").write_text(";city;a,b,c,d,e\n1;Ulm;x\n")
    parts = read(Wanted({"column 1": "number", "city": "category"}, ()), "a.csv")
    assert (flat(parts, "column 1"), flat(parts, "city")) == (["1"], ["Ulm"])


def test_lines_of_text():
    Path("t.txt").write_bytes(b"one line\r\n\n\xff\nthe last")
    parts = read(LINES, "t.txt")
    assert [flat(parts, "note")[row] for row in (0, 1, 3)] == ["one line", "", "the last"]
    assert list(broken(parts)) == [2]


def test_each_file_of_a_folder_is_a_text():
    for path, content in {
        "d/b.txt": "\ufeffzwei\nZeilen".encode(),
        "d/a": b"eins",
        "d/.hidden": b"",
        "d/sub/c.txt": b"drei",
        "d/latin.txt": "f\xfcnf".encode("latin-1"),
        "d/full.txt": b"y",
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    os.mkfifo("d/pipe")
    Path("d/gone").symlink_to("nowhere")
    parts = read(LINES, "d", "d/a")
    places = [[file for file, row in part.places] for part in parts]
    assert places == [
        ["d/a", "d/b.txt", "d/full.txt"],
        ["d/gone", "d/latin.txt", "d/pipe"],
        ["d/sub/c.txt"],
        ["d/a"],
    ]
    assert {row for part in parts[:3] for _, row in part.places} == {None}
    texts = flat(parts, "note")
    assert [texts[place] for place in (0, 1, 6, 7)] == ["eins", "zwei\nZeilen", "drei", "eins"]
    assert broken(parts) == {
        3: "no such file",
        4: "is not utf-8: set its encoding, such as --encoding latin-1",
        5: "no such file",
    }
    assert flat(read(LINES, "d", encoding="latin-1"), "note")[4] == "f\xfcnf"


def test_a_table_in_a_folder_of_texts_is_no_text():
    Path("mix").mkdir()
    for name in ("a.txt", "b.csv", "c.npz", "d.PNG"):
        Path("mix", name).write_bytes(b"one")
    parts = read(LINES, "mix", part_rows=9)
    assert [file for file, _ in parts[0].places] == ["mix/a.txt", "mix/b.csv", "mix/c.npz", "mix/d.PNG"]
    assert flat(parts, "note") == ["one", None, None, None]
    assert broken(parts) == {
        1: "a .csv file is not text",
        2: "a .npz file is not text",
        3: "a .png file is not text",
    }


def test_standard_input_is_what_it_looks_like():
    assert flat(read(LINES, "-", stdin=piped(b"a\nb")), "note") == ["a", "b"]
    assert flat(read(TABLE, "-", stdin=piped(b"city;size\na;1\n")), "size") == ["1"]
    assert flat(read(TABLE, "-", stdin=piped(b'\n{"city": "a", "size": 2}\n')), "size") == [2]
    for encoding in ("utf-8-sig", "utf-16"):  # As PowerShell writes them.
        assert flat(read(TABLE, "-", stdin=piped('{"city": "ä", "size": 2}\n'.encode(encoding))), "city") == ["ä"]
    names = flat(read(IMAGES, "-", stdin=piped(b"NA\nb c.png\n")), "image")
    assert names == [str(Path("NA").absolute()), str(Path("b c.png").absolute())]
    picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100_000)
    assert flat(read(IMAGES, "-", stdin=piped(picture[:60_000])), "image") == [picture[:60_000]]
    assert read(TABLE, "-", stdin=piped(b"city,size\n")) == []
    with pytest.raises(BadInput, match=r"'-' is missing the columns 'size', 'city'.*It has: nothing"):
        read(TABLE, "-", stdin=piped(b""))


def test_files_of_images_lie_in_folders_too_and_are_read_in_their_order():
    by_products = ("@eaDir/2.png/M.jpg", "__MACOSX/._2.png", ".hidden/3.png", "Thumbs.db", "desktop.ini", "a/._1.png")
    for path in ("b/2.png", "b/a/1.png", *(f"b/{name}" for name in by_products), "NA"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"")
    parts = read(IMAGES, "NA", "b", "b/2.png", part_rows=2)
    assert [[place for place, row in part.places] for part in parts] == [["NA", "b/2.png"], ["b/a/1.png", "b/2.png"]]
    assert flat(parts, "image")[0] == str(Path("NA").absolute()), "a value NA would be a missing one"


def test_arrays_are_read_by_name():
    left, right = np.arange(10).reshape(5, 2), np.ones((5, 1), np.float32)
    np.savez("t.npz", left=np.asfortranarray(left), right=right, other=np.array([{}], object))
    parts = read(ARRAYS, "t.npz")
    assert all(part.prepared for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.columns["left"] for part in parts]), left)
    np.save("t.npy", left)
    np.savez("short.npz", left=left, right=right[:2])
    np.savez("half.npz", left=left, other=right)
    np.savez("xy.npz", x=left, y=right)
    Path("empty.npy").touch()
    whole = Path("t.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[:-30])
    np.savez_compressed("z.npz", left=np.random.default_rng(0).normal(size=(99, 2)), right=right)
    whole = Path("z.npz").read_bytes()
    Path("changed.npz").write_bytes(whole[:300] + bytes(50) + whole[350:])
    np.save("objects.npy", np.array([{}], object))
    for name, message in {
        "xy.npz": "these arrays are missing: left, right",
        "t.npy": "these arrays are missing: left, right",
        "short.npz": "its arrays have different lengths: 2, 5",
        "half.npz": "these arrays are missing: right",
        **dict.fromkeys(("objects.npy", "empty.npy", "cut.npz", "changed.npz"), "cannot be read"),
        "t.csv": "this model takes arrays",
    }.items():
        with pytest.raises(BadInput, match=message):
            read(ARRAYS, name)


@pytest.mark.parametrize("name", ["pixels", "x", "X"])
def test_the_only_array_of_a_model_may_be_called_x_as_in_the_data_it_was_trained_on(name):
    np.savez("t.npz", **{name: np.arange(10).reshape(5, 2)}, y=np.arange(5), other=np.array([{}], object))
    assert np.concatenate([part.columns["pixels"] for part in read(Wanted({}, ("pixels",)), "t.npz")]).shape == (5, 2)
    np.savez("t.npz", x_train=np.arange(10), y_train=np.arange(10))
    with pytest.raises(BadInput, match="these arrays are missing: pixels or x"):
        read(Wanted({}, ("pixels",)), "t.npz")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_the_encoding_of_utf_16_without_a_mark_is_named(encoding):
    Path("t.csv").write_text("city,size\nUlm,3\n", encoding)
    with pytest.raises(BadInput, match=f"seems to be UTF-16 without a byte order mark: --encoding {encoding}$"):
        read(TABLE, "t.csv")
    assert flat(read(TABLE, "t.csv", encoding=encoding), "city") == ["Ulm"]


def test_a_file_has_the_encoding_of_the_model_unless_its_mark_or_the_user_says_another():
    wanted = Wanted({"größe": "number", "city": "category"}, ("number", "category"), encodings={"csv": "cp1252"})
    text = "größe,city\n3,Köln\n"
    for encoding in ("cp1252", "utf-8-sig", "utf-16"):
        Path("t.csv").write_text(text, encoding)
        assert flat(read(wanted, "t.csv"), "city") == ["Köln"]
    Path("t.csv").write_text(text)
    assert flat(read(wanted, "t.csv", encoding="utf-8"), "city") == ["Köln"]
    with pytest.raises(BadInput, match=r"Its text is read as cp1252: if it is not, set --encoding, such as utf-8$"):
        read(wanted, "t.csv")
    Path("t.csv").write_text(text, "cp1252")
    with pytest.raises(BadInput, match=r"Its text is read as utf-8: if it is not, set --encoding, such as cp1252$"):
        read(wanted, "t.csv", encoding="utf-8")
    Path("t.jsonl").write_text('{"größe": 3, "city": "Köln"}\n')
    assert flat(read(wanted, "t.jsonl"), "city") == ["Köln"], "the model's table was CSV, and JSON is UTF-8"
    Path("t.csv").write_text("größe,city\n3,Köln\n4\n", "utf-16-le")
    wanted = replace(wanted, encodings={"csv": "utf-16-le"})
    assert flat(read(wanted, "t.csv"), "city")[:1] == ["Köln"]
    Path("t.csv").write_text("size,city\n3,ab\n")
    with pytest.raises(BadInput, match=r"cannot be read .*utf-16.* Set its encoding, such as --encoding utf-8$"):
        read(wanted, "t.csv")


def test_a_text_of_a_folder_may_have_utf_16():
    Path("d").mkdir()
    Path("d", "a.txt").write_text("größer", "utf-16")
    Path("d", "b.txt").write_text("größer", "utf-8-sig")
    assert flat(read(LINES, "d"), "note") == ["größer", "größer"]


def test_what_the_model_does_not_take_is_refused_before_it_is_opened():
    Path("d").mkdir()
    with pytest.raises(BadInput, match=r"'d' is a folder, but this model takes tables .* 'size' \(number\), 'city'"):
        read(TABLE, "d")
    with pytest.raises(BadInput, match=r"'d' is a folder, but this model takes arrays"):
        read(ARRAYS, "d")
    with pytest.raises(BadInput, match=r"'x\.png': this model takes tables"):
        read(TABLE, "x.png")
    Path("no.parquet").write_text("none")
    with pytest.raises(BadInput, match=r"'no\.parquet' cannot be read"):
        read(TABLE, "no.parquet")

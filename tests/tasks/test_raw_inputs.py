"""What a person names to be predicted: read in parts, with a reason in the place of what is broken."""

import csv
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest

from tasks.serving.raw_inputs import MAX_TEXT, Reader, Wanted
from tasks.system.errors import UserError

TABLE = Wanted({"size": "number", "city": "category"}, ("number", "category"))
LINES = Wanted({"note": "text"}, ("note",))
IMAGES = Wanted({"image": "image"}, ("image",))
ARRAYS = Wanted({}, ("left", "right"))


def read(wanted, *inputs, part_rows=3, encoding="utf-8", stdin=None, **more):
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
        1: "the row has 1 values, and the header 2",
        2: "the row has 3 values, and the header 2",
        3: "is not utf-8: say what it is with --encoding, such as latin-1",
    }
    assert [flat(parts, "size")[row] for row in (0, 4)] == ["1", "5"]
    assert flat(read(TABLE, "t.csv", encoding="latin-1"), "city")[3] == "üx"


def test_json_lines_and_parquet():
    rows = [{"size": 1, "city": "a", "other": [1]}, {"city": "b"}, {"size": 2.5, "city": None}, {"size": {"a": 1}}]
    Path("t.jsonl").write_text("\n".join([*map(json.dumps, rows[:3]), "", "{", "[1]", json.dumps(rows[3])]))
    parts = read(TABLE, "t.jsonl")
    assert flat(parts, "size")[:3] == [1, None, 2.5]
    assert list(broken(parts)) == [3, 4, 5]
    assert broken(parts)[4] == "no JSON object: [1]"
    assert broken(parts)[5] == "column 'size': has values in a value"
    pandas.DataFrame({"size": [1.5, None, 2.0, 7.0], "city": ["a", None, "b", "c"], "x": 1}).to_parquet("t.parquet")
    parts = read(TABLE, "t.parquet")
    assert [len(part.places) for part in parts] == [3, 1]
    np.testing.assert_array_equal(flat(parts, "size"), [1.5, np.nan, 2, 7])
    assert flat(parts, "city") == ["a", None, "b", "c"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_column_that_is_not_there_is_one_message(suffix):
    table = pandas.DataFrame({"Size": [1.0], "city": ["a"]})
    {"csv": table.to_csv, "parquet": table.to_parquet}.get(
        suffix, lambda path: table.to_json(path, orient="records", lines=True)
    )(f"t.{suffix}")
    with pytest.raises(UserError, match=r"'t\.\w+' is missing the column 'size'\. It has: .*'Size'"):
        read(TABLE, f"t.{suffix}")


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
        "d/large.txt": b"x" * (MAX_TEXT + 1),
        "d/full.txt": b"y" * MAX_TEXT,
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    os.mkfifo("d/pipe")
    Path("d/gone").symlink_to("nowhere")
    parts = read(LINES, "d", "d/a")
    places = [[file for file, row in part.places] for part in parts]
    assert places == [
        ["d/a", "d/b.txt", "d/full.txt"],
        ["d/gone", "d/large.txt", "d/latin.txt"],
        ["d/pipe", "d/sub/c.txt"],
        ["d/a"],
    ]
    assert {row for part in parts[:3] for _, row in part.places} == {None}
    texts = flat(parts, "note")
    assert [texts[place] for place in (0, 1, 7, 8)] == ["eins", "zwei\nZeilen", "drei", "eins"]
    assert broken(parts) == {
        3: "no such file",
        4: "has more than 16,777,216 bytes: cut it, or name it by itself, as a file of lines",
        5: "is not utf-8: say what it is with --encoding, such as latin-1",
        6: "no such file",
    }
    assert flat(read(LINES, "d", encoding="latin-1"), "note")[5] == "f\xfcnf"


def test_a_part_of_texts_is_no_larger_than_two_of_them():
    Path("d").mkdir()
    third = MAX_TEXT * 2 // 5
    for number, length in enumerate((third, third, third, MAX_TEXT, 1)):
        Path(f"d/{number}").write_bytes(b"x" * length)
    parts = read(LINES, "d", part_rows=100)
    assert [[len(text) for text in part.columns["note"]] for part in parts] == [[third] * 3, [MAX_TEXT], [1]]


@pytest.mark.parametrize(
    ("wanted", "names", "said"),
    [
        (
            LINES,
            ("a.png", "b.TIFF"),
            r"'d' has nothing but \.png, \.tiff, and this model takes files of lines of text, ",
        ),
        (LINES, ("a.csv",), r"'d' has nothing but \.csv, .* folders of texts, tables .* each table by itself"),
        (
            IMAGES,
            ("a.txt", "b/c.md"),
            r"'d' has nothing but \.md, \.txt, and this model takes images, folders of images, ",
        ),
        (TABLE, ("a.csv",), r"'d' is a folder, and this model takes tables"),
        (ARRAYS, ("a.npy",), r"'d' is a folder, and this model takes arrays"),
    ],
)
def test_a_folder_that_does_not_fit_the_model_is_one_message(wanted, names, said):
    for name in names:
        Path("d", name).parent.mkdir(parents=True, exist_ok=True)
        Path("d", name).write_bytes(b"")
    with pytest.raises(UserError, match=said):
        read(wanted, "d")
    if wanted in (LINES, IMAGES):
        Path("d/one more").write_bytes(b"")
        assert len(read(wanted, "d", part_rows=9)[0].places) == len(names) + 1, "which is broken has its row"


def test_what_a_folder_is_called_says_nothing_of_it():
    for name in ("photos.csv", "x.npy"):
        Path(name).mkdir()
        Path(name, "1.png").write_bytes(b"")
        Path(name, "notes").write_text("/etc/hostname")
        paths = flat(read(IMAGES, name), "image")
        assert paths == [str(Path(name, file).absolute()) for file in ("1.png", "notes")]
        assert flat(read(LINES, name), "note") == ["", "/etc/hostname"]


def test_a_table_in_a_folder_of_texts_is_no_text():
    Path("mix").mkdir()
    for name in ("a.txt", "b.csv", "c.npz", "d.PNG"):
        Path("mix", name).write_bytes(b"one")
    parts = read(LINES, "mix", part_rows=9)
    assert [file for file, _ in parts[0].places] == ["mix/a.txt", "mix/b.csv", "mix/c.npz", "mix/d.PNG"]
    assert flat(parts, "note") == ["one", "", "", ""]
    assert broken(parts) == {
        1: "a .csv is not text: name it by itself, or call it .txt",
        2: "a .npz is not text: name it by itself, or call it .txt",
        3: "a .png is not text",
    }


def test_standard_input_is_what_it_looks_like():
    assert flat(read(LINES, "-", stdin=piped(b"a\nb")), "note") == ["a", "b"]
    assert flat(read(TABLE, "-", stdin=piped(b"city;size\na;1\n")), "size") == ["1"]
    assert flat(read(TABLE, "-", stdin=piped(b'\n{"city": "a", "size": 2}\n')), "size") == [2]
    names = flat(read(IMAGES, "-", stdin=piped(b"NA\nb c.png\n")), "image")
    assert names == [str(Path("NA").absolute()), str(Path("b c.png").absolute())]
    picture = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(100_000)
    assert flat(read(IMAGES, "-", stdin=piped(picture[:60_000])), "image") == [picture[:60_000]]
    for picture in (
        b"P6\n2 1\n255\nabcdef", b"P5\n# a note\n1 1\n255\na", b"P6 2 1 255\nabcdef", b"P5\r\n1 1\r\n255\r\na",
        b"P4 8 1\na", b"P2\n#" + b"x" * 1000 + b"\n\n1\t1 # wide, high\n7 7\n",
    ):  # fmt: skip
        assert flat(read(IMAGES, "-", stdin=piped(picture)), "image") == [picture]
    for names in (b"P6\nb.png\n", b"P6\n1.png\n", b"P6\n#1.png\n2.png\n", b"P6 2.png\n"):
        assert len(flat(read(IMAGES, "-", stdin=piped(names)), "image")) == names.count(b"\n")
    assert read(TABLE, "-", stdin=piped(b"city,size\n")) == []
    with pytest.raises(UserError, match=r"'-' is missing the columns 'size', 'city'.*It has: nothing"):
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
    np.savez("t.npz", left=left, right=right, other=1)
    parts = read(ARRAYS, "t.npz")
    assert all(part.prepared for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.columns["left"] for part in parts]), left)
    np.save("t.npy", left)
    np.savez("short.npz", left=left, right=right[:2])
    np.save("objects.npy", np.array([{}], object))
    for name, message in {
        "t.npy": "is one array, and the model takes left, right: give an .npz of them",
        "short.npz": "its arrays have different lengths: 2, 5",
        "objects.npy": "cannot be read as arrays",
        "t.csv": "this model takes arrays",
    }.items():
        with pytest.raises(UserError, match=message):
            read(ARRAYS, name)


def test_an_archive_that_is_larger_than_the_memory_is_refused():
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("left", "right"):
            info = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (2**50,)}
                )
            info.file_size = 2**50
    with pytest.raises(UserError, match=r"'bomb\.npz' unpacks to 2,251,799,813,685,248 bytes, and [\d,]+ of the"):
        read(ARRAYS, "bomb.npz")


def test_what_the_model_does_not_take_is_refused_before_it_is_opened():
    Path("d").mkdir()
    with pytest.raises(UserError, match=r"'d' is a folder, and this model takes tables .* 'size' \(number\), 'city'"):
        read(TABLE, "d")
    with pytest.raises(UserError, match=r"'x\.png': this model takes tables"):
        read(TABLE, "x.png")
    Path("no.parquet").write_text("none")
    with pytest.raises(UserError, match=r"'no\.parquet' cannot be read"):
        read(TABLE, "no.parquet")


def test_a_quote_that_nothing_closes_does_not_fill_the_memory():
    Path("t.csv").write_text('size,city\n1,"' + "x\n" * 200 + "3,a\n")
    before = csv.field_size_limit()
    try:
        found = broken(read(TABLE, "t.csv", max_field=100))
        assert "no row of CSV (field larger than field limit (100))" in found.values()
    finally:
        csv.field_size_limit(before)

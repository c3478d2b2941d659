"""Raw values become arrays, in `prepare` and in a served model alike."""

import ast
import base64
import io
import sys
from datetime import UTC, date, datetime, time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tasks.data import encoding
from tasks.data.encoding import Encoder, cells
from tasks.data.encoding.cells import BadValue
from tasks.data.encoding.pictures import FORMATS


def numbers(*columns):
    width = sum(column.get("width", 1) for column in columns)
    columns = [{"kind": "number", "width": 1, "fill": None, **column} for column in columns]
    return {"number": {"kind": "number", "shape": (width,), "columns": columns}}


def places(kind, shape, *names):
    columns = [{"name": name, "kind": kind, "width": 1, "fill": None} for name in names]
    return {kind: {"kind": kind, "shape": shape, "columns": columns}}


def test_it_needs_the_standard_library_numpy_pandas_and_pillow_alone():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(encoding.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    outside = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    # PyArrow is what pandas reads Parquet with, and pi-heif reads the photographs of telephones.
    assert outside == {"numpy", "pandas", "pyarrow", "PIL", "pi_heif"}
    first = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {getattr(node, "module", None) or node.names[0].name for node in first}
    assert not named & {"pandas", "PIL", "pi_heif"}, "only for datetimes and pictures"


def test_numbers_are_read_of_numbers_and_of_text():
    encoder = Encoder(numbers({"name": "a", "fill": 7.5}, {"name": "b"}), {})
    found = encoder.encode({"a": ["1.5", None, " -2e3 ", 4, "NA", True], "b": np.arange(6)})
    assert found["number"].dtype == np.float32
    np.testing.assert_array_equal(found["number"], [[1.5, 0], [7.5, 1], [-2000, 2], [4, 3], [7.5, 4], [1, 5]])


@pytest.mark.parametrize(
    ("values", "row", "reason"),
    [
        (["1", "two"], 1, "is not a number"),
        (["1_000"], 0, "is not a number"),
        ([1.0, "inf"], 1, "does not fit in float32"),
        (np.array([1e39]), 0, "does not fit in float32"),
        ([10**400], 0, "is not a number"),
        ([1, None], 1, "is missing"),
        ([[1]], 0, "is not a number"),
        (pd.Categorical(["1", "1", "x"]), 2, "is not a number"),
    ],
)
def test_what_is_no_number_is_named(values, row, reason):
    with pytest.raises(BadValue, match=reason) as caught:
        Encoder(numbers({"name": "a"}), {}).encode({"a": values})
    assert (caught.value.column, caught.value.row) == ("a", row)


def test_categories_have_places_and_unknown_ones_the_place_1():
    encoder = Encoder(places("category", (2,), "city", "size"), {"category": [["Ulm", "Bonn"], ["3", "2", "true"]]})
    found = encoder.encode({"city": ["Bonn", "Paris", None, "Ulm", "", ""], "size": [3, 3.0, 2, "3", True, "TRUE"]})
    assert found["category"].tolist() == [[3, 2], [1, 2], [0, 3], [2, 2], [0, 4], [0, 4]]
    assert found["category"].dtype == np.int32
    repeated = {"city": pd.Categorical(["Rome", "Ulm", None]), "size": np.array([3.0, np.nan, 9])}
    assert encoder.encode(repeated)["category"].tolist() == [[1, 2], [2, 0], [0, 1]]


def test_texts_are_the_places_of_their_words():
    encoder = Encoder(places("text", (4,), "note"), {"text": [["good", "!", "über"]]})
    found = encoder.encode({"note": ["Good, good!", "ÜBER", None, "", "a b c d e f", "good"]})
    assert found["text"].tolist() == [[2, 1, 2, 3], [4, 0, 0, 0], [0] * 4, [0] * 4, [1] * 4, [2, 0, 0, 0]]
    words, lengths = cells.words_of(["It's 3.5°!", None, "a\0b"])
    assert (words, lengths.tolist()) == (["it", "'", "s", "3", ".", "5", "°", "!", "a", "b"], [8, 0, 2])


def datetimes(values, fill=None):
    column = {"name": "when", "kind": "datetime", "width": cells.DATETIME_WIDTH, "fill": fill}
    return Encoder(numbers(column), {}).encode({"when": values})["number"]


def test_datetimes_are_days_and_the_times_of_year_week_and_day():
    found = datetimes(["1970-01-01", "2024-07-01T12:00:00", "2024-07-01T18:00:00Z"])
    # Thursday at midnight, on New Year.
    np.testing.assert_allclose(found[0], [0, 0, 1, np.sin(6 * np.pi / 7), np.cos(6 * np.pi / 7), 0, 1], atol=1e-6)
    day = (datetime(2024, 7, 1, 12, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / 86400
    assert found[1, 0] == np.float32(day)
    np.testing.assert_allclose(found[1, 1:3], [np.sin(np.pi * 365 / 366), np.cos(np.pi * 365 / 366)], atol=1e-6)
    np.testing.assert_allclose(found[1:, 5:], [[0, -1], [-1, 0]], atol=1e-6)
    assert np.abs(datetimes([f"{year}-12-31T23:59:59" for year in (1900, 2023, 2024)])[:, 1:]).max() <= 1


def test_a_datetime_is_the_same_however_it_is_given():
    forms: list = ["2024-02-29 10:30:00", "2024-02-29T11:30:00+01:00", datetime.fromisoformat("2024-02-29 10:30")]
    forms += [datetime(2024, 2, 29, 10, 30, tzinfo=UTC), np.datetime64("2024-02-29T10:30")]
    found = np.concatenate([datetimes(forms), datetimes(np.array(["2024-02-29T10:30"], "datetime64[ns]"))])
    assert (found == found[0]).all()
    assert (datetimes([date(2024, 2, 29)]) == datetimes(["2024-02-29"])).all()
    column = {"name": "at", "kind": "datetime", "width": cells.DATETIME_WIDTH, "fill": 0, "format": "%H:%M:%S"}
    at = Encoder(numbers(column), {}).encode({"at": ["18:30:00", time(18, 30), None]})["number"]
    assert (at == at[0]).all(1).tolist() == [True, True, False]


@given(st.lists(st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)), min_size=1, max_size=4), st.sampled_from(" T"))  # noqa: DTZ001
def test_plain_datetimes_are_read_as_any_other(instants, separator):
    for length in (10, 19):
        texts = [instant.isoformat(separator)[:length] for instant in instants]
        np.testing.assert_array_equal(cells.days(texts, ""), cells.days([*texts, "2024-01-01T00:00"], "")[:-1])


def test_a_missing_datetime_is_the_mean_and_another_word_is_refused():
    found = datetimes(["2024-01-01", None, "", np.datetime64("NaT")], fill=19723.0)
    assert (found == found[0]).all()
    with pytest.raises(BadValue, match=r"row 1: 'tomorrow' is not a date or time of ISO 8601"):
        datetimes(["2024-01-01", "tomorrow"])
    with pytest.raises(BadValue, match="is not a date or time"):
        datetimes([5])


def image(**values):
    return places("image", (2, 3, 3), "photo"), {}, *values.values()


def png(color, size=(6, 4), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return buffer.getvalue()


def test_images_are_bytes_base64_or_arrays():
    content = png((10, 20, 30))
    values = [
        content,
        base64.b64encode(content).decode(),
        f"data:image/png;base64,{base64.b64encode(content).decode()}",
    ]
    values += [np.full((2, 3, 3), (10, 20, 30), np.uint8), None]
    found = Encoder(*image()).encode({"photo": values})["image"]
    assert (found.dtype, found.shape) == (np.uint8, (5, 2, 3, 3))
    assert (found[:4] == (10, 20, 30)).all()
    assert (found[4] == 0).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("as_array", [list, lambda files: np.array(files, object)])
def test_files_are_taken_with_the_zeros_that_they_end_with(kind, as_array):
    features, vocabularies = image()
    files = [io.BytesIO(), io.BytesIO()]
    for side, file in enumerate(files, 8):
        Image.new("RGB", (side, side), "black").save(file, kind)
    found = Encoder(features, vocabularies).model_input(as_array([file.getvalue() for file in files]))
    assert found.shape == (2, 2, 3, 3)
    assert found.max() == 0


@pytest.mark.parametrize("dtypes", [object, "category", None])
def test_a_data_frame_may_have_the_missing_values_of_pandas(dtypes):
    frame = pd.DataFrame({"size": [3, None], "city": [None, "Ulm"], "note": ["a b", None]})
    frame = frame.convert_dtypes() if dtypes is None else frame.astype(dtypes)
    columns = {"name": "size", "fill": 1.5}
    features = numbers(columns) | places("category", (1,), "city") | places("text", (2,), "note")
    found = Encoder(features, {"category": [["Ulm"]], "text": [["a", "b"]]}).model_input(frame)
    assert {name: values.tolist() for name, values in found.items()} == {
        "number": [[3], [1.5]], "category": [[0], [2]], "text": [[2, 3], [0, 0]],
    }  # fmt: skip


@pytest.mark.parametrize("value", ["/etc/passwd", "a.png", b"no image", b"", png((1, 2, 3))[:40], np.zeros((2, 3, 3))])
def test_without_a_folder_no_file_is_read(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png((1, 2, 3)))
    with pytest.raises(BadValue, match=r"column 'photo', row 1: .+ is not a whole image") as caught:
        Encoder(*image()).encode({"photo": [None, value]})
    assert len(str(caught.value)) < 300


def test_paths_begin_at_the_folder_and_stay_in_it(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for place in (folder, tmp_path):
        (place / "a.png").write_bytes(png((1, 2, 3)))
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    encoder = Encoder(*image(), pictures=folder)
    assert (encoder.encode({"photo": ["a.png", "./a.png"]})["image"] == (1, 2, 3)).all()
    for value in ("../a.png", str(tmp_path / "a.png"), "link.png"):
        with pytest.raises(BadValue, match="it leads out of the folder"):
            encoder.encode({"photo": [value]})


def test_columns_that_are_not_there_or_shorter_are_refused():
    encoder = Encoder(numbers({"name": "a"}, {"name": "b"}), {})
    assert encoder.columns == ["a", "b"]
    with pytest.raises(ValueError, match="these columns are missing: 'b'"):
        encoder.encode({"a": [1]})
    with pytest.raises(ValueError, match="the columns differ in length: 1, 2"):
        encoder.encode({"a": [1], "b": [1, 2]})
    assert encoder.encode({"a": [], "b": []})["number"].shape == (0, 2)

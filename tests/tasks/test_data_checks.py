"""What each check finds of planted faults, and what a finding leads to."""

import io
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tasks import config, records
from tasks.data import checks, prepared_data
from tasks.data.checks import Check, drift, duplicates
from tasks.data.checks._data import numbers
from tasks.prepare import prepare
from tasks.system.errors import UserError

DIGITS = load_digits()
IMAGES = np.rint(DIGITS.images * (255 / 16)).astype(np.uint8).repeat(3, axis=1).repeat(3, axis=2)
LABELS = DIGITS.target


def prepared_arrays(train, test=None, checks=None, **values):
    """Prepare arrays (x, y) as the dataset `own` of the current project, and return what the checks said."""
    test = test if test is not None else (IMAGES[1000:1200], LABELS[1000:1200])
    source = config.project_root() / "own.npz"
    np.savez(source, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    return prepared(kind="arrays", source=str(source), checks=checks or {}, **values)


def prepared(**values):
    described = config.describe({"name": "own", **values}, "test")
    folder = config.project_root() / "data" / "own"
    folder.mkdir(parents=True, exist_ok=True)
    made = prepare(described)
    quality = prepared_data.load_quality(made)
    assert quality is not None
    return quality


def images(count=300):
    return IMAGES[:count].copy(), LABELS[:count].copy()


def names_of(quality, check):
    return [one.name for one in quality.checks[check].offenders]


def test_the_documentation_has_each_check_with_its_threshold():
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)`( \(off\))? \| .+? \| ([\d.]+) \|", page, re.MULTILINE)
    found = {name: checks.find_check(name) for name in config.names_of("data/checks")}
    assert {name: (off, float(threshold)) for name, off, threshold in told} == {
        name: (" (off)" if check.action == "off" else "", check.threshold) for name, check in found.items()
    }


def test_of_clean_data_no_check_finds_anything(root, capsys):
    quality = prepared_arrays(images())
    assert quality.findings == {}
    assert set(quality.checks) == {*config.names_of("data/checks")} - {"label_noise"}
    assert "warning" not in capsys.readouterr().err
    assert quality.looked_at == {"train": 300, "test": 200}


def test_no_two_checks_read_the_header_of_an_array_at_once(root, monkeypatch):
    """Python 3.11.7 fails at random where two threads parse (`SystemError: AST constructor recursion depth`)."""
    reading, at_once, load = [], [], np.load

    def slow_load(file, **options):
        reading.append(file)
        at_once.append(len(reading))
        time.sleep(0.02)
        reading.remove(file)
        return load(file, **options)

    monkeypatch.setattr(np, "load", slow_load)
    table(root, rows(np.random.default_rng(0), 200))
    assert len(at_once) > 5
    assert max(at_once) == 1


def test_planted_faults_are_named_told_and_shown(root, capsys):
    x, y = images()
    x[7], y[7] = x[3], (y[3] + 1) % 10  # The same again, as another class.
    x[20] = 99
    x[40] = np.clip(x[30] * 0.8 + 10, 0, 255)  # Darker, and of less contrast.
    test = (IMAGES[1000:1100].copy(), LABELS[1000:1100])
    test[0][5] = x[11]
    told = io.BytesIO()
    Image.fromarray(x[12]).save(told, "JPEG", quality=95)
    test[0][6] = np.asarray(Image.open(told))
    quality = prepared_arrays((x, y), test)
    assert set(quality.findings) == {"duplicates", "duplicates_across_splits", "near_duplicates", "constant_examples"}
    assert names_of(quality, "duplicates") == ["row 7 of train"]
    assert "1 of them with another label" in quality.checks["duplicates"].text
    assert quality.checks["duplicates"].offenders[0].twin == ("train", 3)
    assert names_of(quality, "duplicates_across_splits") == ["row 5 of test"]
    assert quality.checks["duplicates_across_splits"].value == pytest.approx(1 / 100)
    assert names_of(quality, "near_duplicates") == ["row 6 of test", "row 40 of train"]
    assert quality.checks["near_duplicates"].offenders[0].twin == ("train", 12)
    assert names_of(quality, "constant_examples") == ["row 20 of train"]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 4
    assert lines[1] == (
        "warning: duplicates: 1 of 400 examples repeat one of the same split, 1 of them with another label: "
        "row 7 of train (like row 3 of train) (data/own/report/duplicates.png)"
    )
    report = root / "data" / "own" / "report"
    assert {path.name for path in report.iterdir()} == {
        ".gitignore", "quality.json", "statistics.json", *quality.pictures,
    }  # fmt: skip
    sheet = np.asarray(Image.open(report / "duplicates.png"))
    # Both images of the pair are in it, side by side.
    shown = np.asarray(Image.fromarray(x[3]).resize((56, 56), Image.Resampling.NEAREST))
    for left in (4, 64):
        np.testing.assert_array_equal(sheet[30:86, left : left + 56, 0], shown)


def test_what_is_found_is_the_same_each_time_and_no_part_of_the_data_version(root):
    x, y = images(100)
    x[7] = x[3]
    prepared_arrays((x, y))
    made = {path: path.read_bytes() for path in (root / "data" / "own").rglob("*.*")}
    prepared_arrays((x, y), checks={"drift": "off", "near_duplicates": {"threshold": 0.5}})
    again = {path: path.read_bytes() for path in (root / "data" / "own").rglob("*.*")}
    differs = {path.name for path in made if made[path] != again[path]}
    assert (differs, made.keys()) == ({"quality.json"}, again.keys())
    assert all("report" in path.parts or "prepared" in path.parts for path in made)


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ({"duplicates": "stop"}, "duplicates: 25 of 500 examples repeat one of the same split"),
        ({"duplicates": {"action": "stop", "threshold": 0.04}}, "row 275 of train (like row 0 of train)"),
    ],
)
def test_a_check_that_stops_names_twenty_and_leaves_nothing(root, checks, words):
    x, y = images(100)
    prepared_arrays((x, y))
    before = {path: path.read_bytes() for path in root.rglob("data/own/*/*")}
    x, y = images()
    x[275:], y[275:] = x[:25], y[:25]
    with pytest.raises(UserError) as refused:
        prepared_arrays((x, y), checks=checks)
    message = str(refused.value)
    assert words in message
    assert message.count("(like") == 20
    assert " and 5 more. Fix the source, or let the check only warn: set checks: {duplicates: warn}" in message
    assert refused.value.exit_code == 2
    assert {path: path.read_bytes() for path in root.rglob("data/own/*/*")} == before
    assert not [*root.glob("data/own/.prepared.*")]
    prepared_arrays((x, y), checks={"duplicates": {"action": "stop", "threshold": 0.1}})


def test_a_check_that_is_off_does_not_look(root, monkeypatch):
    def look(data):
        raise LookupError("it looked")

    monkeypatch.setattr(duplicates, "CHECK", Check(look, threshold=0))
    with pytest.raises(LookupError, match="it looked"):
        prepared_arrays(images(60))
    assert "duplicates" not in prepared_arrays(images(60), checks={"duplicates": False}).checks
    monkeypatch.setattr(duplicates, "CHECK", Check(look, threshold=0, action="off"))
    assert "duplicates" not in prepared_arrays(images(60)).checks, "nor one that is off by itself"


def test_imbalance_is_a_ratio_and_names_the_small_classes(root):
    x, y = images(600)
    rare = np.flatnonzero(y == 4)[4:]
    quality = prepared_arrays((np.delete(x, rare, 0), np.delete(y, rare)))
    counts = np.bincount(np.delete(y, rare))
    assert quality.checks["class_imbalance"].value == counts.max() / 4
    assert "class_imbalance" in quality.findings
    assert names_of(quality, "class_imbalance") == ["4"]
    assert quality.checks["class_imbalance"].text == (
        f"'0' has {counts.max()} examples to train on, {counts.max() / 4:.1f} times as many as '4'"
    )
    assert "class_imbalance" not in prepared_arrays(images(600)).findings
    x, y = images(600)
    of_each = np.concatenate([np.flatnonzero(y == label)[:20] for label in range(10)])
    even = prepared_arrays((x[of_each], y[of_each])).checks["class_imbalance"]
    assert (even.value, even.text) == (1, "each class has 20 examples to train on")


def test_a_shift_of_classes_of_light_and_of_numbers_is_drift(root):
    first = prepared_arrays(images(600))
    assert "there is no previous data version" in first.checks["drift"].text
    x, y = images(600)
    few = np.flatnonzero(y == 3)[5:]
    shifted = prepared_arrays((np.delete(x, few, 0), np.delete(y, few)))
    assert "drift" in shifted.findings
    assert names_of(shifted, "drift")[0] == "class"
    assert "'3'" in shifted.checks["drift"].text
    dark = prepared_arrays((np.delete(x, few, 0) // 2, np.delete(y, few)))
    assert set(names_of(dark, "drift")) == {"image brightness", "image contrast"}
    assert "Cohen's d -" in dark.checks["drift"].text


def test_another_sample_of_the_same_data_is_no_drift():
    generator = np.random.default_rng(0)
    for size in (50, 500, 20_000):
        for _ in range(20):
            ((_, one),) = numbers(["a"], generator.normal(size=(size, 1)))
            ((_, other),) = numbers(["a"], generator.normal(size=(size, 1)))
            assert drift.apart(one, other)[0] < 0.1


def test_label_noise_finds_labels_that_were_swapped(root):
    x, y = images(1000)
    wrong = np.random.default_rng(0).choice(1000, 60, replace=False)
    y[wrong] = (y[wrong] + 5) % 10
    quality = prepared_arrays((x, y), checks={"label_noise": "warn"})
    assert "label_noise" in quality.findings
    suspects = {one.row for one in quality.checks["label_noise"].offenders}
    assert len(suspects & set(wrong.tolist())) >= 40
    assert "taken for" in quality.checks["label_noise"].offenders[0].note
    clean = prepared_arrays(images(1000), checks={"label_noise": {"action": "stop"}})
    assert not clean.checks["label_noise"].is_finding


TABLE = "age,height,weight,town,note,kind\n"


def table(root, lines, name="own.csv", **values):
    (root / name).write_text(TABLE + "\n".join(lines) + "\n")
    columns = {"age": "number", "height": "number", "weight": "number", "town": "category", "note": "text"}
    described = {"kind": "table", "source": str(root / name), "target": "kind", "columns": columns, "test": 0.25}
    return prepared(**described, **values)


def rows(generator, count):
    words = [f"word{number}" for number in range(40)]
    return [
        f"{generator.normal(40, 9):.2f},{generator.normal(170, 9):.2f},{generator.normal(70, 9):.2f},"
        f"{generator.choice(['north', 'south'])},{' '.join(generator.choice(words, 6, replace=False))},{'ab'[i % 2]}"
        for i in range(count)
    ]


def test_rows_of_a_table_are_compared(root):
    lines = rows(np.random.default_rng(0), 200)
    lines[30] = lines[8]
    quality = table(root, lines)
    exact = quality.checks["duplicates"].offenders + quality.checks["duplicates_across_splits"].offenders
    assert [one.name.partition(" (")[0] for one in exact] == ["row 31"]
    assert not quality.checks["constant_columns"].is_finding
    assert table(root, rows(np.random.default_rng(0), 200)).findings.keys() <= {"drift"}


def test_days_without_a_time_are_no_constant_column_and_one_day_is(root):
    """A datetime has sine and cosine of its time of the day, too, which is midnight for all of them."""
    generator = np.random.default_rng(0)
    days = np.datetime64("2024-01-01") + generator.integers(0, 365, 100)
    lines = [f"{day},2024-05-06,{generator.normal()},{'ab'[place % 2]}" for place, day in enumerate(days)]
    (root / "own.csv").write_text("\n".join(["seen,printed,age,kind", *lines]))
    columns = {"seen": "datetime", "printed": "datetime", "age": "number"}
    quality = prepared(kind="table", source=str(root / "own.csv"), target="kind", columns=columns)
    assert names_of(quality, "constant_columns") == ["printed"]
    assert quality.checks["constant_columns"].value == 1 / 3


def test_a_table_drifts_by_its_numbers_its_categories_and_its_words(root):
    generator = np.random.default_rng(0)
    assert table(root, rows(generator, 400)).findings == {}
    lines = [line.split(",") for line in rows(generator, 400)]
    older = [
        [f"{float(one[0]) + 15:.2f}", one[1], "70", "south", one[4].replace("word1", "wort1"), one[5]] for one in lines
    ]
    quality = table(root, [",".join(one) for one in older])
    assert set(quality.findings) == {"drift", "constant_columns"}
    assert {one.name for one in quality.checks["drift"].offenders if one.split == "train"} == {
        "age", "weight", "town", "note",
    }  # fmt: skip
    assert names_of(quality, "constant_columns") == ["weight", "town"]
    report = json.loads((root / "data/own/report/statistics.json").read_text())
    age = np.load(root / "data/own/prepared/train_numbers.npy")[:, 0].astype(float)
    own = report["splits"]["train"]["age"]
    assert own["mean"] == pytest.approx(age.mean())
    np.testing.assert_allclose(own["quantiles"], np.quantile(age, np.linspace(0, 1, 101)), rtol=1e-6)


def test_files_of_a_folder_are_named_also_where_some_are_left_out(root):
    for number, (image, label) in enumerate(zip(IMAGES[:80], LABELS, strict=False)):
        place = root / "photos" / f"digit {label % 2}" / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place)
    whole = (root / "photos/digit 0/000.png").read_bytes()
    (root / "photos/digit 0/000.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(IMAGES[76]).save(root / "photos" / "digit 0" / "zz.png")
    quality = prepared(kind="image_folder", source="photos", on_broken="skip")
    found = quality.checks["duplicates"].offenders + quality.checks["duplicates_across_splits"].offenders
    names = {part.partition(" (")[0] for one in found for part in (one.name, one.note.removeprefix("like "))}
    assert names == {"digit 0/076.png", "digit 0/zz.png"}


def test_the_sizes_that_images_had_are_kept_also_where_some_are_left_out(root):
    for number in range(60):
        place = root / "photos" / f"digit {number % 2}" / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[number]).resize((24 + number, 40)).save(place)
    for path in sorted((root / "photos").rglob("*.png"))[::7]:
        path.write_bytes(path.read_bytes()[:-40])  # Its header is whole.
    quality = prepared(kind="image_folder", source="photos", on_broken="skip", image_size=(24, 24))
    sizes = np.load(root / "data" / "own" / "report" / prepared_data.SIZES)
    pixels = np.load(root / "data" / "own" / "prepared" / "test_images.npy")
    assert sizes.shape == (len(pixels), 2)
    assert set(sizes[:, 0]) == {40}
    for size, one in zip(sizes, pixels, strict=True):
        source = np.asarray(Image.fromarray(IMAGES[size[1] - 24]).resize((size[1], 40)).resize((24, 24)), np.int16)
        assert abs(one[..., 0] - source).mean() < 8, "the size is that of the image in its row"
    assert prepared_data.SIZES in prepared_data.made_in_report(root / "data" / "own")
    assert quality.looked_at["test"] == len(sizes)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 1), (8, 8, 4), (33, 7, 3)])
def test_images_of_any_size_can_be_looked_at(root, shape):
    x = np.random.default_rng(0).integers(0, 256, (40, *shape), np.uint8)
    x[9] = x[4]
    y = np.arange(40) % 2
    quality = prepared_arrays((x, y), (x[:4] ^ 3, y[:4]))
    assert 9 in {one.row for one in quality.checks["duplicates"].offenders}


def test_the_report_of_other_data_is_none_and_files_of_the_users_stay(root):
    prepared_arrays(images(60))
    folder = root / "data" / "own"
    (folder / "report" / "notes.md").write_text("mine")
    x, y = images(60)
    x[5] = x[4]
    prepared_arrays((x, y))
    assert (folder / "set_aside" / "notes.md").read_text() == "mine"
    made = records.load(records.PreparedDataset, folder / "prepared" / "manifest.json")
    other = made.model_copy(update={"splits": {"train": made.splits["train"]}})
    assert prepared_data.load_quality(other) is None
    assert {path.name for path in (folder / "report").iterdir()} <= prepared_data.made_in_report(folder)

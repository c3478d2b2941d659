"""What each check finds of planted faults, and what a finding leads to."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.fft import dctn
from scipy.spatial.distance import jensenshannon
from scipy.stats import chi2_contingency
from sklearn.datasets import load_digits

from tasks import config, records
from tasks.data import checks, quality_report
from tasks.data.checks import Check, Data, _hashes, _statistics, duplicates
from tasks.prepare import prepare
from tasks.system import files
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
    folder.mkdir(exist_ok=True)
    made = prepare(described)
    quality = quality_report.load(made, folder)
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


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty project, current."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_of_clean_data_no_check_finds_anything(root, capsys):
    quality = prepared_arrays(images())
    assert quality.findings == {}
    assert set(quality.checks) == {*config.names_of("data/checks")} - {"label_noise"}
    assert "warning" not in capsys.readouterr().err
    assert quality.looked_at == {"train": 300, "test": 200}


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
        "warning: duplicates: 1 of 400 examples are one of the same split again, 1 of them with another label: "
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
    assert all("report" in path.parts or "prepared" in path.parts for path in made if path.name != ".prepare.lock")


@pytest.mark.parametrize(
    ("checks", "words"),
    [
        ({"duplicates": "stop"}, "duplicates: 25 of 500 examples are one of the same split again"),
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
    assert " and 5 more. Mend the source, or let the check warn: checks: {duplicates: warn}" in message
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


def test_a_description_says_checks_only_where_it_has_some():
    assert "checks" not in config.describe({"name": "d"}, "test").model_dump()
    checks = config.describe({"name": "d", "checks": {"drift": False, "duplicates": "stop"}}, "test").checks
    assert {name: check.action for name, check in checks.items()} == {"drift": "off", "duplicates": "stop"}


def test_splits_without_examples_can_be_judged(root):
    """As a builder of TFDS may declare them."""
    prepared_arrays(images(60))
    made = records.load(records.PreparedDataset, root / "data/own/prepared/manifest.json")
    for name in ("image", "label"):
        path = root / "data/own/prepared" / f"test_{name}s.npy"
        np.save(path, np.load(path)[:0])
    test = made.splits["test"].model_copy(update={"num_examples": 0, "class_counts": (0,) * 10})
    described = config.describe({"name": "own", "checks": {"label_noise": "warn"}}, "test")
    for number, splits in enumerate(({"train": made.splits["train"], "test": test}, {"test": test}, {})):
        report = root / f"report {number}"
        checks.judge(described, made.model_copy(update={"splits": splits}), root / "data/own/prepared", report)
        assert report.exists() is (number == 0)
        quality_report.replace(report, root / "data" / "own")


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
    assert "there is no data version before" in first.checks["drift"].text
    x, y = images(600)
    few = np.flatnonzero(y == 3)[5:]
    shifted = prepared_arrays((np.delete(x, few, 0), np.delete(y, few)))
    assert "drift" in shifted.findings
    assert names_of(shifted, "drift")[0] == "class"
    assert "'3'" in shifted.checks["drift"].text
    # The same arrays once more are judged by the same data version before.
    assert prepared_arrays((np.delete(x, few, 0), np.delete(y, few))).checks["drift"] == shifted.checks["drift"]
    dark = prepared_arrays((np.delete(x, few, 0) // 2, np.delete(y, few)))
    assert set(names_of(dark, "drift")) == {"image brightness", "image contrast"}
    assert "Cohen's d -" in dark.checks["drift"].text


def test_drift_is_measured_from_the_arrays_where_no_report_is_there(root):
    prepared_arrays(images(600))
    for path in quality_report.made_in(root / "data" / "own")[:-1]:
        path.unlink()
    x, y = images(600)
    assert "image contrast" in names_of(prepared_arrays((x // 2, y)), "drift")


def test_another_sample_of_the_same_data_is_no_drift():
    generator = np.random.default_rng(0)
    for size in (50, 500, 20_000):
        for _ in range(20):
            ((_, one),) = _statistics._numbers(["a"], generator.normal(size=(size, 1)))
            ((_, other),) = _statistics._numbers(["a"], generator.normal(size=(size, 1)))
            assert _statistics.apart(one, other)[0] < 0.1


def test_the_distance_is_scipys():
    generator = np.random.default_rng(1)
    counts = generator.integers(1, 200, (2, 7))
    before, now = (
        records.ColumnStatistics(
            num_values=int(own.sum()), counts={f"c{place}": int(count) for place, count in enumerate(own)}
        )
        for own in counts
    )
    assert chi2_contingency(counts).pvalue < 0.001
    wanted = jensenshannon(counts[0] / counts[0].sum(), counts[1] / counts[1].sum(), base=2)
    assert _statistics.apart(before, now)[0] == pytest.approx(wanted)
    # Of numbers, between the deciles of before.
    values = generator.normal(size=20_000), generator.normal(0.6, 1.3, size=20_000)
    ((_, first),), ((_, second),) = (_statistics._numbers(["a"], own[:, np.newaxis]) for own in values)
    edges = [-np.inf, *np.quantile(values[0], np.linspace(0.1, 0.9, 9)), np.inf]
    shares = [np.histogram(own, edges)[0] / len(own) for own in values]
    assert _statistics.apart(first, second)[0] == pytest.approx(jensenshannon(*shares, base=2), abs=0.01)
    # A column of one value that becomes another one could not be further away.
    ((_, zeros),), ((_, ones),) = (_statistics._numbers(["a"], np.full((300, 1), value)) for value in (0, 1))
    assert _statistics.apart(zeros, ones)[0] == pytest.approx(1)
    assert _statistics.apart(zeros, zeros) == (0.0, "")


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


def test_rows_and_texts_of_a_table_are_compared_as_they_are_meant(root):
    lines = rows(np.random.default_rng(0), 200)
    first = lines[8].split(",")
    lines[30] = lines[8]
    # The same words in another order and case, and a number that was rounded elsewhere.
    lines[50] = ",".join([f"{float(first[0]) + 1e-4:.6f}", *first[1:4], " ".join(first[4].upper().split()[::-1]), "b"])
    quality = table(root, lines)
    exact = quality.checks["duplicates"].offenders + quality.checks["duplicates_across_splits"].offenders
    assert [one.name.partition(" (")[0] for one in exact] == ["row 31"]
    ((near,)) = quality.checks["near_duplicates"].offenders
    assert {near.name.partition(" (")[0], near.note.removeprefix("like ").partition(" (")[0]} <= {
        "row 9", "row 31", "row 51",
    }  # fmt: skip
    assert "row 51" in near.name + near.note
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


def test_texts_are_compared_by_their_known_words(root):
    words = [
        f"{word} {word}s {word}like" for word in ("sun", "moon", "star", "tree", "stone", "river", "cloud", "hill")
    ]
    train = [*words, "sun moon star sun", "star moon sun", "tree stone", "stone tree"]
    lines = [f"train,{note},{'ab'[place % 2]}" for place, note in enumerate(train)]
    lines += ["test,of none of these,a", "test,a river,b"]
    (root / "texts.csv").write_text("\n".join(["part,note,kind", *lines]))
    described = {"target": "kind", "split_column": "part", "columns": {"note": "text"}}
    quality = prepared(kind="table", source=str(root / "texts.csv"), **described)
    ((near,)) = quality.checks["near_duplicates"].offenders
    assert (near.name, near.note) == ("row 10 (train)", "like row 9 (train)")
    assert names_of(quality, "constant_examples") == ["row 13 (test)"]
    assert not quality.checks["duplicates"].is_finding


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
    sizes = np.load(root / "data" / "own" / "report" / quality_report.SIZES)
    pixels = np.load(root / "data" / "own" / "prepared" / "test_images.npy")
    assert sizes.shape == (len(pixels), 2)
    assert set(sizes[:, 0]) == {40}
    for size, one in zip(sizes, pixels, strict=True):
        source = np.asarray(Image.fromarray(IMAGES[size[1] - 24]).resize((size[1], 40)).resize((24, 24)), np.int16)
        assert abs(one[..., 0] - source).mean() < 8, "the size is that of the image in its row"
    assert quality_report.SIZES in [path.name for path in quality_report.made_in(root / "data" / "own")]
    assert quality.looked_at["test"] == len(sizes)


def test_equal_rows_alone_have_equal_hashes():
    generator = np.random.default_rng(0)
    for shape, dtype in (((3, 3, 1), np.uint8), ((5,), np.float32), ((16,), np.int32), ((1,), np.float32)):
        block = generator.integers(0, 4, (4000, *shape)).astype(dtype)
        hashes = _hashes.of_rows(block)
        later, first = _hashes.equal_to_earlier(hashes)
        _, wanted = np.unique(block.reshape(len(block), -1), axis=0, return_index=True)
        assert set(range(len(block))) - set(later.tolist()) == set(wanted.tolist())
        np.testing.assert_array_equal(block[later], block[first])
        assert set(first.tolist()) <= set(wanted.tolist()), "the first place of each"
        assert (np.diff(later) > 0).all()
        assert not np.intersect1d(hashes, _hashes.of_rows(block, 1)).size


@pytest.mark.parametrize("hashes", [[], [3], [1, 2, 3], [7] * 5, [5, 1, 5, 2, 1, 5]])
def test_a_place_is_told_with_the_first_that_has_the_same_hash(hashes):
    wanted = [(place, hashes.index(one)) for place, one in enumerate(hashes) if one in hashes[:place]]
    later, first = _hashes.equal_to_earlier(np.array(hashes, np.uint64))
    assert list(zip(later.tolist(), first.tolist(), strict=True)) == wanted


def test_what_threads_find_of_blocks_is_in_the_order_of_the_rows(root, machine_with_cores):
    machine_with_cores(64)
    prepared_arrays(images())
    folder = root / "data/own/prepared"
    data = Data(
        records.load(records.PreparedDataset, folder / "manifest.json"), folder, block_bytes=3 * IMAGES[0].nbytes
    )
    every = np.concatenate(list(data.blocks("train", "image")))
    assert len(every) == len(data.rows["train"]) > 200
    np.testing.assert_array_equal(data.digests("train"), _hashes.of_rows(every))
    np.testing.assert_array_equal(data.looks("train", "image").hashes, _hashes.Look(24, 24).of(every)[0])


def test_the_hash_is_of_the_lowest_frequencies():
    generator = np.random.default_rng(0)
    some = generator.integers(0, 256, (5, 20, 13, 3), np.uint8)
    waves = _hashes.Look(20, 13).waves(some)
    wanted = [dctn(one.mean(-1), norm="ortho")[:8, :8].ravel() for one in some]
    np.testing.assert_allclose(waves, wanted, rtol=1e-3, atol=1e-2)
    covered = np.concatenate([some, some[..., :1]], axis=-1)
    np.testing.assert_array_equal(_hashes.Look(20, 13).waves(covered), waves)
    hashes, _, brightness, contrast = _hashes.Look(20, 13).of(some)
    np.testing.assert_allclose(brightness, some.mean((1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(contrast, some.mean(3).std((1, 2)), rtol=1e-4)
    assert [int(one).bit_count() for one in hashes] == [31] * 5


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 1), (8, 8, 4), (33, 7, 3)])
def test_images_of_any_size_can_be_looked_at(root, shape):
    x = np.random.default_rng(0).integers(0, 256, (40, *shape), np.uint8)
    x[9] = x[4]
    y = np.arange(40) % 2
    quality = prepared_arrays((x, y), (x[:4] ^ 3, y[:4]))
    assert 9 in {one.row for one in quality.checks["duplicates"].offenders}


def test_pairs_are_found_among_many_and_their_number_has_an_end():
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**63, 20_000, dtype=np.uint64)
    coarse = np.zeros((20_000, 63), np.int8)
    for place in range(0, 400, 2):  # Up to three bits are others.
        for bit in generator.integers(0, 64, place % 4 + 1):
            hashes[place + 1] = hashes[place] ^ np.uint64(1 << int(bit))
    found, was_cut = _hashes.pairs(hashes, coarse)
    assert (found.tolist(), was_cut) == ([[place, place + 1] for place in range(0, 400, 2)], False)
    # Those of which the frequencies differ are not compared pixel by pixel.
    coarse[:10, 0] = np.arange(10) % 2 * 15
    assert len(_hashes.pairs(hashes, coarse)[0]) == 200
    coarse[:10, 0] = np.arange(10) % 2 * 20
    assert len(_hashes.pairs(hashes, coarse)[0]) == 195
    # All alike: each is compared with its neighbours alone.
    found, _ = _hashes.pairs(np.zeros(5000, np.uint64), np.zeros((5000, 63), np.int8))
    assert len(found) < 8 * 5000
    found, was_cut = _hashes.pairs(np.zeros(50, np.uint64), np.zeros((50, 63), np.int8), most=10)
    assert (len(found), was_cut) == (10, True)


@pytest.mark.exhaustive
def test_of_what_is_larger_spread_runs_are_looked_at_and_that_is_said(root, capsys):
    """Of 1,000,000 rows at most, in runs of 1024; its statistics are those of every tenth of them."""
    number = 1_100_000
    x, y = np.arange(2 * number, dtype=np.float32).reshape(-1, 2), np.arange(number) % 2
    x[-1] = x[0]
    quality = prepared_arrays((x, y), (x[:90], y[:90]))
    folder = root / "data/own/prepared"
    data = Data(records.load(records.PreparedDataset, folder / "manifest.json"), folder)
    rows = data.rows["train"]
    assert 998_000 < len(rows) <= 1_000_000
    assert len(np.unique(rows // 1024)) == len(rows) // 1024 + 1, "the last run is a part of one"
    assert quality.looked_at == {"train": len(rows), "test": 90}
    assert names_of(quality, "duplicates")[0] == f"row {number - 1} of train"
    said = capsys.readouterr().err
    assert f"the checks looked at {len(rows):,} of the 1,100,000 examples of train, evenly spread" in said
    every_tenth = data.array("train", "number")[rows][::10].astype(float)  # They are read in several blocks.
    own = checks.statistics(data).splits["train"]["number 1"]
    assert (own.num_values, own.mean) == (len(every_tenth), pytest.approx(every_tenth[:, 1].mean(), rel=1e-12))


def test_the_report_of_other_data_is_none_and_files_of_the_users_stay(root):
    prepared_arrays(images(60))
    folder = root / "data" / "own"
    (folder / "report" / "notes.md").write_text("mine")
    (folder / "report" / "duplicates.png").write_text("mine, too")
    x, y = images(60)
    x[5] = x[4]
    prepared_arrays((x, y))
    assert (folder / "report" / "notes.md").read_text() == "mine"
    assert (folder / "set_aside" / "duplicates.png").read_text() == "mine, too"
    made = records.load(records.PreparedDataset, folder / "prepared" / "manifest.json")
    other = made.model_copy(update={"splits": {"train": made.splits["train"]}})
    assert quality_report.load(other, folder) is None
    left = {path.name for path in (folder / "report").iterdir()} - {
        path.name for path in quality_report.made_in(folder)
    }
    assert left == {"notes.md"}
    assert files.digest(folder / "report" / "quality.json")

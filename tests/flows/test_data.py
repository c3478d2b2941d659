"""`stratagem data` as a user gives it."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tasks import config
from tests.tasks.written_runs import write_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_prefect_server")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """400 digits as pictures of many sizes and formats, a folder for each class."""
    folder = tmp_path_factory.mktemp("source") / "My photos"
    digits, generator = load_digits(), np.random.default_rng(0)
    for number in range(400):
        shades = (digits.images[number] * 255 / 16).astype(np.uint8)
        size = tuple(int(side) for side in generator.integers(16, 40, 2))
        place = folder / f"digit {digits.target[number]}" / f"{number}.{('png', 'jpg', 'bmp')[number % 3]}"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(shades).resize(size).save(place)
    return folder


def test_own_photos_are_added_and_followed_when_they_change(photos, project, run, tmp_path):
    source = shutil.copytree(photos, tmp_path / "My photos")
    added = run(["stratagem", "data", "add", source, "--name", "my-photos", "--json"])
    assert added.returncode == 0, added.stderr
    first = json.loads(added.stdout)
    assert (first["name"], first["features"]["image"]["shape"]) == ("my-photos", [32, 32, 1])
    assert {name: split["num_examples"] for name, split in first["splits"].items()} == {"test": 80, "train": 320}
    assert "added data/my-photos: put it under version control" in added.stderr
    assert added.stderr.count("the images of my-photos differ in size, from") == 1
    assert "it has no test split: 80 of its training examples, drawn with seed 0" in added.stderr
    assert config.read_description(project / "data" / "my-photos").image_size == (32, 32)

    # The same again does nothing; one picture more is another data version.
    again = run(["stratagem", "data", "add", source, "--name", "my-photos", "--json"])
    assert json.loads(again.stdout) == first
    assert "prepared my-photos" not in again.stderr
    shutil.copyfile(next((source / "digit 1").iterdir()), source / "digit 1" / "more.png")
    changed = run(["stratagem", "data", "prepare", "--set", "dataset.name=my-photos", "--json"])
    second = json.loads(changed.stdout)
    assert second["data_version"] != first["data_version"]
    assert sum(split["num_examples"] for split in second["splits"].values()) == 401

    # Where the source is not, as in another clone, the prepared data serve.
    source.rename(tmp_path / "elsewhere")
    without = run(["stratagem", "data", "prepare", "--set", "dataset.name=my-photos", "--json"])
    assert json.loads(without.stdout) == second
    assert "does not exist; using the data prepared earlier" in without.stderr
    described = project / "data" / "my-photos" / "params.yaml"
    kept = described.read_text()
    described.write_text(kept.replace("test: 0.2", "test: 0.3"))
    edited = run(["stratagem", "data", "prepare", "--set", "dataset.name=my-photos"])
    assert edited.returncode == 2
    assert "dataset.test: data/my-photos/params.yaml has changed since" in edited.stderr
    described.write_text(kept)
    forced = run(["stratagem", "data", "prepare", "--set", "dataset.name=my-photos", "--force"])
    assert (forced.returncode, forced.stderr.count("error: dataset.source = ")) == (2, 1)


def rows_of(labels):
    """A table of two columns of noise and of these labels."""
    noise = np.random.default_rng(0).normal(size=(len(labels), 2)).round(3)
    return "a,b,label\n" + "".join(f"{a},{b},{label}\n" for (a, b), label in zip(noise, labels, strict=True))


def write_pictures(folder, side):
    for number in range(40):
        place = folder / "xy"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((side, side), number, np.uint8)).save(place)


def change_classes(folder):
    (folder / "own.csv").write_text(rows_of([*["common"] * 19, "rare"] * 60))


def change_task(folder):
    description = Path("data/own/params.yaml")
    description.write_text(description.read_text().replace("task: classification", "task: regression"))


CHANGES = {
    "classes": (
        lambda folder: (folder / "own.csv").write_text(rows_of(["rare", "common"] * 30)),
        change_classes,
        {"train.per_replica_batch_size": 16, "register.minimum": 0.95},
    ),
    "task": (
        lambda folder: (folder / "own.csv").write_text(rows_of([3 + number % 6 for number in range(120)])),
        change_task,
        {"checkpoint.monitor": "validation/loss", "register.metric": "test/r2"},
    ),
    "size of pictures": (
        lambda folder: write_pictures(folder / "own", 64),
        lambda folder: write_pictures(folder / "own", 8),
        {"model.options.filters": [24, 40], "input.augmentation.crop_padding": 1},
    ),
}


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_chooses_by_the_data_that_it_trains_on(project, run, tmp_path, change):
    """And not by those which were there when they were added."""
    write, rewrite, expected = CHANGES[change]
    write(tmp_path)
    (source,) = tmp_path.glob("own*")
    added = run(["stratagem", "data", "add", source, *(["--target=label"] if source.is_file() else [])])
    assert added.returncode == 0, added.stderr
    rewrite(tmp_path)
    command = ["stratagem", "run", "--set", "train.epochs=1", "--json", "--set", "dataset.name=own"]
    planned = run([*command, "--explain"])
    later = {one["key"]: one["source"] for one in json.loads(planned.stdout)["settings"]}
    assert later["register.metric"] == "dataset: after prepare"
    trained = run([*command, "--if-changed"])
    assert trained.returncode == 0, trained.stderr
    record = project / "mlruns" / "runs" / json.loads(trained.stdout)["run_id"] / "records" / "run.json"
    settings = config.parse(json.loads(record.read_text())["settings"]).flat()
    assert {key: settings[key] for key in expected} == expected


def test_a_table_with_a_new_category_is_compared_with_its_champion(project, run, tmp_path):
    def write(colours):
        price = {"red": 10, "blue": 20, "violet": 15}
        rows = [
            f"{colour},{number % 7},{price[colour] + number % 7}.{number % 97:02}"
            for number, colour in enumerate(colours)
        ]
        (tmp_path / "own.csv").write_text("\n".join(["colour,size,price", *rows]))

    write(["red", "blue"] * 200)
    assert run(["stratagem", "data", "add", tmp_path / "own.csv", "--target=price"]).returncode == 0
    command = ["stratagem", "run", "--json", "--set", "dataset.name=own", "--set", "train.epochs=2"]
    first = run([*command, "--set", "register.minimum=null"])
    assert first.returncode == 0, first.stderr
    write([*["red", "blue"] * 200, *["violet"] * 40])
    second = run([*command, "--set", "register.minimum=null"])
    assert second.returncode == 0, second.stderr
    judgement = json.loads(second.stdout)["judgement"]
    version = json.loads(first.stdout)["model_version"].rpartition("/")[2]
    assert (judgement["against"], judgement["scored_again"]) == (version, True), judgement["reason"]


def test_arrays_are_added_listed_shown_and_removed(project, run, tmp_path, record_imports):
    np.savez(tmp_path / "own.npz", x=np.zeros((20, 4, 4), np.uint8), y=np.arange(20) % 2)
    stop = ["--set", "dataset.checks.constant_examples={action: stop, threshold: 0.5}"]
    refused = run(["stratagem", "data", "add", tmp_path / "own.npz", *stop])
    assert (refused.returncode, (project / "data" / "own").exists()) == (2, False)
    assert "constant_examples: 20 of 20 examples are empty" in refused.stderr
    imports = record_imports(project)
    added = run(["stratagem", "data", "add", tmp_path / "own.npz", "--set", "dataset.test=4"], env=imports.environment)
    assert added.returncode == 0, added.stderr
    assert [imports.of(module) for module in ("tensorflow", "matplotlib", "scipy", "sklearn")] == [[]] * 4
    assert "Train on it: stratagem run --set dataset.name=own" in added.stdout
    assert "warning: constant_examples: 20 of 20 examples are empty" in added.stderr
    assert run(["git", "status", "--short", "data/own/report"]).stdout == ""
    other = run(["stratagem", "data", "add", tmp_path / "own.npz", "--set", "dataset.test=6"])
    assert other.returncode == 2
    assert "data/own already exists and is a different dataset" in other.stderr
    listed = run(["stratagem", "data", "list"])
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["digits", "not"], ["own", "arrays"]]
    shown = run(["stratagem", "data", "show", "own"])
    assert "image (image 4 x 4 x 1)" in shown.stdout
    assert ["image", "image", "0", "mean", "0,", "deviation", "0"] in [
        line.split() for line in shown.stdout.splitlines()
    ]
    assert "warning: 20 of 20 examples are empty" in shown.stdout
    assert "data/own/report/constant_examples.png" in shown.stdout.splitlines()
    assert max(map(len, (added.stdout + listed.stdout + shown.stdout).splitlines())) <= 80
    (project / "data" / "own" / "notes.md").write_text("mine")
    (project / "data" / "own" / "prepared" / "drawing.txt").write_text("mine, too")
    (project / "data" / "own" / "raw").mkdir()
    (project / "data" / "own" / "raw" / "mine.jpg").touch()
    write_run(1, overrides={"dataset.name": "own"})
    removed = run(["stratagem", "data", "remove", "own"])
    assert removed.returncode == 0, removed.stderr
    assert "kept: its runs (1): stratagem runs --dataset own" in removed.stdout
    left = {path.relative_to(project / "data" / "own").as_posix() for path in (project / "data" / "own").rglob("*.*")}
    assert left == {"notes.md", "raw/mine.jpg", "set_aside/drawing.txt"}
    assert "kept: data/own/notes.md" in removed.stdout
    assert (tmp_path / "own.npz").exists()
    (project / "data" / "experiment").mkdir()
    (project / "data" / "experiment" / "params.yaml").write_text("lr: 1\n")
    other = run(["stratagem", "data", "remove", "experiment"])
    assert (other.returncode, "does not describe a dataset" in other.stderr) == (2, True)
    assert (project / "data" / "experiment" / "params.yaml").exists()
    gone = run(["stratagem", "data", "remove", "own"])
    assert (gone.returncode, "unknown dataset 'own'" in gone.stderr) == (2, True)


def test_nothing_half_made_stays_of_a_source_that_is_refused(photos, project, run, tmp_path):
    source = shutil.copytree(photos, tmp_path / "photos")
    (source / "digit 3" / "broken.png").write_bytes(b"no picture")
    before = sorted(path.name for path in (project / "data").iterdir())
    for place, options, message in [
        (source, ["--set", "dataset.image_size=[16,16]"], "1 of its images cannot be used: digit 3/broken.png"),
        (source, ["--name", "../x"], "cannot be the name of a folder in data/"),
        (source, ["--set", "dataset.name=../../escaped"], "`data add` takes it as an argument. Use --name NAME"),
        (source, ["--set", "train.epochs=3"], "`data add` accepts only keys of the dataset"),
        (source, ["--set", "dataset.sizes=3"], "unknown key of a dataset of kind image_folder 'sizes'"),
        ("/nope/pics", ["--set", "dataset.kind=image_folder"], "SOURCE = '/nope/pics': no such file or folder"),
    ]:
        refused = run(["stratagem", "data", "add", place, *options])
        assert refused.returncode == 2, options
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
        assert sorted(path.name for path in (project / "data").iterdir()) == before


def test_a_builder_that_gives_no_example_to_train_on_is_refused(project, run):
    (project / "my_data.py").write_text(BUILDER.replace("_generate_examples(40)", "_generate_examples(0)"))
    (project / "shades.py").write_text("DARK = 0\n")
    refused = run(["stratagem", "data", "add", "my_data:BlackOrWhite"])
    assert refused.returncode == 2, refused.stderr
    assert 'writing of split "train": No examples were yielded' in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (project / "data" / "black_or_white").exists()


def test_a_dataset_of_tfds_is_added_by_its_name(project, run, record_imports):
    imports = record_imports(project)
    added = run(["stratagem", "data", "add", "noise:1.0.0", "--json"], env=imports.environment)
    assert imports.of("tensorflow") != [], "only TFDS needs it"
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["kind"] == "tfds"
    assert config.read_description(project / "data" / "noise").version == "1.0.0"
    for source, message in (
        ("mnits", "did you mean 'mnist'"),
        ("noise:9.9.9", "dataset.version"),
    ):
        refused = run(["stratagem", "data", "add", source])
        assert refused.returncode == 2
        assert message in refused.stderr
    named = run(["stratagem", "data", "add", "noise", "--name", "quiet"])
    assert (named.returncode, "keeps its name in TFDS" in named.stderr) == (2, True)
    assert not Path(os.path.join("data", "quiet")).exists()


@pytest.mark.exhaustive
def test_what_is_pushed_needs_no_download_and_no_prepare_in_a_clone(prepared_project, run, tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((20, 4, 4), np.uint8), y=np.arange(20) % 2)
    assert run(["stratagem", "data", "add", tmp_path / "own.npz", "--set", "dataset.test=4"]).returncode == 0
    for command in ("push", "pull"):
        alone = run(["stratagem", "data", command])
        assert (alone.returncode, "Add one: dvc remote add --default storage URL" in alone.stderr) == (2, True)
        assert len(alone.stderr.splitlines()) == 1

    run(["dvc", "remote", "add", "--default", "storage", tmp_path / "remote"])
    pushed = run(["stratagem", "data", "push", "--json"])
    assert pushed.returncode == 0, pushed.stderr
    versions = {name: one["data_version"] for name, one in json.loads(pushed.stdout).items()}
    assert list(versions) == ["digits", "own"]
    assert "pushed 0 files" in run(["stratagem", "data", "push", "own"]).stderr, "they are there"
    commit_all(run)

    clone = tmp_path / "clone"
    assert run(["git", "clone", "--quiet", prepared_project, clone]).returncode == 0
    shutil.rmtree(prepared_project / ".dvc" / "cache")
    (tmp_path / "own.npz").unlink()
    there = {"cwd": clone, "env": {"PYTHONPATH": str(clone)}}
    lost = run(["stratagem", "data", "push", "own"])
    assert (lost.returncode, "DVC's cache lacks some of the data" in lost.stderr) == (2, True)
    one = run(["stratagem", "data", "pull", "own", "--json"], **there)
    assert one.returncode == 0, one.stderr
    assert json.loads(one.stdout)["own"]["data_version"] == versions["own"]
    assert not (clone / "data" / "digits" / "prepared").exists()
    assert run(["stratagem", "data", "pull"], **there).returncode == 0
    shown = run(["stratagem", "data", "show", "digits"], **there)
    assert "not checked yet: stratagem data prepare --set dataset.name=digits --force" in shown.stdout
    for name in versions:
        again = run(["stratagem", "data", "prepare", "--set", f"dataset.name={name}", "--json"], **there)
        assert json.loads(again.stdout)["data_version"] == versions[name]
        assert "prepared" not in again.stderr.replace("using the data prepared earlier", "")
        assert "downloaded" not in again.stderr
    assert run(["git", "status", "--porcelain"], **there).stdout == ""

    # What a user has put or changed there is not lost.
    (clone / "data" / "own" / "prepared" / "mine.txt").write_text("mine")
    assert run(["stratagem", "data", "pull", "own"], **there).returncode == 0
    assert (clone / "data" / "own" / "set_aside" / "mine.txt").read_text() == "mine"
    labels = clone / "data" / "own" / "prepared" / "test_labels.npy"
    labels.unlink()
    labels.write_bytes(b"changed")
    changed = run(["stratagem", "data", "pull", "own"], **there)
    assert (changed.returncode, changed.stderr.count("error: "), labels.read_bytes()) == (2, 1, b"changed")
    assert "Move data/own/prepared away" in changed.stderr
    shutil.rmtree(clone / "data" / "own" / "prepared")
    shutil.rmtree(clone / ".dvc" / "cache")
    for file in (tmp_path / "remote").rglob("*"):
        if file.is_file() and file.read_bytes().startswith(b"{"):
            file.unlink()  # A manifest.
    incomplete = run(["stratagem", "data", "pull", "own"], **there)
    assert (incomplete.returncode, incomplete.stderr.count("error: ")) == (1, 1)
    assert "the remote lacks" in incomplete.stderr


def commit_all(run):
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    for words in (["add", "--all"], ["commit", "--quiet", "--no-verify", "-m", "data"]):
        assert run([*git, *words]).returncode == 0


def test_what_differs_between_two_data_versions_is_told(project, run, tmp_path):
    images = np.arange(20 * 16, dtype=np.uint8).reshape(20, 4, 4)
    np.savez(tmp_path / "own.npz", x=images, y=np.array(["cat", "dog"])[np.arange(20) % 2])
    assert run(["stratagem", "data", "add", tmp_path / "own.npz", "--set", "dataset.test=4"]).returncode == 0
    commit_all(run)
    same = run(["stratagem", "data", "diff", "own@HEAD", "own"])
    assert (same.returncode, same.stdout) == (0, "own@HEAD and own are the same data\n")

    np.savez(tmp_path / "own.npz", x=images[:19] // 2, y=np.array(["cat", "cow"])[np.arange(19) % 2])
    assert run(["stratagem", "data", "prepare", "--set", "dataset.name=own"]).returncode == 0
    found = run(["stratagem", "data", "diff", "own@HEAD", "own", "--json"])
    assert found.returncode == 0, found.stderr
    differences = json.loads(found.stdout)["differences"]
    assert differences["splits.train.num_examples"] == ["16", "15"]
    assert differences["splits.train.class_counts.dog"] == ["8", None]
    assert differences["splits.train.class_counts.cow"] == [None, "7"]
    assert "features.image.mean.0" in differences
    assert {"kind", "splits.test.num_examples"}.isdisjoint(differences)
    told = run(["stratagem", "data", "diff", "own@HEAD", "own"], env={"COLUMNS": "80"})
    assert ["splits.train.class_counts.dog", "8", "-"] in [line.split() for line in told.stdout.splitlines()]
    for asked, message in {
        "own@nope": "'nope' is not a commit, branch or tag here",
        "own@HEAD~1": "own@HEAD~1: that commit has no data/own/dvc.lock",
        "owns": "unknown dataset 'owns': did you mean 'own'",
    }.items():
        refused = run(["stratagem", "data", "diff", asked, "own"])
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    shutil.rmtree(project / ".dvc" / "cache")
    gone = run(["stratagem", "data", "diff", "own@HEAD", "own"])
    assert (gone.returncode, "dvc fetch --all-commits data/own/dvc.yaml" in gone.stderr) == (2, True)


BUILDER = """
import numpy as np
import tensorflow_datasets as tfds

from shades import DARK


class BlackOrWhite(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        kinds = {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=2)}
        features = tfds.features.FeaturesDict(kinds)
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=tuple(kinds))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(40), "test": self._generate_examples(10)}

    def _generate_examples(self, count):
        for row in range(count):
            yield row, {"image": np.full((8, 8, 1), 255 if row % 2 else DARK, np.uint8), "label": row % 2}


class Nothing:
    pass
"""


@pytest.mark.exhaustive
def test_a_tfds_builder_of_the_users_own_is_a_dataset(project, run):
    (project / "my_data.py").write_text(BUILDER)
    (project / "shades.py").write_text("DARK = 10")
    added = run(["stratagem", "data", "add", "my_data:BlackOrWhite", "--json"])
    assert added.returncode == 0, added.stderr
    first = json.loads(added.stdout)
    assert (first["name"], first["kind"]) == ("black_or_white", "tfds")
    images = np.load(project / first["splits"]["train"]["features"]["image"])
    labels = np.load(project / first["splits"]["train"]["labels"])
    assert (images[labels == 0] == 10).all()
    assert (images[labels == 1] == 255).all()
    assert config.read_description(project / "data" / "black_or_white").builder == "my_data:BlackOrWhite"

    # By either name it is the same; what its module imports is a dependency.
    again = run(["stratagem", "data", "prepare", "--set", "dataset.name=my_data:BlackOrWhite", "--json"])
    assert json.loads(again.stdout)["data_version"] == first["data_version"]
    (project / "shades.py").write_text("DARK = 20")
    (project / "data" / "black_or_white" / "raw" / "manifest.json").unlink()
    changed = run(["stratagem", "data", "prepare", "--set", "dataset.name=black_or_white", "--json"])
    assert changed.returncode == 0, changed.stderr
    second = json.loads(changed.stdout)
    assert second["data_version"] != first["data_version"]
    assert (np.load(project / second["splits"]["train"]["features"]["image"]).min()) == 20
    streamed = ["--set", "dataset.name=black_or_white", "--set", "input.source=stream", "--set", "train.epochs=1"]
    trained = run(["stratagem", "run", "--json", *streamed, "--set", "model={name: mlp, options: {}}"])
    assert trained.returncode == 0, trained.stderr

    for name, message in {
        "my_data:Nothing": "dataset.name = 'my_data:Nothing' is not a tfds.core.GeneratorBasedBuilder",
        "my_data:Gone": "my_data has no function or class 'Gone'",
        "gone:Birds": "dataset.name = 'gone:Birds': there is no module 'gone'",
        "other:BlackOrWhite": "dataset.builder = other:BlackOrWhite: data/black_or_white/params.yaml says my_data:",
    }.items():
        refused = run(["stratagem", "data", "add", name])
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert sorted(path.name for path in (project / "data").iterdir()) == ["black_or_white", "digits"]


def test_a_table_says_what_it_was_taken_for(project, run, tmp_path):
    rows = [f"{number / 7},{'north' if number % 3 else 'south'},p{number % 9},{number % 2}" for number in range(90)]
    rows[0] = rows[0].replace("0.0,", ",")
    (tmp_path / "cells.csv").write_text("\n".join(["size,clinic,patient,found", *rows]) + "\n")
    before = sorted(path.name for path in (project / "data").iterdir())
    add = ["stratagem", "data", "add", tmp_path / "cells.csv"]
    for options, message in [
        ([], "Use --target COLUMN, or several as --target A,B. Allowed: size, clinic, patient, found"),
        (["--target", "fond"], "unknown column 'fond': did you mean 'found'"),
        (["--target", "found", "--set", "dataset.columns.clinic=number"], "'clinic' has the value"),
        (["--target", "found", "--set", "dataset.metadata.clinc=category"], "unknown column 'clinc': did you mean"),
    ]:
        refused = run([*add, *options])
        assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
        assert refused.stderr.count("\n") == 1, "nothing of a folder that is not there"
        assert sorted(path.name for path in (project / "data").iterdir()) == before
    options = ["--target", "found", "--set", "dataset.group=patient", "--set", "dataset.columns.clinic=ignore"]
    added = run([*add, *options])
    assert added.returncode == 0, added.stderr
    assert "  task      classification of found\n  number    size\n  ignore    clinic\n" in added.stderr
    assert max(map(len, added.stdout.splitlines())) <= 80
    (size,) = json.loads((project / "data" / "cells" / "prepared" / "manifest.json").read_text())["features"].values()
    statistics = f"mean {size['mean'][0]:.4g}, deviation {size['deviation'][0]:.4g}".split()
    lines = [line.split() for line in run(["stratagem", "data", "show", "cells"]).stdout.splitlines()]
    assert ["size", "number", "1", *statistics] in lines, "one value of it is missing"
    assert run([*add, *options]).returncode == 0, "the same again is the same dataset"

"""TFDS builders whose examples are columns: copies of what stock builders say of themselves, with data of known
rules."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks import config
from tasks.data import builders, dataset_folder, prepared_data
from tasks.data.encoding import Encoder, cells
from tasks.download import download
from tasks.input import sources
from tasks.prepare import prepare
from tasks.system.errors import UserError

BUILDERS = '''
import io

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

F = tfds.features


class Own(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    FEATURES = KEYS = None
    COUNTS = {"train": 400}

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=F.FeaturesDict(self.FEATURES), supervised_keys=self.KEYS)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split, count) for split, count in self.COUNTS.items()}

    def _generate_examples(self, split, count):
        generator = np.random.default_rng(len(split))
        for row in range(count):
            yield row, self.example(row, generator)


class WineQuality(Own, skip_registration=True):
    """As wine_quality: a FeaturesDict of numbers, one of them float64, and a whole number to learn."""

    GIVEN = {"fixed acidity": tf.float32, "sulphates": tf.float64, "pH": tf.float32}
    FEATURES = {"quality": np.int32, "features": GIVEN}
    KEYS = ("features", "quality")

    def example(self, row, generator):
        acidity, sulphates, ph = generator.normal(size=3)
        given = {"fixed acidity": acidity, "sulphates": sulphates * 1e-3, "pH": ph + 3}
        return {"quality": round(6 + 2 * acidity - ph), "features": given}


class Titanic(Own, skip_registration=True):
    """As titanic: a dictionary of names, and texts of tf.string."""

    FEATURES = {
        "survived": F.ClassLabel(names=["died", "survived"]),
        "name": tf.string,
        "sex": F.ClassLabel(names=["male", "female"]),
        "age": tf.float32,
        "sibsp": tf.int32,
        "cabin": tf.string,
        "boat": tf.string,
        "crew": np.bool_,
    }
    KEYS = ({name: name for name in FEATURES if name != "survived"}, "survived")

    def example(self, row, generator):
        sex, crew = generator.integers(2), bool(generator.integers(2))
        title = "Mrs" if sex else "Mr"
        return {
            "survived": int(sex == 1 or crew),
            "name": f"Doe{row}, {title}. Jo Ann{row}",
            "sex": sex,
            "age": -1.0 if row % 5 == 0 else generator.uniform(1, 80),
            "sibsp": generator.integers(4),
            "cabin": str(generator.choice(["A1", "B2", "Unknown", "NA"])),
            "boat": "2" if row % 2 else "13",
            "crew": crew,
        }


class Diamonds(Own, skip_registration=True):
    """As diamonds: numbers and class labels, and a number to learn."""

    FEATURES = {"features": {"carat": np.float32, "cut": F.ClassLabel(names=["Fair", "Ideal"])}, "price": np.float32}
    KEYS = ("features", "price")

    def example(self, row, generator):
        carat, cut = generator.uniform(0.2, 3), generator.integers(2)
        return {"features": {"carat": carat, "cut": cut}, "price": 1000 * carat * (1 + cut)}


class Penguins(Own, skip_registration=True):
    """As penguins/simple: the target stands among what is given, and numbers are NaN where they are missing."""

    SEXES = ["FEMALE", "MALE", "NA"]
    FEATURES = {
        "species": F.ClassLabel(names=["Adelie", "Chinstrap", "Gentoo"]),
        "island": F.ClassLabel(names=["Biscoe", "Dream", "Torgersen"]),
        "body_mass_g": np.float32,
        "sex": F.ClassLabel(names=SEXES),
    }
    KEYS = ({name: name for name in FEATURES}, "species")
    COUNTS = {"train": 300, "test": 60}

    def example(self, row, generator):
        species = generator.integers(3)
        mass = np.nan if row % 10 == 0 else 3000 + 1000 * species + generator.normal() * 10
        return {"species": species, "island": -1 if row == 7 else species, "body_mass_g": mass, "sex": row % 3}


class Doses(Own, skip_registration=True):
    """Numbers of float32, of which 0.1 is none; no example of the test split has an age."""

    FEATURES = {"dose": np.float32, "age": np.float32, "cured": F.ClassLabel(names=["no", "yes"])}
    KEYS = ({"dose": "dose", "age": "age"}, "cured")
    COUNTS = {"train": 40, "test": 20}

    def example(self, row, generator):
        age = float(row) if self.split == "train" else np.nan
        return {"dose": (0.1, 0.25)[row % 2], "age": age, "cured": row % 2}

    def _generate_examples(self, split, count):
        self.split = split
        yield from list(super()._generate_examples(split, count))


class Criteo(Own, skip_registration=True):
    """As criteo: a truth to learn."""

    FEATURES = {"f0": tf.float32, "treatment": tf.int64, "exposure": tf.bool, "visit": np.bool_}
    KEYS = ({name: name for name in ("f0", "treatment", "exposure")}, "visit")

    def example(self, row, generator):
        f0 = generator.normal()
        return {"f0": f0, "treatment": row % 2, "exposure": row % 3 == 0, "visit": f0 > 0}


class Bees(Own, skip_registration=True):
    """As bee_dataset: an image, and several numbers to learn."""

    FEATURES = {"input": F.Image(shape=(6, 4, 3)), "output": {"wasps_output": np.float64, "pollen_output": np.float64}}
    KEYS = ("input", "output")
    COUNTS = {"train": 40, "test": 10}

    def example(self, row, generator):
        image = generator.integers(0, 256, (6, 4, 3), np.uint8)
        return {"input": image, "output": {"wasps_output": image.mean() / 255, "pollen_output": row}}


class Winds(Own, skip_registration=True):
    """Several numbers to learn in one tensor."""

    FEATURES = {"given": F.Tensor(shape=(3,), dtype=np.int64), "wanted": F.Tensor(shape=(2,), dtype=np.float32)}
    KEYS = ("given", "wanted")
    COUNTS = {"train": 40, "test": 10}

    def example(self, row, generator):
        return {"given": np.full(3, row), "wanted": np.array([row, -row], np.float32)}


class Faces(Own, skip_registration=True):
    """As lfw: the other way round, and a class that is a text."""

    FEATURES = {"label": F.Text(), "image": F.Image(shape=(4, 4, 1))}
    KEYS = ("label", "image")
    COUNTS = {"train": 40, "test": 10}

    def example(self, row, generator):
        return {"label": f"person {row % 3}", "image": np.full((4, 4, 1), row % 3 * 100, np.uint8)}


class Captions(Faces, skip_registration=True):
    def example(self, row, generator):
        return {**super().example(row, generator), "label": f"picture {generator.random()}"}


class Pets(Own, skip_registration=True):
    """As pet_finder: some columns, beside others, and some that can be none."""

    FEATURES = {
        "attributes": {
            "Age": np.int64,
            "Fee": {"of": np.float32, "label": tf.string},
            "label": tf.string,
            "PCA": F.Tensor(shape=(2,), dtype=np.float32),
            "photo": F.Image(shape=(4, 4, 3)),
            "file": F.Text(),
            "places": F.Sequence(np.int64),
        },
        "PetID": F.Text(),
        "label": F.Sequence(F.ClassLabel(names=["quick", "slow", "never"])),
    }
    KEYS = ("attributes", "label")
    COUNTS = {"train": 40, "test": 10}

    def example(self, row, generator):
        given = {
            "Age": row,
            "Fee": {"of": row / 2, "label": "usd" if row % 2 else "eur"},
            "label": ["cat", "dog", "cow"][row % 3],
            "PCA": [row, -row],
            "photo": np.full((4, 4, 3), row, np.uint8),
            "file": f"{row}.jpg",
            "places": [1] * (row % 3),
        }
        return {"attributes": given, "PetID": str(row), "label": [place for place in range(3) if row >> place & 1]}


class Places(Own, skip_registration=True):
    """As places365_small: a third supervised key that is the name of a file."""

    FEATURES = {"image": F.Image(shape=(4, 4, 3)), "label": F.ClassLabel(num_classes=2), "filename": F.Text()}
    KEYS = ("image", "label", "filename")
    COUNTS = {"train": 40, "test": 10}

    def example(self, row, generator):
        return {"image": np.full((4, 4, 3), row % 2 * 200, np.uint8), "label": row % 2, "filename": f"{row}.jpg"}


class Codes(Own, skip_registration=True):
    FEATURES = {"features": {"code": tf.string, "size": np.float32}, "label": F.ClassLabel(num_classes=2)}
    KEYS = ("features", "label")

    def example(self, row, generator):
        code = "n/k" if row == 399 else str(row / 4)
        return {"features": {"code": code, "size": np.inf if row == 398 else row}, "label": row % 2}


class Unlabelled(Own, skip_registration=True):
    FEATURES = {"features": {"size": np.float32}, "label": F.ClassLabel(num_classes=2)}
    KEYS = ("features", "label")

    COUNTS = {"train": 50, "unsupervised": 20}

    def _generate_examples(self, split, count):
        for row in range(count):
            has_none = split == "unsupervised" or row % 10 == 7
            yield row, {"features": {"size": 1000 if has_none else row}, "label": -1 if has_none else row % 2}


'''


@pytest.fixture
def add(project, own_imports):
    """Returns a builder's data, prepared; ``described`` is more of data/<name>/params.yaml."""
    (project / "my_builders.py").write_text(BUILDERS)

    def make(name, **described):
        dataset = config.Dataset(
            name=f"my_builders:{name}", builder=None, version=None, image_size=None, downloads=None
        )
        dataset_folder.add(dataset, project)
        download(dataset)
        section = config.read_description(project / "data" / dataset.name)
        made = prepare(config.describe({**section.model_dump(), **described}, "test"))
        prepared_data.verify(made)
        return made

    yield make
    sys.modules.pop("my_builders", None)


def columns_of(made, kind):
    return [column.name for one in made.features.values() if one.kind == kind for column in one.columns]


def arrays(made, split="train"):
    one = made.splits[split]
    return {name: np.load(path) for name, path in one.features.items()}, np.load(one.labels)


def vocabulary(made, name="category"):
    return json.loads(Path(made.features[name].vocabulary).read_text())


def test_a_dictionary_of_numbers_is_prepared_as_a_table_is(add):
    made = add("WineQuality")
    assert columns_of(made, "number") == ["fixed acidity", "sulphates", "pH"]
    assert (made.target.task, made.target.columns) == ("regression", ("quality",))
    assert made.held_out.num_examples == 80, "a fifth of the training examples"
    features, labels = arrays(made)
    acidity, _, ph = features["number"].T
    assert labels.shape == (320, 1)
    assert (np.rint(6 + 2 * acidity - (ph - 3)) == labels[:, 0]).mean() > 0.99
    assert made.features["number"].mean == pytest.approx(features["number"].astype(np.float64).mean(0).tolist())
    fills = [column.fill for column in made.features["number"].columns]
    assert fills == pytest.approx(features["number"].astype(np.float64).mean(0).tolist(), rel=1e-5)
    wanted = config.load(None, ["input.source=stream"]).input
    with pytest.raises(UserError, match="wine_quality cannot be streamed"):
        sources.choose_source(wanted, made)


def test_texts_are_what_their_values_say_and_labels_are_words(add, capsys):
    made = add("Titanic")
    assert columns_of(made, "number") == ["age", "boat", "sibsp"]
    assert columns_of(made, "category") == ["cabin", "crew", "sex"]
    assert columns_of(made, "text") == ["name"]
    told = capsys.readouterr().err
    assert "edit data/titanic/params.yaml if wrong:" in told
    assert "  text      name" in told
    assert made.target.class_names == ("died", "survived")
    cabin, crew, sex = vocabulary(made)
    assert (set(sex), set(cabin), set(crew)) == ({"male", "female"}, {"A1", "B2", "Unknown"}, {"True", "False"})
    assert made.splits["train"].num_missing["cabin"] > 0, "NA is a missing value, as in a table"
    features, labels = arrays(made)
    places = features["category"]
    is_woman, is_crew = (places[:, 2] == sex.index("female") + 2), (places[:, 1] == crew.index("True") + 2)
    assert ((is_woman | is_crew) == labels).all()
    assert (features["number"][:, 0] == -1).any(), "what the builder writes stays"
    assert "mrs" in vocabulary(made, "name")[0]
    of_one_row = [word for word in vocabulary(made, "name")[0] if word.startswith("doe")]
    assert len(of_one_row) == made.splits["train"].num_examples, "no word of the test split alone"


def test_params_yaml_says_what_a_column_is(add, capsys):
    own = {"boat": "ignore", "name": "ignore", "sibsp": "category", "age": {"kind": "number", "scale": "quantiles"}}
    made = add("Titanic", columns=own)
    assert columns_of(made, "number") == ["age"]
    assert columns_of(made, "category") == ["cabin", "crew", "sex", "sibsp"]
    assert made.features["number"].columns[0].quantiles
    assert "text" not in {one.kind for one in made.features.values()}
    for column, how, message in [
        ("ages", "number", r"dataset.columns: unknown column 'ages': did you mean 'age'\?"),
        ("age", "image", "dataset.columns.age = image: no row has an image that can be used"),
        (
            "cabin",
            "number",
            r"^dataset titanic: the column 'cabin' has the value .+ in row \d+, counted without the header, which is",
        ),
        (
            "cabin",
            {"kind": "category", "missing": "stop"},
            r"cabin.missing = 'stop': \d+ of 400 values are missing",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            add("Titanic", columns={column: how})
    with pytest.raises(UserError, match=r"leaves no column to learn from: .+\(dataset diamonds\)"):
        add("Diamonds", columns={"carat": "ignore", "cut": "ignore"})


def test_the_target_is_no_input_and_missing_values_are_those_of_a_table(add):
    made = add("Penguins")
    assert columns_of(made, "number") == ["body_mass_g"]
    assert columns_of(made, "category") == ["island", "sex"]
    assert made.splits["train"].num_missing == {"body_mass_g": 30, "sex": 100, "island": 1}
    features, _ = arrays(made)
    fill = made.features["number"].columns[0].fill
    assert (features["number"] == np.float32(fill)).sum() == 30
    assert (features["category"][:, 1] == 0).sum() == 100
    assert sorted(vocabulary(made)[1]) == ["FEMALE", "MALE"]

    fewer = add("Penguins", columns={"body_mass_g": {"kind": "number", "missing": "drop"}})
    assert {name: one.num_examples for name, one in fewer.splits.items()} == {"train": 270, "test": 54}
    assert fewer.features["number"].columns[0].fill is None


def test_a_number_that_is_a_category_is_spelled_as_a_person_writes_it(add):
    made = add("Doses", columns={"dose": "category"})
    assert sorted(vocabulary(made)[0]) == ["0.1", "0.25"]
    (column,) = columns_of(made, "category")
    encoder = Encoder(
        prepared_data.encoder_config(made)["features"], prepared_data.encoder_config(made)["vocabularies"]
    )
    places = encoder.encode({column: [0.1, 0.25], "age": [1.0, 1.0]})["category"][:, 0]
    assert (places >= cells.FIRST).all()


def test_examples_without_a_class_are_left_out_and_counted(add, capsys):
    made = add("Unlabelled")
    # A fifth of the 50 examples was held out, of which those are missing that have no class.
    counts = {name: one.num_examples for name, one in made.splits.items()}
    assert set(counts) == {"train", "test"}
    assert sum(counts.values()) == 45
    assert made.held_out.num_examples == counts["test"]
    for split in counts:
        features, labels = arrays(made, split)
        assert (features["number"][:, 0] % 2 == labels).all()
        assert features["number"].max() < 50
    mean = arrays(made)[0]["number"].mean()
    assert made.features["number"].mean == pytest.approx([mean])
    assert made.features["number"].columns[0].fill == pytest.approx(mean), "fitted on those that have a class"
    told = capsys.readouterr().err
    assert "left out of unlabelled: split unsupervised\n" in told
    assert "left out: 5 of 50 rows without a value of dataset.target = 'label'" in told


def test_a_text_of_its_own_for_each_example_is_no_class(add):
    with pytest.raises(UserError, match="its 50 examples have 50 different texts as targets, too many for classes"):
        add("Captions")


def test_truths_and_several_numbers_are_learnt(add):
    made = add("Criteo")
    assert (made.target.task, made.target.class_names) == ("classification", ("False", "True"))
    features, labels = arrays(made)
    assert ((features["number"][:, 0] > 0) == labels).all()

    made = add("Bees")
    assert (made.target.task, made.target.columns) == ("regression", ("wasps_output", "pollen_output"))
    features, labels = arrays(made)
    assert columns_of(made, "image") == ["input"]
    assert labels[:, 0] == pytest.approx(features["input"].mean((1, 2, 3)) / 255, rel=1e-5)

    made = add("Winds")
    assert made.target.columns == ("wanted 0", "wanted 1")
    features, labels = arrays(made)
    assert labels.tolist() == [[row, -row] for row in features["number"][:, 0].tolist()]


def test_names_that_two_columns_share_are_whole_places(add, capsys):
    made = add("Pets")
    told = capsys.readouterr().err
    assert "left out of pets: places (Sequence)" in told
    assert "left out because it contains file names: file" in told
    assert columns_of(made, "number") == ["Age", "of", "PCA 0", "PCA 1"]
    assert columns_of(made, "category") == ["attributes/Fee/label", "attributes/label"]
    assert columns_of(made, "image") == ["photo"]
    features, labels = arrays(made)
    rows = features["number"][:, 0].astype(int)
    assert (features["photo"][:, 0, 0, 0] == rows).all()
    assert labels.tolist() == [[row & 1, row >> 1 & 1, row >> 2 & 1] for row in rows.tolist()]
    encoder = Encoder({name: one.model_dump() for name, one in made.features.items()}, {"category": vocabulary(made)})
    photo = np.full((4, 4, 3), rows[0], np.uint8)
    raw = {"Age": [rows[0]], "of": [rows[0] / 2], "PCA 0": [rows[0]], "PCA 1": [-rows[0]], "photo": [photo]}
    words = {
        "attributes/Fee/label": ["usd" if rows[0] % 2 else "eur"],
        "attributes/label": [["cat", "dog", "cow"][rows[0] % 3]],
    }
    encoded = encoder.encode(raw | words)
    for name, array in encoded.items():
        assert (array[0] == features[name][0]).all(), name


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        (
            "Codes",
            {"size": "ignore"},
            r"the column 'code' has the value 'n/k' in row \d+",
        ),
        (
            "Codes",
            {"code": "ignore"},
            r"the column 'size' has the value .* in row \d+, .* does not fit in float32",
        ),
        ("Places", {"filename": "ignore"}, r"dataset.columns = filename: an example of places is one image"),
    ],
)
def test_what_cannot_be_a_column_is_refused(add, name, columns, message):
    with pytest.raises(UserError, match=message) as caught:
        add(name, columns=columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("wine_quality.red", "titanic", "diamonds", "penguins.simple", "forest_fires", "criteo", "hillstrom", "radon"),
        *("german_credit_numeric", "iris", "pet_finder", "simpte", "lfw", "bee_dataset", "places365_small"),
    ],
)
def test_stock_builders_enter(name, tmp_path):
    found = builders.supervised(builders.build(name, None, tmp_path))
    assert set(found.wanted).isdisjoint(found.given)
    assert len(found.names) == len(found.given)

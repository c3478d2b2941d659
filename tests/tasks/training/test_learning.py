"""Models that no other test trains learn what real data or a grammar hold, far beyond guessing."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

from tasks import config
from tasks.data import kinds
from tasks.evaluate import evaluate
from tasks.prepare import prepare

pytestmark = pytest.mark.slow

RATE = "schedule={kind: constant, learning_rate: 0.003}"


def prepared_from(source: str, **values: object):
    """Return a dataset as `stratagem data add` prepares it."""
    dataset = config.describe({"name": "mine", "source": source, **values}, "this test")
    if dataset.is_guessed:
        dataset, _ = kinds.find_kind(dataset.kind).guess(dataset)
    Path("data/mine").mkdir(parents=True)
    Path("data/mine/params.yaml").write_text(yaml.safe_dump({"dataset": dataset.model_dump(mode="json")}))
    return prepare(dataset)


def reviews():
    """Texts of which a word says the class, and `not` before it the other one: no word alone tells."""
    generator = np.random.default_rng(0)
    good, bad = ("good", "fine", "great"), ("bad", "poor", "awful")
    rows = []
    for _ in range(1000):
        likes, denied = generator.integers(0, 2, 2).tolist()
        word = str(generator.choice(good if likes else bad))
        noun = str(generator.choice(["film", "meal", "book"]))
        rows.append((f"the {noun} was {'not ' if denied else ''}{word}", "yes" if likes != denied else "no"))
    pd.DataFrame(rows, columns=["text", "liked"]).to_csv("mine.csv", index=False)
    return prepared_from("mine.csv", kind="table", target="liked", columns={"text": "text"})


def cells():
    """The cells of breast cancer, with one of their numbers as a word, too."""
    data = load_breast_cancer(as_frame=True)
    size = pd.cut(data.frame["mean area"], [0, 400, 800, 5000], labels=["small", "middle", "large"])
    named = data.frame.assign(size=size, target=data.target_names[data.target])
    named.to_csv("mine.csv", index=False)
    return prepared_from("mine.csv", kind="table", target="target")


def large_digits():
    """The digits at 32 x 32."""
    data = load_digits()
    images = [
        np.asarray(Image.fromarray((one * 15.9).astype(np.uint8)).resize((32, 32), Image.Resampling.BILINEAR))
        for one in data.images
    ]
    np.savez("mine.npz", x=np.stack(images)[..., None], y=data.target)
    return prepared_from("mine.npz", kind="arrays")


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("model", "made", "epochs", "reached"),
    [
        pytest.param("{name: transformer, options: {}}", reviews, 40, 0.95, marks=pytest.mark.exhaustive),
        ("{name: wide_deep, options: {}}", cells, 8, 0.92),
        ("{name: resnet, options: {filters: 8}}", large_digits, 8, 0.9),
    ],
    ids=["transformer", "wide_deep", "resnet"],
)
def test_a_model_learns(project, train, model, made, epochs, reached):
    prepared = made()
    overrides = ("dataset.name=mine", f"model={model}", "optimizer={kind: adam}", f"train.epochs={epochs}", RATE)
    result = train(prepared, *overrides)
    settings = config.load("../small.yaml", overrides)
    assert evaluate(settings, prepared, result).metrics["test/accuracy"] > reached


@pytest.mark.exhaustive
def test_the_model_of_a_table_that_the_page_of_own_models_shows_learns(project, train):
    page = Path("docs/own-model.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# my_tables.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    Path("my_tables.py").write_text(block)
    prepared = cells()
    assert {feature.kind for feature in prepared.features.values()} == {"number", "category"}
    overrides = ("dataset.name=mine", "model={name: 'my_tables:build', options: {units: 16}}", "train.epochs=8", RATE)
    result = train(prepared, *overrides)
    assert evaluate(config.load("../small.yaml", overrides), prepared, result).metrics["test/accuracy"] > 0.92

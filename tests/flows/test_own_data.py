"""A user's own photos, tables and texts become models by two commands, under every kind of strategy: killed in the
middle they end with the same bits, and what MLflow loads in a clean process takes raw inputs."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas
import pytest
from PIL import Image
from sklearn.datasets import load_diabetes, load_digits, load_wine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def photos(folder):
    """240 digits in colours, as JPEGs of many sizes."""
    digits, generator = load_digits(), np.random.default_rng(0)
    for number in range(240):
        shades = (digits.images[number] * 255 / 16).astype(np.uint8)
        place = folder / "photos" / f"digit {digits.target[number]}" / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.stack([shades, 255 - shades, shades // 2], -1))
        image.resize(tuple(int(side) for side in generator.integers(20, 50, 2))).save(place)
    return folder / "photos"


def wine(folder):
    """178 wines of three makers: numbers, of which one is missing, and a category."""
    table = load_wine(as_frame=True).frame
    table["maker"] = table.pop("target").map({0: "barolo", 1: "grignolino", 2: "barbera"})
    table["colour"] = np.where(table["hue"] > 1, "light", "dark")
    table.loc[3, "ash"] = np.nan
    table.to_csv(folder / "wine.csv", index=False)
    return folder / "wine.csv"


def diabetes(folder):
    """442 patients: ten numbers, and how far the disease went in a year."""
    load_diabetes(as_frame=True).frame.to_csv(folder / "diabetes.csv", index=False)
    return folder / "diabetes.csv"


def reviews(folder):
    """600 sentences of a grammar, of which one word says whether they praise."""
    generator = np.random.default_rng(0)
    words = [
        "the",
        "film",
        "was",
        "a",
        "story",
        "of",
        "two",
        "people",
        "in",
        "town",
        "with",
        "music",
        "and",
        "long",
        "scenes",
    ]
    telling = {"good": ["great", "lovely", "wonderful", "superb"], "bad": ["awful", "boring", "dreadful", "terrible"]}
    rows = []
    for verdict in generator.choice(["good", "bad"], 600):
        text = [str(word) for word in generator.choice(words, 8)]
        text.insert(int(generator.integers(9)), str(generator.choice(telling[verdict])))
        rows.append((" ".join(text), verdict))
    pandas.DataFrame(rows, columns=["review", "verdict"]).to_csv(folder / "reviews.csv", index=False)
    return folder / "reviews.csv"


USE = """
import json, pathlib, sys
import mlflow, numpy, pandas
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
source = sys.argv[3]
if source.endswith(".csv"):
    raw = pandas.read_csv(source)
else:
    raw = numpy.array([file.read_bytes() for file in sorted(pathlib.Path(source).rglob("*.jpg"))], object)
print(json.dumps(numpy.asarray(model.predict(raw)).tolist()))
"""

# What `data add` is given, the strategy, the model that is chosen, what is reached, and that it is better than.
WAYS = {
    "photos": (
        photos, ["--set", "dataset.image_size=[32,32]"],
        ["strategy.kind=mirrored", "strategy.devices=2", "train.epochs=12"], "photos-vgg", "test/accuracy", 0.5,
    ),
    "wine": (wine, ["--target", "maker"], ["strategy.kind=multi_worker"], "wine-mixed", "test/accuracy", 0.9),
    "diabetes": (
        diabetes, ["--target", "target"], ["strategy.kind=data_parallel", "strategy.devices=2"],
        "diabetes-mixed", "test/r2", 0.3,
    ),
    "reviews": (
        reviews, ["--target", "verdict"], ["strategy.kind=one_device"], "reviews-text_cnn", "test/accuracy", 0.95
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WAYS))
def test_own_data_become_a_model_that_takes_raw_inputs(name, project, run, tmp_path):
    write, options, strategy, model_name, metric, at_least = WAYS[name]
    source = write(tmp_path)
    added = run(["stratagem", "data", "add", source, *options])
    assert added.returncode == 0, added.stderr
    assert f"stratagem run --set dataset.name={name}" in added.stdout
    same = [*strategy, "train.deterministic=true", "checkpoint.every_steps=5"]
    train = ["stratagem", "run", "--json", "--set", f"dataset.name={name}"]
    train += [word for override in same for word in ("--set", override)]

    whole = run(train)
    assert whole.returncode == 0, whole.stderr
    assert f"chosen for {name}: " in whole.stderr
    summary = json.loads(whole.stdout)
    assert summary["metrics"][metric] > at_least
    assert summary["model_version"] == f"{model_name}/1"

    cut = killed_in_the_middle([*train, "--fresh"], project)
    rest = run(train)
    assert rest.returncode == 0, rest.stderr
    assert f"resuming run {cut}" in rest.stderr
    resumed = json.loads(rest.stdout)
    assert resumed["run_id"] == cut
    assert resumed["weights_digest"] == summary["weights_digest"]
    assert resumed["metrics"] == summary["metrics"]

    # The model of its registered version, where nothing of the project is.
    manifest = json.loads((project / "data" / name / "prepared" / "manifest.json").read_text())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store, uri = f"sqlite:///{project}/mlruns/mlflow.db", f"models:/{model_name}@challenger"
    without_us = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    used = subprocess.run(
        [sys.executable, "-P", "-c", USE, store, uri, str(source)],
        capture_output=True, text=True, cwd=elsewhere, env=without_us, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    outputs = np.array(json.loads(used.stdout.splitlines()[-1]))
    target = manifest["target"]
    if name == "diabetes":
        table = pandas.read_csv(source)
        error = np.abs(outputs[:, 0] - table["target"]).mean()
        assert error < np.abs(table["target"] - table["target"].mean()).mean() * 0.75
        return
    taken = [target["class_names"][number] for number in outputs.argmax(1)]
    if name == "photos":
        wanted = [file.parent.name for file in sorted(source.rglob("*.jpg"))]
    else:
        wanted = pandas.read_csv(source)[target["columns"][0]].tolist()
    assert (np.array(taken) == np.array(wanted)).mean() > at_least


def killed_in_the_middle(command, project):
    """Kill a run and all that it started once it has a checkpoint; return its id."""
    before = {path.name for path in (project / "mlruns" / "runs").iterdir()}
    with (project / "killed.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None:
                new = [path for path in (project / "mlruns" / "runs").iterdir() if path.name not in before]
                if new and len([one for one in new[0].glob("checkpoints/*") if one.name.isdigit()]) >= 2:
                    break
                time.sleep(0.05)
            assert process.poll() is None, (project / "killed.log").read_text()
            os.killpg(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
    return new[0].name

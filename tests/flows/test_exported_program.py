"""predict.py of an exported folder, where nothing of the project is: what it says of raw values is what the command
`stratagem predict` says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tasks import config
from tasks.operations import pipeline
from tasks.serving import formats
from tasks.serving.export import export
from tasks.system.errors import UserError

pytestmark = pytest.mark.slow

# What its weights are rounded to, it may be off by.
ALLOWED = {"litert_quantized": 0.2}
# In a program of another folder: each kind of raw value that there is.
PROGRAM = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("exported", sys.argv[1] + "/predict.py")
exported = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exported)
model = exported.load(sys.argv[1])
given = json.loads(sys.argv[2])
found = {}
if "files" in given:
    paths = [Path(name) for name in given["files"]]
    found["paths"], found["bytes"] = model(paths), model([path.read_bytes() for path in paths])
for name in ("texts", "columns"):
    if name in given:
        found[name] = model(given[name])
print(json.dumps({"names": list(model.names)} | {name: one.tolist() for name, one in found.items()}))
"""


def draw_pictures(folder: Path) -> None:
    digits = load_digits()
    for number in np.flatnonzero(digits.target < 3):
        place = folder / "digits3" / ["zero", "one", "two"][digits.target[number]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * (255 / 16)).astype("uint8")).save(place / f"{number}.png")
    (folder / "asked").mkdir()
    endings = ["png", "jpg", "bmp", "webp", "tif", "gif"]
    for number, (image, ending) in enumerate(zip(digits.images[-6:], endings, strict=True)):
        picture = Image.fromarray((image * (255 / 16)).astype("uint8")).convert("RGB")
        picture.resize((70, 50 + number)).save(folder / "asked" / f"{number}.{ending}")
    (folder / "asked" / "3a.png").write_bytes((folder / "asked" / "0.png").read_bytes()[:90])


def write_flats(folder: Path) -> None:
    generator = np.random.default_rng(0)
    rooms, town = generator.integers(1, 7, 300), generator.choice(["Kiel", "Jena", "Ulm"], 300)
    rent = 200.0 * rooms + 150 * (town == "Ulm") + generator.normal(0, 20, 300)
    since = pandas.Timestamp("2020-01-01") + pandas.to_timedelta(generator.integers(0, 2000, 300), "D")
    table = pandas.DataFrame({"rooms": rooms, "town": town, "since": since.strftime("%Y-%m-%d"), "rent": rent.round(2)})
    table.to_csv(folder / "flats.csv", index=False)
    rows = table.drop(columns="rent").astype(str).head(5).to_csv(index=False, sep=";").splitlines()
    (folder / "asked.csv").write_text("\n".join([*rows, "many;Ulm;2021-05-01", "3;Bonn;;", "4;;2022-02-28", ""]))


def write_reviews(folder: Path) -> None:
    generator = np.random.default_rng(0)
    verdicts = generator.choice(["good", "bad"], 200)
    telling = {"good": ["great", "lovely"], "bad": ["awful", "boring"]}
    film = [" ".join(f"word{word}" for word in words) for words in generator.integers(0, 20, (200, 8))]
    texts = [f"{words}, {generator.choice(telling[one])}!" for words, one in zip(film, verdicts, strict=True)]
    pandas.DataFrame({"review": texts, "verdict": verdicts}).to_csv(folder / "reviews.csv", index=False)
    asked = [{"review": texts[0]}, {"review": "Größe: lovely"}, ["no object"], {"review": texts[1]}]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))


def save_points(folder: Path) -> None:
    points = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    np.savez(folder / "points.npz", x=points, y=(points > 0).sum(1))
    np.save(folder / "asked.npy", points[:4])


DATA = {"digits3": (draw_pictures, []), "flats": (write_flats, ["rent"]), "reviews": (write_reviews, ["verdict"])}
# Arrays from the start: no raw values are known of them.
DATA["points"] = (save_points, [])


@pytest.fixture(scope="module")
def trained(prepared_template, tmp_path_factory):
    """A project with a run of each kind of data, ids, what is asked of each, and what `stratagem predict` said."""
    folder = tmp_path_factory.mktemp("exported")
    project = folder / "project"
    shutil.copytree(prepared_template, project, symlinks=True)

    def run(*command, codes=(0,)):
        environment = os.environ | {"PYTHONPATH": str(project)}
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in codes, done.stderr
        return done.stdout

    runs, asked, said = {}, {}, {}
    for name, (make, target) in DATA.items():
        make(project)
        source = next(str(path) for path in project.glob(f"{name}*"))
        run("stratagem", "data", "add", source, *(word for column in target for word in ("--target", column)))
        trained = run("stratagem", "train", "--set", f"dataset.name={name}", "--set", "train.epochs=2", "--json")
        runs[name] = json.loads(trained)["run_id"]
    asked = {
        "digits3": sorted(str(path.relative_to(project)) for path in (project / "asked").iterdir()),
        "flats": ["asked.csv"],
        "reviews": ["asked.jsonl"],
        "points": ["asked.npy"],
    }
    for name, files in asked.items():
        lines = run(
            "stratagem", "predict", *files, "--model", runs[name], "--format", "jsonl", codes=(0, 1)
        ).splitlines()
        said[name] = [json.loads(line) for line in lines]
        assert (name == "points") is all(line["error"] is None for line in said[name])
    return project, runs, asked, said


def alone(*command, cwd, given=None):
    """Run Python in a clean process, with nothing of the project to import."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = kept | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, input=given, capture_output=True, text=True, check=False
    )


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    "format",
    [
        pytest.param(name, marks=() if name in ("keras", "onnx") else pytest.mark.exhaustive)
        for name in config.names_of("serving/formats")
    ],
)
def test_each_format_says_of_raw_values_what_the_command_says(trained, tmp_path, monkeypatch, format):
    try:
        formats.find_format(format)
    except UserError as error:
        pytest.skip(str(error))
    project, runs, asked, said = trained
    monkeypatch.chdir(project)
    allowed = ALLOWED.get(format, 1e-4)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name, run_id in runs.items():
        folder = tmp_path / "of" / name
        settings, prepared, run, which = pipeline.find_model(run_id, None)
        made = export(settings, prepared, run, format, which, str(folder))
        assert "predict.py" in made.files
        for file in asked[name]:
            shutil.copytree(project / "asked", elsewhere / "asked", dirs_exist_ok=True)
            shutil.copyfile(project / file, elsewhere / file)
        # One of them by standard input.
        piped = (project / asked[name][0]).read_text() if name == "reviews" else None
        done = alone(folder / "predict.py", *(asked[name] if piped is None else "-"), cwd=elsewhere, given=piped)
        assert done.returncode == (name != "points"), done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert {line["source"] for line in lines} == ({"-"} if piped else set(asked[name]))
        number = "prediction" if name == "flats" else "probability"
        close = {"source", number, *(["prediction"] if format in ALLOWED else [])}
        for line, expected in zip(lines, said[name], strict=True):
            assert line.keys() == expected.keys()
            assert {key for key in line if line[key] != expected[key]} <= close, (line, expected)
            if expected["error"] is None:
                off = abs(line[number] - expected[number]) / (prepared.target.deviation or [1])[0]
                assert off <= allowed, (line, expected)


def test_a_program_asks_the_folder_as_a_function(trained, tmp_path, monkeypatch):
    project, runs, _, said = trained
    monkeypatch.chdir(project)
    # What the command said of whole examples; as bytes, TIFF is refused.
    right = {
        name: [line for line in lines if line["error"] is None and not line["source"].endswith(".tif")]
        for name, lines in said.items()
    }
    table = [row.split(";") for row in (project / "asked.csv").read_text().splitlines()]
    rows = [table[line["row"]] for line in right["flats"]]
    flats = dict(zip(table[0], map(list, zip(*rows, strict=True)), strict=True))
    asked_texts = (project / "asked.jsonl").read_text().splitlines()
    texts = [json.loads(asked_texts[line["row"] - 1])["review"] for line in right["reviews"]]
    whole = [str(project / line["source"]) for line in right["digits3"]]
    given = {
        "digits3": {"files": whole},
        "flats": {"columns": flats},
        "reviews": {"texts": texts, "columns": {"review": texts}},
    }
    for name, values in given.items():
        settings, prepared, run, which = pipeline.find_model(runs[name], None)
        export(settings, prepared, run, "onnx", which, str(tmp_path / name))
        done = alone("-c", PROGRAM, tmp_path / name, json.dumps(values), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        values = {key: np.array(one) for key, one in found.items() if key != "names"}
        assert len(values) == {"digits3": 2, "flats": 1, "reviews": 2}[name]
        for one in values.values():
            assert one.shape == (len(right[name]), len(found["names"]))
            if name == "flats":
                expected, allowed = [line["prediction"] for line in right[name]], 1e-4 * prepared.target.deviation[0]
            else:
                expected, allowed = [line["probability"] for line in right[name]], 1e-4
                best = [found["names"][place] for place in one.argmax(1)]
                assert best == [line["prediction"] for line in right[name]]
            np.testing.assert_allclose(one.max(1), expected, rtol=0, atol=allowed)


def test_what_the_program_does_not_take_is_one_message(trained, tmp_path, monkeypatch):
    project, runs, _, _ = trained
    monkeypatch.chdir(project)
    settings, prepared, run, which = pipeline.find_model(runs["flats"], None)
    export(settings, prepared, run, "onnx", which, str(tmp_path / "out"))
    (tmp_path / "other.csv").write_text("rooms,place\n1,Ulm\n")
    (tmp_path / "latin.csv").write_bytes("rooms,town,since\n1,Köln,\n".encode("latin-1"))
    for names, message in {
        ("other.csv",): "error: 'other.csv' is missing the columns 'since', 'town'. It has: 'rooms', 'place'\n",
        ("none.csv",): "error: 'none.csv' cannot be read ([Errno 2] No such file or directory: 'none.csv')\n",
    }.items():
        done = alone(tmp_path / "out" / "predict.py", *names, cwd=tmp_path)
        assert done.returncode == 2
        assert re.match(re.escape(message), done.stderr), done.stderr
        assert done.stderr.count("\n") == 1
    latin = alone(tmp_path / "out" / "predict.py", "latin.csv", cwd=tmp_path)
    assert (latin.returncode, latin.stderr) == (1, "")
    assert json.loads(latin.stdout)["error"] == "is not utf-8: set its encoding, such as --encoding latin-1"
    latin = alone(tmp_path / "out" / "predict.py", "latin.csv", "--encoding", "latin-1", cwd=tmp_path)
    assert (latin.returncode, json.loads(latin.stdout)["error"]) == (0, None)
    shown = alone(tmp_path / "out" / "predict.py", "--help", cwd=tmp_path)
    assert (shown.returncode, "python FOLDER/predict.py rows.csv" in shown.stdout) == (0, True)
    assert alone(tmp_path / "out" / "predict.py", cwd=tmp_path).returncode == 2

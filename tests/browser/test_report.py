"""A run's report as a browser shows it: it fits a telephone, asks nobody for anything, and has no error to tell."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_diabetes

from tasks.reports import page as run_page
from tests.browser.conftest import asked, said
from tests.tasks import made_up

pytestmark = pytest.mark.slow

WIDTHS = [400, 1200]


def patients():
    """A number to learn of numbers, some of them missing, and of days; the clinic is not an input."""
    table, draw = load_diabetes(as_frame=True).frame, np.random.default_rng(0)
    days = pandas.to_timedelta(draw.integers(0, 900, len(table)), "D")
    table = table.assign(seen=pandas.Timestamp("2020-01-01") + days, clinic=draw.choice(["north", "south"], len(table)))
    table.loc[:20, "bmi"] = np.nan
    return table


def weather():
    """Several labels to learn of numbers and a category."""
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(400, 3))
    table = pandas.DataFrame(numbers, columns=["temperature", "pressure", "wind"])
    labels = numbers + draw.normal(size=numbers.shape) > 0.3
    return table.assign(
        station=draw.choice(["coast", "hills", "town"], 400), **dict(zip(LABELS, labels.astype(int).T, strict=True))
    )


def reviews():
    """A class to learn of a text, of which one in five is wrong."""
    draw, words = np.random.default_rng(0), ["the", "film", "was", "a", "story", "of", "two", "people", "with", "music"]
    verdicts = draw.choice(["good", "bad"], 400)
    told = np.where(draw.random(400) < 0.8, verdicts, "bad")
    texts = [" ".join([*draw.choice(words, draw.integers(4, 30)), f"{one} indeed"]) for one in told]
    return pandas.DataFrame({"review": texts, "verdict": verdicts})


LABELS = ("rain", "frost", "storm")
METADATA = ("--set", "dataset.columns.clinic=ignore", "--set", "dataset.metadata.clinic=category")
# Each task: its table, what `data add` is told of it, how the run is told to be short, and what its page must say.
TASKS = {
    "regression": (
        patients, ("--target", "target", *METADATA), (),
        ["Residuals", "Largest errors", "clinic: north", "residuals by predicted target", "missing in train", "2020-0"],
    ),
    "multilabel": (
        weather, ("--target", ",".join(LABELS)), (),
        ["By label", "Calibration", "Most confident mistakes", "label: frost", "station: town", "% for "],
    ),
    "text": (
        reviews, ("--target", "verdict"), ("--set", "model.options={embedding: 16, filters: 8}"),
        ["By class", "Confusion matrix", "Most confident mistakes", "words of review: lowest quarter", "indeed"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(made_once, project_template):
    """The pages of a small run of each task, by task: made once for all tests."""

    def make(folder: Path) -> None:
        project = folder / "project"
        subprocess.run(["cp", "-a", project_template, project], check=True)
        pages = {}
        for task, (table, added, set_, _) in TASKS.items():
            table().to_csv(project / f"{task}.csv", index=False)
            commands = (
                ["stratagem", "data", "add", f"{task}.csv", *added],
                ["stratagem", "run", "--set", f"dataset.name={task}", "--set", "train.epochs=3", *set_, "--json"],
            )
            for command in commands:
                done = subprocess.run(
                    command, cwd=project, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": str(project)},
                )  # fmt: skip
                assert done.returncode == 0, done.stderr
            pages[task] = str(project / "mlruns" / "runs" / json.loads(done.stdout)["run_id"] / "report/report.html")
        (folder / "pages.json").write_text(json.dumps(pages))

    return json.loads((made_once("reports", make) / "pages.json").read_text())


def look_at(shown, file: Path, width: int) -> None:
    """See that a page fits so many pixels, has no drawing or picture without words, and leaves nothing of a drawing
    beside it; that it has a light and a dark ground; and that it asks for nothing, and tells no error."""
    with shown.heard() as events:
        shown.open_at(file.as_uri(), width)
        assert shown.run("[...document.images].filter(one => !one.alt).length") == 0
        assert shown.run("document.querySelectorAll('figure svg').length") > 3
        assert shown.run("document.querySelectorAll('svg:not([role=img][aria-label])').length") == 0
        assert shown.run("[...document.querySelectorAll('th')].filter(one => !one.innerText.trim()).length") == 0
        beside = shown.run(
            "[...document.querySelectorAll('svg')].flatMap(one => [...one.querySelectorAll('text, use, g > path')]"
            ".filter(part => {const outer = one.getBoundingClientRect(), inner = part.getBoundingClientRect();"
            "  return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1"
            "}).map(part => `${one.ariaLabel}: ${part.textContent}`))"
        )
        grounds = shown.in_each_scheme("getComputedStyle(document.body).backgroundColor")
    assert beside == []
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    assert asked(events) == [file.as_uri()]
    assert said(events) == []


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_fits_and_is_all_there(tmp_path, monkeypatch, page, width):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))
    labels, logits = made_up.classification(2000, 100)
    names = tuple(f"a rather long name of the class {place}" for place in range(100))
    written = run_page.write(made_up.run(labels, logits, class_names=names)).page
    shown = page("about:blank")
    look_at(shown, written, width)
    assert shown.run("document.images.length") > 10


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("task", "width"),
    [
        pytest.param(task, width, marks=() if width == WIDTHS[number % 2] else pytest.mark.exhaustive)
        for number, task in enumerate(TASKS)
        for width in WIDTHS
    ],
)
def test_the_report_of_each_task_fits_and_is_all_there(reports, page, task, width):
    shown = page("about:blank")
    look_at(shown, Path(reports[task]), width)
    text = shown.run("document.body.innerText + [...document.querySelectorAll('svg')].map(one => one.ariaLabel).join()")
    assert [words for words in TASKS[task][-1] if words not in text] == []

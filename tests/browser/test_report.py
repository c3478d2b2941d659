"""Pages of runs, comparisons and sweeps in a browser: they fit a telephone, ask nobody, and show no error."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_diabetes

from tasks import sweeps
from tasks.reports import page as run_page
from tasks.reports.comparison import comparison_pages, findings
from tasks.reports.sweep import sweep_page
from tests.browser.conftest import asked, said
from tests.tasks import made_up
from tests.tasks.test_comparison_page import rows
from tests.tasks.test_findings import compared
from tests.tasks.test_sweeps import ROOT, SPACE, sweep_of

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
        ["Largest errors", "clinic: north", "2020-0", "how much worse test r2 gets: "],
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
def reports(request, tmp_path_factory, project_template, one_prefect_server):
    """The pages of a small run of each task that the tests of this run ask for, by task."""
    items = [item.callspec.params for item in request.session.items if "reports" in getattr(item, "fixturenames", ())]

    project = tmp_path_factory.mktemp("reports") / "project"
    subprocess.run(["cp", "-a", project_template, project], check=True)
    pages = {}
    for task in {params["task"] for params in items}:
        table, added, set_, _ = TASKS[task]
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
        pages[task] = project / "mlruns" / "runs" / json.loads(done.stdout)["run_id"] / "report/report.html"
    return pages


def look_at(shown, file: Path, width: int) -> None:
    """See that a page fits so many pixels, has no drawing or picture without words, and leaves nothing of a drawing
    beside it; that it has a light and a dark ground; and that it asks for nothing, and tells no error."""
    with shown.heard() as events:
        shown.open_at(file.as_uri(), width)
        assert shown.run("[...document.images].filter(one => !one.alt).length") == 0
        assert shown.run("document.querySelectorAll('figure svg').length") >= 3
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
    look_at(shown, reports[task], width)
    text = shown.run("document.body.innerText + [...document.querySelectorAll('svg')].map(one => one.ariaLabel).join()")
    assert [words for words in TASKS[task][-1] if words not in text] == []


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_comparison_fits_and_is_all_there(tmp_path, page, width):
    comparison = compared(*rows())
    comparison = comparison.model_copy(update={"finding": findings(comparison)})
    written, _ = comparison_pages(comparison, tmp_path)
    shown = page("about:blank")
    look_at(shown, written, width)
    lines = shown.in_each_scheme("getComputedStyle(document.querySelector('svg [style*=\"var(--c0)\"]')).stroke")
    assert lines == {"light": "rgb(0, 104, 181)", "dark": "rgb(98, 182, 243)"}


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_of_a_sweep_fits_and_is_all_there(tmp_path, monkeypatch, page, width):
    """With choices that are long texts, and a trial that failed."""
    monkeypatch.chdir(made_up.project(tmp_path / "here"))
    shutil.copytree(ROOT / "recipes", "recipes")
    Path("mine.yaml").write_text(SPACE)
    written = sweep_page(sweep_of(sweeps.load("mine.yaml")), tmp_path / "sweep.html")
    shown = page("about:blank")
    look_at(shown, written, width)
    assert shown.run("document.querySelectorAll('svg').length") == 6

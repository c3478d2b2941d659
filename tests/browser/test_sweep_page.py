"""A sweep's page as a browser shows it: it fits a telephone, asks nobody for anything, and says no error."""

import shutil

import pytest

from tasks import reports, sweeps
from tests.browser.conftest import asked, said
from tests.tasks import made_up
from tests.tasks.test_sweeps import ROOT, SPACE, sweep_of

pytestmark = pytest.mark.slow


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The page of a sweep, with choices that are long texts, and a trial that failed."""
    monkeypatch.chdir(made_up.project(tmp_path / "here"))
    shutil.copytree(ROOT / "recipes", "recipes")
    (tmp_path / "here" / "mine.yaml").write_text(SPACE)
    return reports.sweep_page(sweep_of(sweeps.load("mine.yaml")), tmp_path / "sweep.html")


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_is_all_there(written, page, width):
    shown = page("about:blank")
    with shown.heard() as events:
        shown.open_at(written.as_uri(), width)
        # Nothing that is drawn lies beside its drawing.
        assert shown.run(
            "[...document.querySelectorAll('svg')].every(one => [...one.querySelectorAll('text, use, g > path')].every("
            "part => {const outer = one.getBoundingClientRect(), inner = part.getBoundingClientRect();"
            "  return inner.left > outer.left - 1 && inner.right < outer.right + 1 && inner.bottom < outer.bottom + 1"
            "}))"
        )
        assert shown.run("document.querySelectorAll('svg[role=img][aria-label]').length") == 6
        fills = shown.in_each_scheme("getComputedStyle(document.body).backgroundColor")
    assert fills == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    assert asked(events) == [written.as_uri()]
    assert said(events) == []

"""A run's report as a browser shows it: it fits a telephone, asks nobody for anything, and has no error to tell."""

import pytest

from tasks.report import page as run_page
from tests.browser.conftest import asked, said
from tests.tasks import made_up

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("width", [400, 1200])
def test_the_report_fits_and_is_all_there(tmp_path, monkeypatch, page, width):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))
    labels, logits = made_up.classification(2000, 100)
    names = tuple(f"a rather long name of the class {place}" for place in range(100))
    written = run_page.write(made_up.run(labels, logits, class_names=names))
    shown = page("about:blank")
    with shown.heard() as events:
        shown.open_at(written.as_uri(), width)
        assert shown.run("document.images.length") > 10
        grounds = shown.in_each_scheme("getComputedStyle(document.body).backgroundColor")
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    assert asked(events) == [written.as_uri()]
    assert said(events) == []

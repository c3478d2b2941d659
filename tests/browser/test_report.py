"""A run's report as a browser shows it: it fits a telephone, asks nobody for anything, and has no error to tell."""

import pytest

from tasks.report import page as run_page
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
        shown.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        shown.call("Page.navigate", url=written.as_uri())
        shown.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")
        shown.run("[...document.querySelectorAll('details')].forEach(one => one.open = true)")
        assert shown.run("window.innerWidth") == width
        assert shown.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert shown.run("[...document.images].filter(one => !one.naturalWidth).length") == 0
        assert shown.run("document.images.length") > 10
        grounds = {
            scheme: (
                shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]),
                shown.run("getComputedStyle(document.body).backgroundColor"),
            )[1]
            for scheme in ("light", "dark")
        }
    assert grounds == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [written.as_uri()], "what it asks for"
    said = [
        one
        for one in events
        if one["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert said == []

"""A comparison's page as a browser shows it: it fits a telephone, asks nobody for anything, and says no error."""

import pytest

from tasks.report import comparison_html, concluded
from tests.tasks.test_comparison_page import rows
from tests.tasks.test_findings import compared

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_is_all_there(tmp_path, page, width):
    written = comparison_html.write(concluded(compared(*rows())), tmp_path / "comparison.html")
    shown = page("about:blank")
    with shown.heard() as events:
        shown.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        shown.call("Page.navigate", url=written.as_uri())
        shown.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")
        assert shown.run("window.innerWidth") == width
        assert shown.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        # Nothing that is drawn lies beside its drawing.
        assert shown.run(
            "[...document.querySelectorAll('svg')].every(one => [...one.querySelectorAll('text, rect')].every(part => {"
            "  const outer = one.getBoundingClientRect(), inner = part.getBoundingClientRect();"
            "  return inner.left > outer.left - 1 && inner.right < outer.right + 1 && inner.bottom < outer.bottom + 1"
            "}))"
        )
        fills = {
            scheme: (
                shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]),
                shown.run("getComputedStyle(document.querySelector('rect.p1')).fill"),
            )[1]
            for scheme in ("light", "dark")
        }
    assert fills == {"light": "rgb(209, 87, 10)", "dark": "rgb(255, 159, 90)"}
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert asked == [written.as_uri()]
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    assert [one for one in events if one["method"] in kinds] == []

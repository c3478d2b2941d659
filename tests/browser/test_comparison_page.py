"""A comparison's page as a browser shows it: it fits a telephone, asks nobody for anything, and says no error."""

import pytest

from tasks.reports import comparison_pages, concluded
from tests.browser.conftest import asked, said
from tests.tasks.test_comparison_page import rows
from tests.tasks.test_findings import compared

pytestmark = pytest.mark.slow


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_fits_and_is_all_there(tmp_path, page, width):
    written, _ = comparison_pages(concluded(compared(*rows())), tmp_path)
    shown = page("about:blank")
    with shown.heard() as events:
        shown.open_at(written.as_uri(), width)
        # Nothing that is drawn lies beside its drawing.
        assert shown.run(
            "[...document.querySelectorAll('svg')].every(one => [...one.querySelectorAll('text, use, g > path')].every("
            "part => {"
            "  const outer = one.getBoundingClientRect(), inner = part.getBoundingClientRect();"
            "  return inner.left > outer.left - 1 && inner.right < outer.right + 1 && inner.bottom < outer.bottom + 1"
            "}))"
        )
        fills = shown.in_each_scheme("getComputedStyle(document.querySelector('svg [style*=\"var(--c1)\"]')).fill")
    assert fills == {"light": "rgb(200, 80, 10)", "dark": "rgb(255, 159, 90)"}
    assert asked(events) == [written.as_uri()]
    assert said(events) == []

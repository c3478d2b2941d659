"""The site of docs/ as a browser shows it from its folder: it fits a telephone and asks nobody for anything."""

import pytest

from tests import website
from tests.browser.conftest import asked

pytestmark = pytest.mark.slow
PAGES = ["index", "reference", "tutorials/photos"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return website.build(tmp_path_factory.mktemp("docs")).parent


@pytest.mark.in_ci(0, 3)
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_stays_here(site, page, name, width):
    address = (site / f"{name}.html").as_uri()
    shown = page("about:blank")
    with shown.heard() as events:
        shown.open_at(address, width)
    wanted = asked(events)
    assert address in wanted
    assert [url for url in wanted if not url.startswith(site.as_uri())] == []
    thrown = [one["params"] for one in events if one["method"] == "Runtime.exceptionThrown"]
    assert thrown == []

"""The pages that are written from the code are what the code says; the site of all pages is whole and asks nobody."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tasks import config
from tasks.system import messages
from tests import reference, website

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_that_is_written_from_the_code_is_not_stale(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == reference.renewed(name, page), f"docs/{name} says otherwise than the code: run make docs"


def test_every_setting_has_a_meaning():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\) \| ", row) for row in page.splitlines() if row.startswith("| `")]
    kinds = set(re.findall(r"^`(\w+\.kind)` \(default `\w+`\) is one of:$", page, re.MULTILINE))
    assert {key for key, _ in config.fields_of(config.Settings)} <= {row[0].strip("| `") for row in rows} | kinds
    for row in rows:
        assert len(row) == 5, row
        assert len(row[1]) > 8, f"{row[0]} has no meaning: give its field a docstring"


def test_a_message_is_shown_as_its_expression_finds_it():
    assert reference.like(r"Run (?:with id=|')(?P<id>\w+)'? not found") == "Run with id=<id> not found"
    for entry in messages.entries():
        said = reference.like(entry.pattern.pattern)
        if "<" not in said and "..." not in said:
            assert entry.pattern.search(f"{said} "), f"{entry.name}: {said}"


def test_every_page_is_in_the_navigation_once():
    assert sorted(website.listed()) == sorted(website.pages().values())


class Page(HTMLParser):
    """What a page of the site names, and what in it has a name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.names |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path):
    first = website.build(tmp_path)
    places = {place.removesuffix(".md") + ".html" for place in website.listed()}
    parsed = {place: Page((first.parent / place).read_text(encoding="utf-8")) for place in places}
    for place, page in parsed.items():
        assert [url for url in page.loads if re.match(r"(https?:)?//", url)] == [], place
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("data:"):
                continue
            target = os.path.normpath(os.path.join(Path(place).parent, unquote(parts.path))) if parts.path else place
            assert (first.parent / target).exists(), f"{place} names {link}"
            if parts.fragment and target in parsed:
                assert unquote(parts.fragment) in parsed[target].names, f"{place} names {link}"
    styles = "".join(one.read_text(encoding="utf-8") for one in first.parent.rglob("*.css"))
    assert re.findall(r"url\(\s*['\"]?(?:https?:)?//[^)]*\)", styles) == []


@pytest.mark.slow
def test_a_broken_link_ends_the_build(tmp_path, monkeypatch):
    website.copy(tmp_path)
    page = tmp_path / "pages" / "start.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[nowhere](nowhere.md)\n", encoding="utf-8")
    built = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(built, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "page does not exist" in done.stderr

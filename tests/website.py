"""The site of docs/: `make docs` builds it, without a network, from the pages as they stand in the repository.

README is its first page, CONTRIBUTING and CHANGELOG are pages of it. A link to another file of the repository leads to
a copy of that file, as plain text: nothing is fetched, and nothing leads out but what names another site.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "docs"
OF_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def pages() -> dict[Path, str]:
    """Return the file of each page, and the place that it has in the site."""
    own = {place: place.relative_to(ROOT / "docs").as_posix() for place in sorted((ROOT / "docs").rglob("*.md"))}
    return {ROOT / name: place for name, place in OF_THE_ROOT.items()} | own


def listed() -> list[str]:
    """Return the pages that the navigation names."""
    config = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return re.findall(r"'([^']+\.md)'", str(config["nav"]))


def copy(folder: Path) -> None:
    """Write the pages, what they show, and what they link to, as the site's builder takes them."""
    places = pages()
    for document, place in places.items():
        target = folder / "pages" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_as_page(document, places, folder / "pages"), encoding="utf-8")
    shutil.copy(ROOT / "docs" / "zensical.toml", folder)


def _as_page(document: Path, places: dict[Path, str], folder: Path) -> str:
    """Return the text of a page of the site."""

    def linked(found: re.Match[str]) -> str:
        text, file, heading = found.groups()
        target = (document.parent / file).resolve()
        if target.is_dir():
            return text[1:-1]
        if target in places:
            place = places[target]
            if text.endswith(".md]"):  # A file's name tells nobody anything here.
                text = f"[{_title(target)}]"
        else:
            in_docs = target.is_relative_to(ROOT / "docs")  # A picture, mostly.
            source = f"source/{target.relative_to(ROOT).as_posix()}.txt"
            place = target.relative_to(ROOT / "docs").as_posix() if in_docs else source
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, folder / place)
        return f"{text}({os.path.relpath(place, Path(places[document]).parent)}{heading or ''})"

    # GitHub draws Mermaid; here a script of elsewhere would have to.
    text = document.read_text(encoding="utf-8").replace("```mermaid\n", "```text\n")
    # What is between fences is not a link. Code may be the text of one, so only fences are left out.
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(linked, part) for number, part in enumerate(parts))


def _title(document: Path) -> str:
    """Return the first heading of a page."""
    return re.findall(r"^# (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)[0]


def build(folder: Path = FOLDER) -> Path:
    """Build the site anew, and return its first page; a broken link ends the program."""
    if unlisted := set(pages().values()) ^ set(listed()):
        sys.exit(f"docs/zensical.toml: nav and pages differ: {', '.join(sorted(unlisted))}")
    shutil.rmtree(folder, ignore_errors=True)
    copy(folder)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
    return folder / "site" / "index.html"


if __name__ == "__main__":
    first = build()
    print(f"{first} (with the search: {sys.executable} -m http.server --bind 127.0.0.1 --directory {first.parent})")

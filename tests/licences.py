"""docs/licences.md, of the lock and of what is installed: `make licences`."""

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;]+)(?: ; ([^\\]*?))?\s*\\?$", re.MULTILINE)
CLASSIFIER = "License :: OSI Approved :: "
# Of a few words; a field may also hold the whole text of a licence.
LONGEST = 70
# Licences that ask for no more than to be named; whatever is no match of one has its reason in LOOKED_AT.
FREE = re.compile(
    r"(?i)\b(apache|mit|bsd|isc|python software foundation|psf|cnri|unlicense|zlib|hpnd|mit-cmu|0bsd|cc0|public domain)"
)
# What of them has to be looked at, wherever it is named.
COPYLEFT = re.compile(r"(?i)gpl|mpl|mozilla|epl|eclipse|cddl|eupl|affero|copyleft|proprietary|nvidia|artistic")
IN_ITS_FILE = "Its metadata do not tell; its file LICENSE is the {}."
WEAK = "Whoever passes on changed files of it publishes the changes. Nothing else follows, and none are changed."
LOOKED_AT = {
    "asyncssh": "One may choose: EPL-2.0, as MPL-2.0 below. DVC's, for remotes by SSH.",
    "certifi": WEAK,
    "dulwich": "One may choose: Apache-2.0.",
    "grandalf": "One may choose, says its LICENSE: EPL-1.0, as MPL-2.0 below. DVC's, for `dvc dag`.",
    "huey": IN_ITS_FILE.format("MIT License"),
    "hypothesis": WEAK + " For tests alone.",
    "namex": IN_ITS_FILE.format("Apache License 2.0"),
    "orjson": WEAK,
    "pathspec": WEAK,
    "pi-heif": "Its wheels bring libheif and libde265, LGPL-3.0, as libraries beside its own code, which are loaded "
    "unchanged and may be replaced. Who passes the wheel on passes on their licence and says where their source is.",
    "pygit2": "GPL-2.0, which by itself does not go with Apache-2.0, with an exception: its COPYING lets programs of "
    "any licence link it without any restriction that comes from it. Who passes on a changed one does so by GPL-2.0.",
    "shtab": WEAK,
    "simple-parsing": IN_ITS_FILE.format("MIT License"),
    "skops": IN_ITS_FILE.format("MIT License"),
    "text-unidecode": "One may choose: the Artistic License. It is run unchanged; a changed one has to say so. "
    "Prefect's, by python-slugify.",
    "tqdm": WEAK,
    "zc-lockfile": "As BSD; a changed file has to say so, and the name Zope may not be used.",
}
"""By package, what a reader of its licence comes to."""


def pins() -> list[tuple[str, str, str]]:
    """Return each locked package with its version, and for which machines it is; a few have several versions."""
    return PIN.findall((ROOT / "requirements.lock").read_text(encoding="utf-8"))


def licence_of(name: str, version: str | None = None) -> str | None:
    """Return the licence of an installed package as its metadata tell it; None where it, or this version of it, is not
    installed."""
    try:
        said = metadata.distribution(name).metadata
    except metadata.PackageNotFoundError:
        return None
    if version not in (None, said["Version"]):
        return None
    classified = [one.rpartition(" :: ")[2] for one in said.get_all("Classifier", []) if one.startswith(CLASSIFIER)]
    field = " ".join((said.get("License") or "").split())
    found = said.get("License-Expression") or ", ".join(classified) or (field if len(field) <= LONGEST else "")
    return found or "not told"


def unread(licence: str, name: str) -> bool:
    """Return whether nobody has looked at a licence that has to be looked at."""
    return name not in LOOKED_AT and (COPYLEFT.search(licence) is not None or FREE.search(licence) is None)


def page() -> str:
    """Return the whole page."""
    rows, absent = [], []
    for name, version, marker in pins():
        licence = licence_of(name, version)
        if licence is None:
            absent.append(f"| {name} | {version} | {marker or 'another Python'} |")
            continue
        if unread(licence, name):
            sys.exit(
                f"{name} {version} has the licence '{licence}': read it, and say in tests/licences.py what it asks"
            )
        rows.append(f"| {name} | {version} | {licence} |")
    looked_at = [f"| {name} | {licence_of(name)} | {why} |" for name, why in LOOKED_AT.items()]
    return "\n".join([TEXT, *looked_at, ALL, *rows, ABSENT, *absent, ""])


TEXT = """# Licences

This project has the [Apache License 2.0](../LICENSE). It brings no other package with it: `make setup` installs those
of requirements.lock, each of which its authors give out under a licence of its own. The tables are written by
`make licences` from what each package says of itself; a test tells when they are older than the lock.

None of them is incompatible with Apache-2.0 for what this project does, which is to import them unchanged. These ask
for more than to be named, or say it in their own words:

| package | licence | what follows |
|---|---|---|"""
ALL = """
Whoever passes on an environment with these packages in it, such as a container's image, passes on each of them under
its own licence.

## All packages

| package | version | licence |
|---|---|---|"""
ABSENT = """
Not looked at, because they are for other machines or another Python than the page was written on:

| package | version | for |
|---|---|---|"""

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

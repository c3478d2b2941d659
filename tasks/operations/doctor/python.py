"""The Python that this command runs in."""

import sys
import tomllib
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from tasks.operations.doctor import Here, Remark


def look(here: Here) -> Iterator[Remark]:
    """Yield whether its version is one that the project takes, and whether its packages are its own."""
    version = ".".join(map(str, sys.version_info[:3]))
    pyproject = here.root / "pyproject.toml"
    wanted = ""
    if pyproject.is_file():  # A project that `pip install` brought has none.
        wanted = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("requires-python", "")
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        yield Remark(
            "error", f"this is Python {version}, and the project wants {wanted}", "make setup PYTHON=python3.11"
        )
    elif sys.prefix == sys.base_prefix:
        text = f"{version}, whose packages every program of {sys.prefix} shares"
        yield Remark("warning", text, "make setup, and call .venv/bin/stratagem")
    else:
        yield Remark("ok", f"{version} in {sys.prefix}")

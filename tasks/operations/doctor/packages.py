"""The installed packages, beside those that requirements.lock names: the project's own, or the one that the installed
stratagem brings."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from tasks import config
from tasks.operations.doctor import Here, Remark
from tasks.system.errors import listed

PIN = re.compile(r"^[A-Za-z0-9].*?(?= \\$|$)", re.MULTILINE)


def look(here: Here) -> Iterator[Remark]:
    """Yield which are missing or have another version; those that the lock does not name are the user's business.

    The installed stratagem's lock names all extras, and which of these are wanted it does not know: what is missing is
    told of a project's own alone.
    """
    lock = here.root / "requirements.lock"
    is_own = lock.is_file()
    if not is_own:
        lock = config.code_root() / "requirements.lock"
    if not lock.is_file():
        yield Remark("ok", "there is no requirements.lock to compare with")
        return
    installed = _installed()
    wanted = {}
    for pin in PIN.findall(lock.read_text(encoding="utf-8")):
        try:
            requirement = Requirement(pin)
        except InvalidRequirement:
            yield Remark(
                "error",
                f"requirements.lock has a line that is not a package: {pin[:60]}",
                "git checkout requirements.lock",
            )
            return
        if requirement.marker is None or requirement.marker.evaluate():
            wanted[canonicalize_name(requirement.name)] = requirement
    known = [name for name in wanted if name in installed]
    missing = [f"{one.name}{one.specifier}" for name, one in wanted.items() if name not in installed] if is_own else []
    others = [
        f"{one.name} {installed[name]} (locked: {str(one.specifier).removeprefix('==')})"
        for name, one in wanted.items()
        if name in installed and not one.specifier.contains(installed[name], prereleases=True)
    ]
    if missing:
        yield Remark("error", f"not installed: {listed(missing, 5)}", "make setup")
    if others:
        mend = "make setup" if is_own else f"pip install --no-deps --require-hashes -r {shlex.quote(str(lock))}"
        yield Remark("warning", f"another version than the locked one: {listed(others, 5)}", mend)
    if not missing and not others:
        yield Remark(
            "ok", f"all {len(known)} of requirements.lock{'' if is_own else ' that are installed'}, in its versions"
        )


def _installed() -> dict[str, str]:
    """Return the version of each installed package, by names of folders: each one's metadata would take 0.5 s."""
    found: dict[str, str] = {}
    for place in sys.path:
        for path in Path(place or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(canonicalize_name(name), version)
    return found

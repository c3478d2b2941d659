"""DVC's cache of file hashes: in the project, and nobody else's.

By default DVC keeps it in /var/tmp/dvc, where everybody may write, and its diskcache unpickles what lies there
(CVE-2025-69872). DVC does not resolve a relative path, so the place goes into .dvc/config.local, which is not shared.
"""

import os
import shutil
import stat
from pathlib import Path

from tasks import config
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError


def configure() -> None:
    """Make .dvc/site, which this user alone may enter, and let DVC know it; where there is no git, also that.

    What others could write to is made anew: it may hold what they put there. DVC_SITE_CACHE_DIR is stronger.

    Raises:
        UserError: .dvc cannot be written, or .dvc/site is another user's.
    """
    root = config.project_root()
    site = root / ".dvc" / "site"
    try:
        site.parent.mkdir(exist_ok=True)
        if not os.environ.get("DVC_SITE_CACHE_DIR"):
            _make_private(site)
        wanted = {"site_cache_dir": str(site)}
        if lineage.git_state(root) == (None, None):
            wanted["no_scm"] = "true"
        _set(site.with_name("config.local"), wanted)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error}): make the project's folder writable") from None


def _make_private(site: Path) -> None:
    site.mkdir(mode=0o700, exist_ok=True)
    found = site.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(
            f"{site} is not a folder of yours: let its owner remove it, or set DVC_SITE_CACHE_DIR to a folder that you "
            "alone may enter"
        )
    # As DVC itself makes it, where it is missing.
    if stat.S_IMODE(found.st_mode) & 0o077:
        shutil.rmtree(site)
        site.mkdir(mode=0o700)


def _set(path: Path, wanted: dict[str, str]) -> None:
    """Set in DVC's file of this machine what is not set there, or is of the place where the project was before."""
    # What DVC writes it with; here and not above: half of all commands need no data.
    from configobj import ConfigObj

    known = ConfigObj(str(path), encoding="utf-8")
    before = dict(known.get("core", {}))
    moved = before.get("site_cache_dir", "").endswith("/.dvc/site")
    core = {**wanted, **before, **({"site_cache_dir": wanted["site_cache_dir"]} if moved else {})}
    if core != before:
        known["core"] = core
        with files.replacing(path) as written:
            known.filename = str(written)
            known.write()

"""DVC: whether it is there, what it keeps of its own, its remotes, and the datasets in data/."""

import importlib.util
import json
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import yaml
from configobj import ConfigObj, ConfigObjError

from tasks import config
from tasks.operations.doctor import Here, Remark
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError, listed
from tasks.system.network import without_userinfo


def look(here: Here) -> Iterator[Remark]:
    """Yield what DVC would fail at, and the remotes that it knows."""
    if importlib.util.find_spec("dvc") is None:
        yield Remark("error", "DVC is not installed", "make setup")
        return
    if not (here.root / ".dvc").is_dir():
        yield Remark(
            "error", f"{here.root} is not a DVC repository: there is no .dvc/", "dvc init, or git checkout .dvc"
        )
        return
    yield from _look_at_config(here.root / ".dvc")
    yield from _look_at_state(here.root / ".dvc")
    yield from _look_at_data(here.root)


def _look_at_config(folder: Path) -> Iterator[Remark]:
    remotes: dict[str, str] = {}
    for name in ("config", "config.local"):
        path = folder / name
        if not path.exists():
            continue
        try:
            known = ConfigObj(str(path), encoding="utf-8")
        except (ConfigObjError, OSError, UnicodeDecodeError) as error:
            mend = "git checkout .dvc/config" if name == "config" else f"rm {shlex.quote(str(path))}"
            yield Remark("error", f"{path} cannot be read ({str(error).splitlines()[0]})", mend)
            return
        for section, values in known.items():
            if section.startswith(("'remote ", "remote ")) and "url" in values:  # A password is in a file of its own.
                remotes[section.split('"')[1]] = without_userinfo(str(values.get("url", "")))
    for name, url in remotes.items():
        if url.startswith("/") and not Path(url).is_dir():
            yield Remark(
                "warning", f"remote {name}: the folder {url} is not there", f"dvc remote modify {name} url FOLDER"
            )
        else:
            yield Remark("ok", f"remote {name}: {url}")
    if not remotes:
        yield Remark("ok", "no remote: `stratagem data push` and `pull` need one")


def _look_at_state(folder: Path) -> Iterator[Remark]:
    """Yield what DVC keeps between two calls, and cannot read or must not trust."""
    site = folder / "site"
    if site.exists() and not os.environ.get("DVC_SITE_CACHE_DIR"):
        found = site.lstat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
            text = f"{site} is open to other users, and DVC unpickles what lies there (CVE-2025-69872)"
            yield Remark("error", text, f"rm -r {shlex.quote(str(site))}; the next command makes it anew")
    locks = folder / "tmp" / "rwlock"
    try:
        json.loads(locks.read_text(encoding="utf-8") or "{}")
    except FileNotFoundError:
        pass
    except ValueError:  # DVC was killed while it wrote, and refuses every command since.
        yield Remark(
            "error", f"{locks} is damaged, and DVC does nothing because of it", f"rm {shlex.quote(str(locks))}"
        )


def _look_at_data(root: Path) -> Iterator[Remark]:
    names = sorted(path.parent.name for path in (root / "data").glob("*/params.yaml"))
    needed = (f"data/{name}/{file}" for name in names or ["NAME"] for file in ("dvc.yaml", "dvc.lock"))
    if ignored := [file for file in needed if lineage.is_ignored(root / file, root)]:
        text = f"git ignores {listed(ignored, 3)}, and DVC works by no file that git ignores"
        yield Remark("error", text, f"git check-ignore -v {ignored[0]} shows the line of .gitignore: take it away")
    wrong = 0
    for name in names:
        folder = root / "data" / name
        try:
            config.read_description(folder)
            for file in ("dvc.yaml", "dvc.lock"):
                if (path := folder / file).exists() and not isinstance(yaml.safe_load(files.read_text(path)), dict):
                    raise UserError(f"{path} holds no stages")
        except (UserError, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            wrong += 1
            mend = f"git checkout data/{name}, or stratagem data remove {name} and data add"
            yield Remark("error", f"data/{name}: {' '.join(str(error).split())}", mend)
    if names and not wrong:
        prepared = sum((root / "data" / name / "prepared" / "manifest.json").exists() for name in names)
        yield Remark("ok", f"{len(names)} dataset{'s' * (len(names) != 1)} in data/, {prepared} prepared")

"""Data: a data version, the raw data that it was prepared from, and their source; as they are now, or as they were in
the commit of a run."""

import contextlib
from collections.abc import Callable
from typing import Any

import yaml

from tasks import config
from tasks.records import Link
from tasks.runs import lineage
from tasks.system.errors import UserError


def data_link(name: str, version: str, commit: str | None, down: tuple[Link, ...] = ()) -> Link:
    """Return a data version with what it was made of.

    Args:
        name: of the dataset.
        version: the md5 of its prepared folder.
        commit: of a run on it, in which its lock may be where that of today is of another version.
        down: what was made of it.
    """
    for read, where in _readers(name, commit):
        text = read("dvc.lock")
        if text is None or _version(text, name, "prepared") != version:
            continue
        raw = _version(text, name, "raw")
        source = _source(read("params.yaml"))
        up = (Link(kind="source", name=source.pop("source", name), facts=source),) if source else ()
        if raw is not None:
            up = (Link(kind="raw data", name=raw, facts={"folder": f"data/{name}/raw"}, up=up),)
        facts = {"dataset": name, "in": where}
        return Link(kind="data version", name=version, facts=facts, up=up, down=down)
    facts = {"dataset": name, "in": "no dvc.lock that is here, or in that commit"}
    return Link(kind="data version", name=version, facts=facts, down=down)


def _readers(name: str, commit: str | None) -> list[tuple[Callable[[str], str | None], str]]:
    """Return what reads a file of data/<name>, today and in a commit, and what each is called."""
    folder = config.project_root() / "data" / name

    def today(file: str) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (folder / file).read_text(encoding="utf-8")
        return None

    def then(file: str) -> str | None:
        with contextlib.suppress(UserError, UnicodeDecodeError, ValueError):
            return lineage.file_at(commit or "", f"data/{name}/{file}", config.project_root())
        return None

    # A name that leads out of data/ is of a record that was edited.
    if "/" in name or name in ("", ".", ".."):
        return []
    return [(today, f"data/{name} as it is now"), *([(then, f"data/{name} in {commit[:12]}")] if commit else [])]


def _version(lock: str, name: str, part: Any) -> str | None:
    with contextlib.suppress(yaml.YAMLError, KeyError, TypeError, AttributeError):
        return lineage.version_in(lock, name, part)
    return None


def _source(params: str | None) -> dict[str, str]:
    """Return what data/<name>/params.yaml says of where the data are from."""
    try:
        described = yaml.safe_load(params or "")["dataset"]
        wanted = ("kind", "source", "name", "version", "builder", "target")
        return {"kind": "tfds"} | {key: str(described[key]) for key in wanted if described.get(key) is not None}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}

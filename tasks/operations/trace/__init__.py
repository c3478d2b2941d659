"""`stratagem trace`: the chain from a source of data, by commit and run, to a version of a model, from any of its ends.

This file finds what a reference means: a version of a model, a run, a flow run, a checkpoint, data, a commit or an
export. `links` follows the chain from there.
"""

import contextlib
import os
import re
from pathlib import Path

from tasks import config, records, runs
from tasks.operations.trace import links
from tasks.operations.trace.links import Known
from tasks.records import ExportedModel, Link, Provenance
from tasks.runs import lineage
from tasks.system import errors
from tasks.system.errors import UserError

LEAST = 4
"""Letters of an id that name it, if no other one begins so."""
START = re.compile(rf"[0-9a-f][0-9a-f-]{{{LEAST - 1},63}}")
VERSION = re.compile(r"(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<number>\d+))")
SHOWN = 5
KINDS = (
    "a version of a model (NAME@ALIAS, NAME/3), a run, a flow run, a data version or a commit by its id or the first "
    f"{LEAST} letters of it, a dataset by its name, or the path of a checkpoint, prepared data, a report or an export"
)


def trace(reference: str) -> Provenance:
    """Return what a reference means, with the chain that it is in.

    Raises:
        UserError: it means nothing that is known here, or several things.
    """
    known = Known()
    link = _find(reference.strip(), known)
    return Provenance(reference=reference, link=link, registry=known.no_registry)


def _find(text: str, known: Known) -> Link:
    if text == "latest" and known.runs:
        return links.of_run(next(iter(known.runs.values())), known)
    for look in (_by_version, _by_path, _by_id, _by_dataset, _by_commit):
        if (link := look(text, known)) is not None:
            return link
    near = [*known.runs, *_named(known), *_datasets()]
    raise UserError(errors.one_of("reference", text, near, f"give {KINDS}"))


def _named(known: Known) -> list[str]:
    """Return what versions of models are called."""
    found = [[f"{one.name}/{one.version}", *(f"{one.name}@{alias}" for alias in one.aliases)] for one in known.versions]
    return [name for names in found for name in names]


def _by_version(text: str, known: Known) -> Link | None:
    address = text.removeprefix("models:/")
    for entry in known.runs.values() if address.startswith("m-") else ():
        if entry.registration is not None and entry.registration.model_uri == f"models:/{address}":
            return links.of_run(entry, known)
    if (named := VERSION.fullmatch(address)) is None:
        if address != text:
            shape = "write it as models:/NAME@ALIAS or models:/NAME/VERSION"
            raise UserError(f"'{errors.cut(text)}' names no model: {shape}")
        return None
    name, alias, number = named["name"], named["alias"], named["number"]
    of_name = [one for one in known.versions if one.name == name]
    for one in of_name:
        if (alias in one.aliases) if alias else one.version == str(int(number)):
            return links.of_version(one, known)
    if address != text or alias or of_name:
        if address == text and not alias and os.path.lexists(text):
            return None
        there = _named(known)
        see = f"there are: {errors.listed(sorted(there), SHOWN)}" if there else "there is no version yet"
        raise UserError(errors.one_of("model version", address, there, see))
    return None


def _by_path(text: str, known: Known) -> Link | None:
    """Return what a path means: also one of a run's folder that is not there any more."""
    root = config.project_root()
    path = Path(os.path.normpath(Path.cwd() / os.path.expanduser(text)))
    there = os.path.lexists(path)
    try:
        parts = path.resolve().relative_to(root.resolve()).parts
    except ValueError:
        parts = ()
    if parts[:2] == ("mlruns", "runs") and len(parts) > 2 and (entry := known.runs.get(parts[2])) is not None:
        match parts[3:]:
            case ("checkpoints", step, *_) if step.isdigit():
                return links.of_checkpoint(entry, step, known)
            case ("exports", *_) if (link := _exported(path, known)) is not None:
                return link
        return links.of_run(entry, known)
    if parts[:1] == ("mlruns",) and parts[1:2] in (("comparisons",), ("sweeps",)) and len(parts) > 2:
        return _open(runs.kind_of_parent(parts[2]), parts[2], known)
    if there and (link := _exported(path, known)) is not None:
        return link
    if parts[:1] == ("data",) and len(parts) > 1:
        return _by_dataset(parts[1], known)
    if there and "/" in text:
        raise UserError(
            f"{errors.cut(text)} is nothing that stratagem made: it lies in no run, no dataset and no export. Give "
            f"{KINDS}"
        )
    return None


def _exported(path: Path, known: Known) -> Link | None:
    """Return the export that a folder is, or that a file belongs to."""
    for folder in (path, *path.parents):
        if (folder / "export.json").is_file():
            made = records.load(ExportedModel, folder / "export.json")
            if path not in (folder, folder / "export.json") and path.relative_to(folder).as_posix() not in made.files:
                inside = any(file.startswith(f"{path.relative_to(folder).as_posix()}/") for file in made.files)
                if not inside:
                    return None
            return links.of_export(made, str(folder), known)
    return None


def _by_id(text: str, known: Known) -> Link | None:
    """Return what an id means, or the first letters of one; or the name of a run."""
    if (named := [entry for entry in known.runs.values() if entry.run.name == text]) and text:
        return links.of_run(named[0], known)
    start = text.lower().removesuffix(".dir")
    if START.fullmatch(start) is None:
        return None
    found: set[tuple[str, str]] = set()
    for entry in known.entries:
        run = entry.run
        kind = "run" if run.run_id in known.runs else runs.kind_of_parent(run.run_id)
        ids = {
            kind: run.run_id,
            "flow run": run.flow_run_id,
            "data version": run.lineage.data_version,
            "git commit": run.lineage.git_commit,
        }
        found |= {(kind, one) for kind, one in ids.items() if one is not None and one.startswith(start)}
    of_today = {}
    for name in _datasets():
        with contextlib.suppress(UserError):  # Its lock is damaged.
            of_today[lineage.data_version(name) or ""] = name
    found |= {("data version", version) for version in of_today if version.startswith(start)}
    if not found:
        found = {("run", run_id) for other, run_id in known.mlflow_run_ids().items() if other.startswith(start)}
    if len(found) > 1:
        several = errors.listed([f"{kind} {name}" for kind, name in sorted(found)], SHOWN)
        raise UserError(f"'{text}' is the beginning of {len(found):,} ids: {several}. Give more of it")
    if not found:
        return None
    (kind, name) = found.pop()
    if kind == "data version":
        return links.of_data(name, known, of_today.get(name, ""))
    return _open(kind, name, known)


def _open(kind: str, name: str, known: Known) -> Link:
    """Return a run, a flow run, a comparison, a sweep or a commit."""
    if kind == "run":
        return links.of_run(known.runs[name], known)
    if kind == "git commit":
        return links.of_commit(name, known)
    field = "flow_run_id" if kind == "flow run" else "parent_run_id"
    members = [one for one in known.runs.values() if getattr(one.run, field) == name]
    return links.of_group(kind, name, members, known)


def _by_dataset(text: str, known: Known) -> Link | None:
    if text not in _datasets():
        return None
    version = lineage.data_version(text)
    if version is None:
        raise UserError(
            f"data/{text} is not prepared, so it has no data version: `stratagem prepare --set dataset.name={text}`"
        )
    return links.of_data(version, known, text)


def _datasets() -> list[str]:
    """Return the names of the folders in data/ that are datasets."""
    return sorted(path.parent.name for path in (config.project_root() / "data").glob("*/dvc.yaml"))


def _by_commit(text: str, known: Known) -> Link | None:
    commit = lineage.commit_of(text, config.project_root())
    return links.of_commit(commit, known) if commit is not None else None

"""`stratagem trace`: what something was made from, and what was made from it, from a data source to a model version.

``Graph`` reads the runs in mlruns/, MLflow's registry and git. Each thing in it has a kind and a name, which is an id,
or the path of a file in a run's folder. `_find` finds the thing that a reference means.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tasks import config, records
from tasks.process import stages
from tasks.records import EvaluationResult, ExportedModel, Link, ModelVersion, Provenance, RegisteredModel, Run
from tasks.runs import committed, lineage, outcome, repository
from tasks.runs.entries import PLACES, find_runs, kind_of_parent
from tasks.runs.listing import line_of, version_of
from tasks.system import errors, units
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models

LEAST = 4
"""The minimum number of characters of an id."""
START = re.compile(rf"[0-9a-f][0-9a-f-]{{{LEAST - 1},63}}")
SHOWN = 5
KINDS = (
    "a version of a model (NAME@ALIAS, NAME/3), a run, a flow run, a data version or a commit by its id or the first "
    f"{LEAST} characters of it, a dataset by its name, or the path of a checkpoint, prepared data, a report or an "
    "export"
)
NOT_HERE = {"state": "not in mlruns/"}


class Thing(NamedTuple):
    """A part of the graph."""

    kind: str
    """As in ``records.Link``."""
    name: str


def trace(reference: str) -> Provenance:
    """Return the thing that a reference means, with its chain.

    Raises:
        UserError: it means nothing here, or several things.
    """
    graph = Graph()
    link = graph.link(_find(reference.strip(), graph))
    return Provenance(reference=reference, link=link, registry=graph.no_registry)


class Graph:
    """Which thing was made from which; reads everything once, when it is needed."""

    def __init__(self) -> None:
        self.no_registry: str | None = None
        """Why MLflow's registry did not answer."""
        self.exports: dict[str, ExportedModel] = {}
        """The exports read so far, by folder."""

    @cached_property
    def with_parents(self) -> list[Run]:
        """The runs, comparisons and sweeps that can be read, the newest first."""
        return find_runs(*PLACES)

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The runs by their ids, the newest first."""
        return {run.run_id: run for run in self.with_parents if run.folder.startswith("mlruns/runs/")}

    @cached_property
    def versions(self) -> dict[str, ModelVersion]:
        """The versions in the registry by NAME/VERSION; if it does not answer, those in the runs' records."""
        try:
            found = stages.list_versions()
        except StratagemError as error:
            self.no_registry = str(error)
            found = [
                ModelVersion(
                    name=made.model_name, version=made.model_version, aliases=made.aliases, run_id=run.run_id, tags={}
                )
                for run in self.runs.values()
                if (made := outcome.load_readable(run, RegisteredModel)) is not None and made.model_version is not None
            ]
        return {f"{one.name}/{one.version}": one for one in found}

    @cached_property
    def datasets(self) -> list[str]:
        """The names of the folders in data/ that are datasets."""
        return sorted(path.parent.name for path in (config.project_root() / "data").glob("*/dvc.yaml"))

    def link(self, thing: Thing) -> Link:
        """Return a thing with its sources and with what was made from it; for runs, only their versions."""
        down = []
        for made in self.made_of(thing):
            versions = self._versions_of(made.name) if made.kind == "run" else []
            of_run = tuple(Link(kind=kind, name=name, facts=self.facts(Thing(kind, name))) for kind, name in versions)
            down.append(Link(kind=made.kind, name=made.name, facts=self.facts(made), down=of_run))
        return self._up(thing).model_copy(update={"down": tuple(down)})

    def _up(self, thing: Thing) -> Link:
        if thing.kind == "data version":
            return self._data(thing.name)
        up = tuple(self._up(one) for one in self.makers_of(thing))
        return Link(kind=thing.kind, name=thing.name, facts=self.facts(thing), up=up)

    def makers_of(self, thing: Thing) -> Iterator[Thing]:
        """Yield what something was made from."""
        if thing.kind == "run" and (run := self.runs.get(thing.name)) is not None:
            of = run.lineage
            yield Thing("git commit", of.git_commit or "none")
            yield Thing("code", of.code_digest)
            yield Thing("settings", of.settings_digest)
            if of.data_version is not None:
                yield Thing("data version", of.data_version)
            if run.parent_run_id is not None:
                yield Thing(kind_of_parent(run.parent_run_id), run.parent_run_id)
        elif thing.kind == "model version":
            version = self.versions[thing.name]
            if version.run_id in self.runs and "checkpoint" in version.tags:
                yield Thing("checkpoint", version.tags["checkpoint"])
            else:
                yield Thing("run", version.run_id or "MLflow does not name it")
        elif thing.kind == "export":
            made = self.exports[thing.name]
            versions = [one for one in self.versions if self._digest(one) == made.model_digest]
            yield from (Thing("model version", one) for one in versions)
            if not versions:
                yield Thing("checkpoint", made.checkpoint) if made.run_id in self.runs else Thing("run", made.run_id)
        elif thing.name.startswith("mlruns/runs/"):
            yield Thing("run", thing.name.split("/")[2])

    def made_of(self, thing: Thing) -> Iterator[Thing]:
        """Yield what was made from something."""
        if thing.kind in ("checkpoint", "run"):
            for made in self._made_in_run(thing.name.split("/")[2] if thing.kind == "checkpoint" else thing.name):
                if thing.kind == "run" or self.facts(made).get("checkpoint") == thing.name:
                    yield made
        elif thing.kind == "model version":
            run = self.runs.get(self.versions[thing.name].run_id or "")
            exports = self._exports_of(run) if run is not None else []
            yield from (one for one in exports if self._digest(thing.name) == self.exports[one.name].model_digest)
        else:
            for run_id, run in self.runs.items():
                if thing in self.ids(run):
                    yield Thing("run", run_id)

    def _made_in_run(self, run_id: str) -> Iterator[Thing]:
        if (run := self.runs.get(run_id)) is None:
            return
        place = run.folder
        folder = config.project_root() / place
        for step in committed.steps(folder / "checkpoints"):
            yield Thing("checkpoint", f"{place}/checkpoints/{step}")
        if outcome.load_readable(run, EvaluationResult) is not None:
            yield Thing("evaluation", f"{place}/records/evaluation.json")
        for name in sorted(path.name for path in (folder / "models").glob("[!.]*.keras")):
            yield Thing("model", f"{place}/models/{name}")
        yield from self._versions_of(run_id)
        yield from self._exports_of(run)

    def _versions_of(self, run_id: str) -> list[Thing]:
        """Return the versions made from a run, or from an earlier run with the same model."""
        known = version_of(self.runs[run_id])
        return [
            Thing("model version", name) for name, one in self.versions.items() if known == name or one.run_id == run_id
        ]

    def _exports_of(self, run: Run) -> list[Thing]:
        found = []
        for path in sorted((config.project_root() / run.folder / "exports").glob("*/export.json")):
            with contextlib.suppress(UserError):
                found.append(self.export(path.parent, f"{run.folder}/exports/{path.parent.name}"))
        return found

    def export(self, folder: Path, name: str) -> Thing:
        """Return the export in a folder.

        Raises:
            UserError: it cannot be read.
        """
        self.exports[name] = records.load(ExportedModel, folder / "export.json")
        return Thing("export", name)

    def _digest(self, version: str) -> str | None:
        return self.versions[version].tags.get("model_digest")

    def ids(self, run: Run) -> list[Thing]:
        """Return the things whose ids lead to a run, a comparison or a sweep."""
        kind = "run" if run.run_id in self.runs else kind_of_parent(run.run_id)
        parent = kind_of_parent(run.parent_run_id) if run.parent_run_id else ""
        ids = [
            (kind, run.run_id),
            (parent, run.parent_run_id),
            ("flow run", run.flow_run_id),
            ("data version", run.lineage.data_version),
            ("git commit", run.lineage.git_commit),
        ]
        return [Thing(kind, one) for kind, one in ids if one is not None]

    def facts(self, thing: Thing) -> dict[str, str]:
        """Return the facts about a thing."""
        kind, name = thing
        if kind == "run":
            return self._facts_of_run(name)
        if kind == "git commit" and name != "none":
            return {"subject": repository.subject(name, config.project_root()) or "not in this repository"}
        if kind == "checkpoint":
            return {} if (config.project_root() / name / "state.json").exists() else NOT_HERE
        if kind == "evaluation":
            evaluated = outcome.load_evaluation(self.runs[name.split("/")[2]])
            figures = {metric: units.metric(value) for metric, value in evaluated.metrics.items()}
            return {"checkpoint": evaluated.checkpoint, **figures}
        if kind == "model version":
            version = self.versions[name]
            aliases = {"aliases": " ".join(f"@{alias}" for alias in version.aliases)} if version.aliases else {}
            tags = {k: text for k, text in version.tags.items() if k in ("checkpoint", "weights_digest") or "/" in k}
            return aliases | tags
        if kind == "export":
            made = self.exports[name]
            return {"format": made.format, "checkpoint": made.checkpoint, "weights_digest": made.weights_digest}
        return {}

    def _facts_of_run(self, run_id: str) -> dict[str, str]:
        if (run := self.runs.get(run_id)) is None:
            exported = [one for one in self.exports.values() if one.run_id == run_id]
            ours = [{"data version": str(one.data_version), "git commit": str(one.git_commit)} for one in exported]
            return NOT_HERE | (ours[0] if ours else {})
        line = line_of(run)
        facts = {
            "status": line.status,
            "dataset": line.dataset,
            "model": line.model,
            "strategy": f"{line.strategy} {line.loop}",
        }
        if line.headline is not None:
            facts[line.headline] = units.metric(line.metrics[line.headline])
        if run.flow_run_id is not None:
            facts["flow run"] = run.flow_run_id
        if line.pruned:
            facts["state"] = "pruned"
        if run.lineage.package_version:
            facts["stratagem"] = run.lineage.package_version
        if run.lineage.git_dirty:
            kept = f"{run.folder}/{repository.FILE}"
            facts["uncommitted changes"] = kept if (config.project_root() / kept).exists() else "not kept"
        if run.changed:
            facts["resumed with"] = "; ".join(f"{one.what} {one.values}" for one in run.changed)
        return facts

    def _data(self, version: str) -> Link:
        """Return a data version with its sources, from the current dvc.lock or that of a run's commit."""
        of_runs = [one for one in self.runs.values() if one.lineage.data_version == version]
        name = self.prepared.get(version) or next((one.dataset for one in of_runs), "")
        commit = next((one.lineage.git_commit for one in of_runs if one.lineage.git_commit), None)
        for at in dict.fromkeys((None, commit)):
            text = _read(f"data/{name}/dvc.lock", at)
            if text is None or _data_version(text, name, "prepared") != version:
                continue
            raw = _data_version(text, name, "raw")
            source = _source(_read(f"data/{name}/params.yaml", at))
            up = (Link(kind="source", name=source.pop("source", name), facts=source),) if source else ()
            if raw is not None:
                up = (Link(kind="raw data", name=raw, facts={"folder": f"data/{name}/raw"}, up=up),)
            where = f"data/{name} as it is now" if at is None else f"data/{name} in {at[:12]}"
            return Link(kind="data version", name=version, facts={"dataset": name, "in": where}, up=up)
        facts = {"dataset": name, "in": "no dvc.lock in the project or in that commit"}
        return Link(kind="data version", name=version, facts=facts)

    @cached_property
    def prepared(self) -> dict[str, str]:
        """The currently prepared datasets by data version."""
        found = {}
        for name in self.datasets:
            with contextlib.suppress(UserError):  # Its dvc.lock is damaged.
                found[lineage.data_version(name) or ""] = name
        return found


def _find(text: str, graph: Graph) -> Thing:
    if text == "latest" and graph.runs:
        return Thing("run", next(iter(graph.runs)))
    for look in (_by_version, _by_path, _by_id, _by_dataset):
        if (thing := look(text, graph)) is not None:
            return thing
    if (commit := repository.commit_of(text, config.project_root())) is not None:
        return Thing("git commit", commit)
    near = [*graph.runs, *_named(graph), *graph.datasets]
    raise UserError(errors.one_of("reference", text, near, f"name {KINDS}"))


def _named(graph: Graph) -> dict[str, str]:
    """Return the names of model versions by NAME/VERSION and NAME@ALIAS."""
    aliases = {f"{one.name}@{alias}": name for name, one in graph.versions.items() for alias in one.aliases}
    return {**{name: name for name in graph.versions}, **aliases}


def _by_version(text: str, graph: Graph) -> Thing | None:
    address = text.removeprefix("models:/")
    for run_id, run in graph.runs.items() if address.startswith("m-") else ():
        made = outcome.load_readable(run, RegisteredModel)
        if made is not None and made.model_uri == f"models:/{address}":
            return Thing("run", run_id)
    if address == text and trained_models.ADDRESS.fullmatch(f"models:/{text}") is None:
        return None
    given = trained_models.parse_address(f"models:/{address}")
    named = _named(graph)
    if (found := named.get(address if given["alias"] else f"{given['name']}/{int(given['version'])}")) is not None:
        return Thing("model version", found)
    of_name = any(one.name == given["name"] for one in graph.versions.values())
    if address == text and not given["alias"] and (os.path.lexists(text) or not of_name):
        return None  # It may be a path or a commit.
    see = f"known: {errors.listed(sorted(named), SHOWN)}" if named else "no version exists yet"
    raise UserError(errors.one_of("model version", address, named, see))


def _by_path(text: str, graph: Graph) -> Thing | None:
    """Return what a path means, even if a file in a run's folder no longer exists."""
    root = config.project_root()
    path = Path(os.path.normpath(Path.cwd() / os.path.expanduser(text)))
    try:
        parts = path.resolve().relative_to(root.resolve()).parts
    except ValueError:
        parts = ()
    match parts:
        case ("mlruns", "runs", run_id, "checkpoints", step, *_) if run_id in graph.runs and step.isdigit():
            return Thing("checkpoint", f"mlruns/runs/{run_id}/checkpoints/{step}")
        case ("mlruns", "runs", run_id, *_) if run_id in graph.runs:
            return _exported(path, graph) or Thing("run", run_id)
        case ("mlruns", "comparisons" | "sweeps", run_id, *_):
            return Thing(kind_of_parent(run_id), run_id)
    there = os.path.lexists(path)
    if there and (export := _exported(path, graph)) is not None:
        return export
    if parts[:1] == ("data",) and len(parts) > 1:
        return _by_dataset(parts[1], graph)
    if there and "/" in text:
        raise UserError(f"{errors.cut(text)} does not belong to a run, a dataset or an export. Name {KINDS}")
    return None


def _exported(path: Path, graph: Graph) -> Thing | None:
    """Return the export in a folder or in one above it."""
    for folder in (path, *path.parents):
        if (folder / "export.json").is_file():
            return graph.export(folder, str(folder))
    return None


def _by_id(text: str, graph: Graph) -> Thing | None:
    """Return what an id, its first characters, or the name of a run means."""
    for run_id, run in graph.runs.items():
        if run.name == text:
            return Thing("run", run_id)
    start = text.lower().removesuffix(".dir")
    if START.fullmatch(start) is None:
        return None
    known = {one for run in graph.with_parents for one in graph.ids(run)}
    known |= {Thing("data version", version) for version in graph.prepared}
    found = {one for one in known if one.name.startswith(start)}
    if len(found) > 1:
        several = errors.listed([f"{kind} {name}" for kind, name in sorted(found)], SHOWN)
        raise UserError(f"'{text}' is the beginning of {len(found):,} ids: {several}. Add more letters")
    return found.pop() if found else None


def _by_dataset(text: str, graph: Graph) -> Thing | None:
    if text not in graph.datasets:
        return None
    version = lineage.data_version(text)
    if version is None:
        raise UserError(
            f"data/{text} is not prepared, so it has no data version: "
            f"`stratagem data prepare --set dataset.name={text}`"
        )
    return Thing("data version", version)


def _read(path: str, commit: str | None) -> str | None:
    """Return the text of a file today or in a commit; None if it cannot be read."""
    root = config.project_root()
    with contextlib.suppress(OSError, UserError, ValueError):
        return (root / path).read_text(encoding="utf-8") if commit is None else repository.file_at(commit, path, root)
    return None


def _data_version(lock: str, name: str, part: Any) -> str | None:
    with contextlib.suppress(UserError):
        return lineage.version_in(lock, name, part)
    return None


def _source(params: str | None) -> dict[str, str]:
    """Return the keys of data/<name>/params.yaml that describe the source of the data."""
    try:
        described = yaml.safe_load(params or "")["dataset"]
        wanted = ("kind", "source", "name", "version", "builder", "target")
        return {"kind": "tfds"} | {key: str(described[key]) for key in wanted if described.get(key) is not None}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}

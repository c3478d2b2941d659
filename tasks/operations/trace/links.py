"""What a run, a version of a model, data or a commit is linked to: what it was made of, and what was made of it."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tasks import config, records, runs
from tasks.operations import pipeline
from tasks.records import EvaluationResult, ExportedModel, Link, ModelVersion
from tasks.runs import lineage, uncommitted
from tasks.runs.entries import PLACES, Entry, find_entries
from tasks.runs.listing import line_of
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models


@dataclass
class Known:
    """What a chain is followed through: the runs in mlruns/ and the versions in MLflow's registry, each read once, when
    it is needed."""

    no_registry: str | None = field(default=None, init=False)
    """Why MLflow's registry could not be asked."""

    @cached_property
    def entries(self) -> list[Entry]:
        """The runs and comparisons that can be read, the newest first."""
        return find_entries(*PLACES)

    @cached_property
    def runs(self) -> dict[str, Entry]:
        """The runs by their ids, the newest first."""
        found = [entry for entry in self.entries if entry.run.folder.startswith("mlruns/runs/")]
        return {entry.run.run_id: entry for entry in found}

    @cached_property
    def versions(self) -> list[ModelVersion]:
        """The versions in the registry; or, where that cannot be asked, as the runs' records have them."""
        try:
            known = trained_models.own_versions()
            return pipeline.registered_versions() if known is None else known
        except StratagemError as error:
            self.no_registry = str(error)
            return self._recorded()

    def _recorded(self) -> list[ModelVersion]:
        found = []
        for entry in self.runs.values():
            if entry.model_version is None:
                continue
            name, _, number = entry.model_version.rpartition("/")
            aliases = entry.registration.aliases if entry.registration is not None else ()
            found.append(ModelVersion(name=name, version=number, aliases=aliases, run_id=entry.run.run_id, tags={}))
        return found

    def versions_of(self, run_id: str) -> list[ModelVersion]:
        """Return the versions of models that were made of a run, also those that another run's model was before."""
        entry = self.runs.get(run_id)
        named = entry.model_version if entry is not None else None
        return [one for one in self.versions if one.run_id == run_id or f"{one.name}/{one.version}" == named]

    def mlflow_run_ids(self) -> dict[str, str]:
        """Return the runs that MLflow has under another id, because they were started while it did not answer."""
        found = {}
        for path in (config.project_root() / "mlruns" / "runs").glob("*/mlflow_run_id"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if path.parent.name in self.runs:
                    found[path.read_text(encoding="utf-8")] = path.parent.name
        return found


def of_run(entry: Entry, known: Known, down: bool = True) -> Link:
    """Return a run with what it was made of, and, with ``down``, with what was made of it."""
    run, of = entry.run, entry.run.lineage
    package = {"stratagem": of.package_version} if of.package_version else {}
    up = [_commit(run), Link(kind="code", name=str(of.code_digest), facts=package), _settings(run)]
    if of.data_version is not None:
        up.append(data_link(entry.dataset, of.data_version, of.git_commit))
    if run.parent_run_id is not None:
        up.append(Link(kind=runs.kind_of_parent(run.parent_run_id), name=run.parent_run_id))
    made = _made(entry, known) if down else ()
    return Link(kind="run", name=run.run_id, facts=_facts(entry), up=tuple(up), down=made)


def of_runs(entries: Iterable[Entry], known: Known) -> tuple[Link, ...]:
    """Return runs with the versions that were made of each."""
    return tuple(
        Link(
            kind="run",
            name=entry.run.run_id,
            facts=_facts(entry),
            down=tuple(map(_version, known.versions_of(entry.run.run_id))),
        )
        for entry in entries
    )


def of_version(version: ModelVersion, known: Known) -> Link:
    """Return a version of a model with the checkpoint and the run that it was made of, and its exports."""
    entry = known.runs.get(version.run_id or "")
    if entry is None:
        said = version.run_id or "MLflow does not say which"
        up: tuple[Link, ...] = (Link(kind="run", name=said, facts={"state": "not in mlruns/"}),)
        return _version(version).model_copy(update={"up": up})
    up = (of_run(entry, known, down=False),)
    if (checkpoint := version.tags.get("checkpoint")) is not None:
        up = (_checkpoint(checkpoint, up),)
    exports = _exports(entry, version.tags.get("model_digest"))
    return _version(version).model_copy(update={"up": up, "down": exports})


def of_checkpoint(entry: Entry, step: str, known: Known) -> Link:
    """Return a checkpoint with its run, and with the evaluation and the versions that were made of it."""
    place = f"{entry.run.folder}/checkpoints/{step}"
    made = [link for link in _made(entry, known) if link.facts.get("checkpoint") == place]
    versions = known.versions_of(entry.run.run_id)
    made += [_version(one) for one in versions if one.tags.get("checkpoint") == place]
    unique = {(link.kind, link.name): link for link in made}
    return _checkpoint(place, (of_run(entry, known, down=False),)).model_copy(update={"down": tuple(unique.values())})


def of_export(made: ExportedModel, place: str, known: Known) -> Link:
    """Return an export with the version, if there is one, and the run that it was made of."""
    versions = [one for one in known.versions if one.tags.get("model_digest") == made.model_digest]
    if versions:
        up = tuple(of_version(one, known).model_copy(update={"down": ()}) for one in versions)
    elif (entry := known.runs.get(made.run_id)) is not None:
        up = (_checkpoint(made.checkpoint, (of_run(entry, known, down=False),)),)
    else:
        said = {"state": "not in mlruns/", "data version": str(made.data_version), "git commit": str(made.git_commit)}
        up = (Link(kind="run", name=made.run_id, facts=said),)
    return _export(made, place).model_copy(update={"up": up})


def of_commit(commit: str, known: Known) -> Link:
    """Return a commit with all runs of it."""
    found = [entry for entry in known.runs.values() if entry.run.lineage.git_commit == commit]
    return Link(kind="git commit", name=commit, facts=_subject(commit), down=of_runs(found, known))


def of_data(version: str, known: Known, name: str = "") -> Link:
    """Return a data version with its source, and with all runs on it."""
    found = [entry for entry in known.runs.values() if entry.run.lineage.data_version == version]
    commit = next((entry.run.lineage.git_commit for entry in found if entry.run.lineage.git_commit), None)
    dataset = name or next((entry.dataset for entry in found if entry.dataset), "")
    return data_link(dataset, version, commit, of_runs(found, known))


def of_group(kind: str, name: str, entries: Iterable[Entry], known: Known) -> Link:
    """Return a flow run, a comparison or a sweep with all runs that belong to it."""
    found = list(entries)
    if kind == "flow run" and len(found) == 1:
        return Link(kind=kind, name=name, down=(of_run(found[0], known),))
    return Link(kind=kind, name=name, down=of_runs(found, known))


def _facts(entry: Entry) -> dict[str, str]:
    line = line_of(entry)
    facts = {
        "status": line.status or "begun",
        "dataset": line.dataset,
        "model": line.model,
        "strategy": f"{line.strategy} {line.loop}",
    }
    if line.headline is not None:
        facts[line.headline] = f"{line.metrics[line.headline]:.4f}"
    if entry.run.flow_run_id is not None:
        facts["flow run"] = entry.run.flow_run_id
    return facts | ({"state": "pruned"} if line.pruned else {})


def _commit(run: records.Run) -> Link:
    commit, dirty = run.lineage.git_commit, run.lineage.git_dirty
    if commit is None:
        return Link(kind="git commit", name="none")
    changed = {"state": "with changes that are in no commit"} if dirty else {}
    if dirty and (config.project_root() / (kept := f"{run.folder}/{uncommitted.FILE}")).exists():
        changed["in"] = kept
    return Link(kind="git commit", name=commit, facts=_subject(commit) | changed)


def _subject(commit: str) -> dict[str, str]:
    subject = lineage.subject(commit, config.project_root())
    return {"subject": subject if subject is not None else "not in this repository"}


def _settings(run: records.Run) -> Link:
    facts = {"in": f"{run.folder}/records/run.json"}
    if run.changed:
        facts["resumed with"] = "; ".join(f"{one.what} {one.values}" for one in run.changed)
    return Link(kind="settings", name=str(run.lineage.settings_digest), facts=facts)


def _made(entry: Entry, known: Known) -> tuple[Link, ...]:
    """Return what was made of a run: checkpoints, an evaluation, models, versions, exports."""
    folder = config.project_root() / entry.run.folder
    made = [_checkpoint(f"{entry.run.folder}/checkpoints/{step}") for step in _steps(folder / "checkpoints")]
    with contextlib.suppress(UserError):
        evaluated = records.load(EvaluationResult, folder / "records" / "evaluation.json")
        figures = {name: f"{value:.4f}" for name, value in evaluated.metrics.items()}
        place = f"{entry.run.folder}/records/evaluation.json"
        made.append(Link(kind="evaluation", name=place, facts={"checkpoint": evaluated.checkpoint, **figures}))
    models = sorted(path.name for path in (folder / "models").glob("[!.]*.keras"))
    made += [Link(kind="model", name=f"{entry.run.folder}/models/{name}") for name in models]
    made += map(_version, known.versions_of(entry.run.run_id))
    return (*made, *_exports(entry, None))


def _steps(folder: Path) -> list[str]:
    """Return the steps of the checkpoints in a folder."""
    return sorted((path.name for path in folder.glob("[0-9]*") if path.name.isdigit()), key=int)


def _checkpoint(place: str, up: tuple[Link, ...] = ()) -> Link:
    there = (config.project_root() / place / "state.json").exists()
    return Link(kind="checkpoint", name=place, facts={} if there else {"state": "not in mlruns/"}, up=up)


def _version(version: ModelVersion) -> Link:
    facts = {"aliases": " ".join(f"@{alias}" for alias in version.aliases)} if version.aliases else {}
    shown = {key: text for key, text in version.tags.items() if key in ("checkpoint", "weights_digest") or "/" in key}
    return Link(kind="model version", name=f"{version.name}/{version.version}", facts=facts | shown)


def _exports(entry: Entry, model_digest: str | None) -> tuple[Link, ...]:
    """Return the exports in a run's folder; of one model alone, if one is named."""
    found = []
    for path in sorted((config.project_root() / entry.run.folder / "exports").glob("*/export.json")):
        with contextlib.suppress(UserError):
            made = records.load(ExportedModel, path)
            if model_digest in (None, made.model_digest):
                found.append(_export(made, f"{entry.run.folder}/exports/{path.parent.name}"))
    return tuple(found)


def _export(made: ExportedModel, place: str) -> Link:
    facts = {"format": made.format, "checkpoint": made.checkpoint, "weights_digest": made.weights_digest}
    return Link(kind="export", name=place, facts=facts)


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
        if text is None or _data_version(text, name, "prepared") != version:
            continue
        raw = _data_version(text, name, "raw")
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


def _data_version(lock: str, name: str, part: Any) -> str | None:
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

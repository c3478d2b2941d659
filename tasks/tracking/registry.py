"""Versions in MLflow's registry: making them of logged models, giving them their aliases, listing them."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlflow
from filelock import FileLock, Timeout
from mlflow.exceptions import MlflowException

from tasks import config, records
from tasks.records import Judgement
from tasks.system.errors import StratagemError, UserError, cut
from tasks.tracking.champion import (
    ROLLED_BACK,
    champion_of,
    find_or_none,
    find_registered,
    history_of,
    local_run_id,
    promote,
)
from tasks.tracking.lifecycle import set_tags
from tasks.tracking.outbox import mlflow_run_id
from tasks.tracking.store import SQLITE, is_own_store, open_store, pages, retried, store_uri

MAX_TAG = 4000
LOCK_SECONDS = 3600.0


class Candidate(NamedTuple):
    """A logged model that is to become a version."""

    run: records.Run
    model_uri: str
    """``models:/<model_id>``."""
    name: str
    """The registered model."""
    alias: str
    """The alias that each version gets."""
    tags: Mapping[str, str]
    """The tags of a new version."""
    metric: str
    """The tag that says how good the model is."""
    better: Literal["higher", "lower"]
    """Which values of the metric are better."""


class CurrentVersions(NamedTuple):
    """The versions of a registered model, before a candidate becomes one of them."""

    own: str | None
    """The version that is the candidate's model already."""
    has_alias: bool
    """Whether ``own`` has the alias that each version gets."""
    rolled_back: str | None
    """When ``own`` was rolled back, if it was."""
    champion: str | None
    """The version that is the champion."""
    champion_tags: Mapping[str, str]
    lost: str | None
    """The last champion, where no version is the champion any more."""


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Let no other process of this machine register or roll back in the store within the block.

    The lock is a file beside the store; of a server's, in this project's mlruns/. Two machines, or two projects, at one
    server do not exclude each other: the last writer wins.

    Raises:
        StratagemError: another process has held the lock for an hour.
    """
    place: str | Path = store_uri()
    folder = config.project_root() / "mlruns"
    if is_own_store():
        place = Path(store_uri().removeprefix(SQLITE)).absolute()
        folder = place.parent
    lock = FileLock(folder / ".registry.lock", timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise StratagemError(
            f"another process has registered a model in {place} for over an hour: end it, and register again"
        ) from None
    try:
        yield
    finally:
        lock.release()


@retried
def find_current_versions(candidate: Candidate) -> CurrentVersions:
    """Return the versions that a candidate meets; nothing is written.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    model = find_registered(client, candidate.name)
    if model is None:
        return CurrentVersions(None, False, None, None, {}, None)
    own = _find_version(client, candidate, _source(candidate.model_uri))
    champion, history = champion_of(model), history_of(model)
    return CurrentVersions(
        own=own and str(own.version),
        has_alias=own is not None and str(model.aliases.get(candidate.alias)) == str(own.version),
        rolled_back=own and own.tags.get(ROLLED_BACK),
        champion=champion,
        champion_tags=client.get_model_version(candidate.name, champion).tags if champion else {},
        lost=history[-1] if history and champion is None else None,
    )


@retried
def model_place(model_uri: str) -> str:
    """Return where the files of a logged model, ``models:/<model_id>``, lie: an address that MLflow reads."""
    place: str = open_store().get_logged_model(model_uri.removeprefix("models:/")).artifact_location
    return place


@retried
def fetch_keras_file(name: str, version: str, folder: Path) -> Path:
    """Copy the .keras file of a version into a folder, and return where it lies.

    Raises:
        UserError: it has none, or is no longer there.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    place = find_or_none(lambda: client.get_model_version_download_uri(name, version))
    if place is None:
        raise UserError(f"version {version} of '{name}' is no longer there")
    try:
        file = mlflow.artifacts.download_artifacts(
            artifact_uri=f"{place}/data/model.keras", dst_path=str(folder), tracking_uri=store_uri()
        )
    except OSError as error:
        raise UserError(f"the files of version {version} of '{name}' cannot be read ({error})") from None
    return Path(file)


@retried
def register_version(candidate: Candidate, judgement: Judgement) -> records.RegisteredModel:
    """Make a logged model a version of a registered model, and give the version its aliases.

    A version whose tag ``model_digest`` is the same is used again.

    Args:
        candidate: the model.
        judgement: whether it becomes the champion, in the place of the version ``judgement.against``.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: MLflow did not make the version ready; the aliases stay where they were.
    """
    client = open_store()
    run, name, alias = candidate.run, candidate.name, candidate.alias
    with contextlib.suppress(MlflowException):
        client.create_registered_model(name)
    made, notes = _make_version(client, candidate)
    notes += _note_worse(client, candidate, made, client.get_registered_model(name).aliases.get(alias))
    before = client.get_registered_model(name)
    if judgement.promoted and champion_of(before) not in (judgement.against, str(made.version)):
        reason = (
            f"another registration moved @{config.CHAMPION} meanwhile. Then `stratagem register --run {run.run_id}`"
        )
        judgement = judgement.model_copy(update={"promoted": False, "reason": reason})
    # Before the aliases move, so that each move has its reason.
    reasons = {"gate": cut(judgement.reason, MAX_TAG)} | ({"forced": "true"} if judgement.forced else {})
    for key, text in reasons.items():
        client.set_model_version_tag(name, made.version, key, text)
    client.set_registered_model_alias(name, alias, made.version)
    aliases = [alias]
    if judgement.promoted:
        promote(client, before, str(made.version))
    if judgement.promoted or champion_of(before) == str(made.version):
        aliases.append(config.CHAMPION)
    # What MLflow's pages link the model to its version with.
    client.set_logged_model_tags(
        candidate.model_uri.removeprefix("models:/"),
        {"mlflow.modelVersions": json.dumps([{"name": name, "version": made.version}])},
    )
    set_tags(run, {"model_version": f"{name}/{made.version}", **reasons})
    return records.RegisteredModel(
        run_id=run.run_id,
        model_uri=candidate.model_uri,
        model_name=name,
        model_version=str(made.version),
        aliases=tuple(aliases),
        reason=None,
        notes=tuple(notes),
        judgement=judgement,
    )


def _make_version(client: mlflow.MlflowClient, candidate: Candidate) -> tuple[Any, list[str]]:
    """Return the version of a model, new or used again, and notes about it."""
    name, run_id = candidate.name, mlflow_run_id(candidate.run)
    source = _source(candidate.model_uri)
    made = _find_version(client, candidate, source)
    if made is None:
        model_id = candidate.model_uri.removeprefix("models:/")
        made = client.create_model_version(name, source, run_id, tags=dict(candidate.tags), model_id=model_id)
    status = client.get_model_version(name, made.version).status
    if status != "READY":
        raise StratagemError(
            f"version {made.version} of model '{name}' is {status}: '{candidate.alias}' was not moved to it"
        )
    if made.run_id == run_id:
        return made, []
    return made, [f"the same model as run {made.run_id}'s: version {made.version} is used again"]


def _source(model_uri: str) -> str:
    """Return what a version is made of."""
    # MLflow looks `models:/` up in the process' default store, which need not be this one; a server uses its own.
    return model_place(model_uri) if is_own_store() else model_uri


def _note_worse(client: mlflow.MlflowClient, candidate: Candidate, made: Any, before: Any) -> list[str]:
    """Return a note, and save it as a tag, if the alias that each version gets moves to a worse model."""
    if before is None or str(before) == str(made.version):
        return []
    metric, value = candidate.metric, float(candidate.tags[candidate.metric])
    was = client.get_model_version(candidate.name, before).tags.get(metric)
    if was is None or not (value > float(was) if candidate.better == "lower" else value < float(was)):
        return []
    note = f"@{candidate.alias} moved to a worse model: {metric} {value:.4f}, version {before} has {was}"
    client.set_model_version_tag(candidate.name, made.version, "alias_moved", note)
    set_tags(candidate.run, {"alias_moved": note})
    return [note]


def _find_version(client: mlflow.MlflowClient, candidate: Candidate, source: str) -> Any:
    """Return the version that is this model already, None where there is none.

    A second version that a request with a lost reply has made is deleted, unless it has an alias.
    """
    name, run_id = candidate.name, mlflow_run_id(candidate.run)
    same = client.search_model_versions(f"name = '{name}' AND tags.model_digest = '{candidate.tags['model_digest']}'")
    first, *others = sorted(same, key=lambda one: int(one.version)) or [None]
    for one in others:
        if one.run_id == run_id and one.source == source and one.source == first.source and not one.aliases:
            client.delete_model_version(name, one.version)
    return first


@retried
def list_versions() -> list[records.ModelVersion]:
    """Return all versions of all registered models, by name and number; none where there is no store yet.

    Raises:
        UserError: the store cannot be used.
        Unavailable: the tracking server does not answer, or fails.
    """
    uri = store_uri()
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        return []
    client = open_store()
    aliases: dict[tuple[str, str], list[str]] = {}
    for model in pages(client.search_registered_models):
        for alias, version in model.aliases.items():
            aliases.setdefault((model.name, str(version)), []).append(alias)
    found = [
        records.ModelVersion(
            name=one.name,
            version=str(one.version),
            aliases=tuple(sorted(aliases.get((one.name, str(one.version)), ()))),
            run_id=local_run_id(client, one.run_id),
            tags=one.tags,
        )
        for one in pages(client.search_model_versions)
    ]
    return sorted(found, key=lambda one: (one.name, int(one.version)))

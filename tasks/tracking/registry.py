"""Versions in MLflow's registry: registers logged models, sets their aliases, lists versions, and moves the alias
`champion` to a version or back to the previous one.

MLflow keeps no history of an alias. A tag of the registered model lists the champions, oldest first. It is written
before the alias moves, and moving the alias is one write. So if the process is killed at any point, exactly one version
has the alias, and versions after it in the tag have not become the champion.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
from filelock import FileLock, Timeout
from mlflow.exceptions import MlflowException

from tasks import config, records
from tasks.records import Judgement
from tasks.runs import entries
from tasks.system import network
from tasks.system.errors import StratagemError, UserError, cut, one_of
from tasks.tracking.store import (
    NOT_THERE,
    REFUSALS,
    SQLITE,
    Unavailable,
    find_or_none,
    is_own_store,
    open_store,
    pages,
    retried,
    store_uri,
)
from tasks.tracking.writing import set_tags

HISTORY = "champion_history"
# The tag of a copied run with its id in mlruns/.
RUN_ID = "stratagem.run_id"
# MLflow's UI uses this tag to link a model to its version.
VERSIONS_TAG = "mlflow.modelVersions"
# The tag of a version that lost the alias in a rollback: it only becomes the champion again with --force.
ROLLED_BACK = "rolled_back"
MAX_TAG = 4000
LOCK_SECONDS = 3600.0


class Versions(NamedTuple):
    """The versions of a registered model in MLflow."""

    name: str
    """The name of the registered model."""
    found: Mapping[str, Any]
    """MLflow's versions, by number."""
    aliases: Mapping[str, str]
    """The version of each alias."""
    history: list[str]
    """The champions, oldest first, up to the current one; all of them if no version has the alias."""

    @property
    def champion(self) -> str | None:
        """The current champion."""
        return self.aliases.get(config.CHAMPION)

    @property
    def lost(self) -> str | None:
        """The last champion, if no version has the alias any more."""
        return self.history[-1] if self.history and self.champion is None else None

    def find(self, model_digest: str) -> str | None:
        """Return the version with this model, None if it is not registered."""
        same = [version for version, one in self.found.items() if one.tags.get("model_digest") == model_digest]
        return min(same, key=int, default=None)

    def tags(self, version: str | None) -> Mapping[str, str]:
        """Return the tags of a version; empty if it does not exist."""
        return self.found[version].tags if version is not None and version in self.found else {}


class Rollback(NamedTuple):
    """A planned rollback."""

    versions: Versions
    version: str
    """The version that the alias moves to."""
    run_id: str | None
    """The id of the run that registered that version, in mlruns/ or MLflow; None if the version names no run."""
    missing: tuple[str, ...]
    """Deleted versions in between."""
    earlier: list[str]
    """The champions before the current one."""


@retried
def find_versions(name: str) -> Versions:
    """Return the versions of a registered model, which need not exist; this only reads.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    model = find_or_none(lambda: client.get_registered_model(name))
    if model is None:
        return Versions(name, {}, {}, [])
    aliases = {alias: str(version) for alias, version in model.aliases.items()}
    champion = aliases.get(config.CHAMPION)
    history = [version for version in str(model.tags.get(HISTORY, "")).split(", ") if version.isdigit()]
    if champion is not None and champion not in history:
        history.append(champion)  # Somebody set the alias by hand; or the process of the first champion was killed.
    elif champion is not None:
        history = history[: _end_of(champion, history)]
    versions = {str(one.version): one for one in pages(client.search_model_versions, filter_string=f"name = '{name}'")}
    return Versions(name, versions, aliases, history)


def _end_of(version: str, history: list[str]) -> int:
    """Return the length of a history up to the last occurrence of a version."""
    return len(history) - history[::-1].index(version)


def _write_history(client: mlflow.MlflowClient, name: str, history: list[str]) -> None:
    client.set_registered_model_tag(name, HISTORY, ", ".join(history[-500:]))


def _promote(client: mlflow.MlflowClient, before: Versions, version: str) -> None:
    history = [*before.history, version]
    if len(history) > 1:
        _write_history(client, before.name, history)
    client.set_registered_model_alias(before.name, config.CHAMPION, version)
    if len(history) == 1:  # A tag without an alias would say that the first champion was lost.
        _write_history(client, before.name, history)


@retried
def find_rollback(name: str) -> Rollback:
    """Return the rollback to the previous champion; this only reads.

    Raises:
        UserError: the registered model does not exist, or has no previous champion.
        Unavailable: the tracking server does not answer, or fails.
    """
    client, versions = open_store(), find_versions(name)
    names = [] if versions.found else [one.name for one in pages(client.search_registered_models)]
    if not versions.found and name not in names:
        if not names:
            raise UserError(f"unknown registered model '{name}': no model is registered in {store_uri()}")
        raise UserError(one_of("registered model", name, names))
    champion = versions.champion
    earlier = versions.history[:-1] if champion is not None else versions.history
    kept = [version for version in earlier if version in versions.found]
    if not kept:
        gone = f", and version {', '.join(earlier)} no longer exists" if earlier else ""
        who = "no version is" if champion is None else f"version {champion} is the first that was"
        how = ": `stratagem models register RUN --force` makes another model the champion" if champion is None else ""
        raise UserError(f"'{name}' cannot be rolled back: {who} @{config.CHAMPION}{gone}{how}")
    missing = tuple(earlier[_end_of(kept[-1], earlier) :])
    return Rollback(versions, kept[-1], local_run_id(client, versions.found[kept[-1]].run_id), missing, earlier)


@retried
def move_champion_back(back: Rollback) -> None:
    """Move the alias `champion` back to the previous champion.

    The current champion gets the tag ``rolled_back``: only a forced registration makes it the champion again.

    Raises:
        UserError: MLflow refuses, for instance because a version was deleted after ``find_rollback``.
        Unavailable: the tracking server does not answer, or fails.
    """
    client, name, champion = open_store(), back.versions.name, back.versions.champion
    try:
        if champion is not None:
            # Versions after the current champion in the tag have not become the champion: drop them.
            _write_history(client, name, [*back.earlier, champion])
            client.set_model_version_tag(name, champion, ROLLED_BACK, records.now())
        client.set_registered_model_alias(name, config.CHAMPION, back.version)
        _write_history(client, name, back.earlier[: _end_of(back.version, back.earlier)])
    except MlflowException as error:
        if error.error_code != NOT_THERE:
            raise
        raise UserError(
            f"'{name}' cannot be rolled back to version {back.version}: {error}. Run `stratagem models "
            f"rollback {name}` again"
        ) from None


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Prevent other processes of this machine from registering or rolling back in the store during the block.

    The lock is a file next to the store; for a server, one of all projects of this user in ~/.cache/stratagem, or in
    this project's mlruns/ if that folder cannot be written. Two machines do not exclude each other: the last writer
    wins.

    Raises:
        StratagemError: another process has held the lock for an hour.
    """
    place, path = network.without_userinfo(store_uri()).rstrip("/"), config.project_root() / "mlruns" / ".registry.lock"
    if is_own_store():
        path = Path(place.removeprefix(SQLITE)).absolute().with_name(".registry.lock")
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "stratagem")
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            of_server = cache / f"{hashlib.sha256(place.encode()).hexdigest()}.lock"
            of_server.touch(mode=0o600)
            path = of_server
    try:
        with FileLock(path, timeout=LOCK_SECONDS):
            yield
    except Timeout:
        raise StratagemError(
            f"another process has registered a model in {place} for over an hour: end it, and register again"
        ) from None


@retried
def model_place(model_uri: str) -> str:
    """Return the artifact location of a logged model, ``models:/<model_id>``."""
    place: str = open_store().get_logged_model(model_uri.removeprefix("models:/")).artifact_location
    return place


@retried
def register_version(
    run: records.Run, model_uri: str, name: str, tags: Mapping[str, str], section: config.Register, judgement: Judgement
) -> records.RegisteredModel:
    """Register a logged model as a version, and set the version's aliases.

    An existing version with the same tag ``model_digest`` is reused.

    Args:
        run: the run that trained the model.
        model_uri: ``models:/<model_id>`` in the store with the registry.
        name: the name of the registered model.
        tags: the tags of a new version.
        section: the alias that each version gets, and the metric of its quality.
        judgement: whether the version replaces the champion ``judgement.against``.

    Raises:
        Unavailable: the tracking server does not answer, or fails, or the version is not ready: the aliases are
            unchanged.
    """
    client = open_store()
    model_id = model_uri.removeprefix("models:/")
    source_run_id = client.get_logged_model(model_id).source_run_id
    made = make_version(client, model_id, source_run_id, name, tags)
    version, before = str(made.version), find_versions(name)
    of_run = {"model_version": f"{name}/{version}", "gate": cut(judgement.reason, MAX_TAG)}
    if judgement.forced:
        of_run["forced"] = "true"
        client.set_model_version_tag(name, version, "forced", "true")
    # If a version is trained again, its tag keeps the earlier evidence.
    evidence = made.tags.get("gate", "")
    if judgement.reason not in evidence:
        added = f"{evidence}; run {run.run_id[:6]}: {judgement.reason}" if evidence else judgement.reason
        # Set before the aliases move, so that each move has its reason.
        client.set_model_version_tag(name, version, "gate", cut(added, MAX_TAG))
    client.set_registered_model_alias(name, section.alias, version)
    aliases = [section.alias]
    if judgement.promoted and before.champion != version:
        _promote(client, before, version)
    if judgement.promoted or before.champion == version:
        aliases.append(config.CHAMPION)
    set_tags(run, of_run)
    other = f"the same model as run {made.run_id}'s: version {version} is used again"
    return records.RegisteredModel(
        run_id=run.run_id,
        model_uri=model_uri,
        model_name=name,
        model_version=version,
        aliases=tuple(aliases),
        reason=None,
        notes=() if made.run_id == source_run_id else (other,),
        judgement=judgement,
    )


def make_version(client: mlflow.MlflowClient, model_id: str, run_id: str, name: str, tags: Mapping[str, str]) -> Any:
    """Return a logged model's version in the registry; a version with the same tag ``model_digest`` is reused.

    Raises:
        Unavailable: the version is not ready.
    """
    with contextlib.suppress(MlflowException):  # It already exists.
        client.create_registered_model(name)
    same = client.search_model_versions(f"name = '{name}' AND tags.model_digest = '{tags['model_digest']}'")
    made = min(same, key=lambda one: int(one.version), default=None)
    if made is None:
        # MLflow resolves `models:/` in the process's default store, perhaps a different one; a server uses its own.
        source = client.get_logged_model(model_id).artifact_location if is_own_store() else f"models:/{model_id}"
        made = client.create_model_version(
            name, source, run_id, tags=dict(tags), await_creation_for=0, model_id=model_id
        )
    status = client.get_model_version(name, made.version).status
    if status != "READY":
        raise Unavailable(
            f"{store_uri()}: the new version of model '{name}' is {status}, not READY: no alias was moved"
        )
    link = json.dumps([{"name": name, "version": str(made.version)}])
    client.set_logged_model_tags(model_id, {VERSIONS_TAG: link})
    return made


@retried
def list_versions() -> list[records.ModelVersion]:
    """Return all versions of all registered models, sorted by name and number; empty if the store does not exist yet.

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
    found = sorted(pages(client.search_model_versions), key=lambda one: (one.name, int(one.version)))
    return [version_of(client, one, aliases.get((one.name, str(one.version)), ())) for one in found]


def version_of(client: mlflow.MlflowClient, found: Any, aliases: Iterable[str]) -> records.ModelVersion:
    """Return the record of one of MLflow's versions. Search results do not contain the aliases."""
    return records.ModelVersion(
        name=found.name,
        version=str(found.version),
        aliases=tuple(sorted(aliases)),
        run_id=local_run_id(client, found.run_id),
        tags=found.tags,
    )


def local_run_id(client: Any, run_id: str | None) -> str | None:
    """Return a run's id in mlruns/, which differs from MLflow's id for a copied run."""
    if not run_id or entries.look_up(run_id) is not None:
        return run_id or None
    try:
        found: str = client.get_run(run_id).data.tags.get(RUN_ID, run_id)
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        return run_id  # It was deleted permanently.
    return found

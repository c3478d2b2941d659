"""Versions in MLflow's registry: made, and given an alias; which one is the champion, and which was it before.

MLflow keeps no history of an alias. The versions that were the champion stand in a tag of the registered model, the
first one first. It is written before the alias moves, which is one write: whatever a process that is killed has left
undone, the alias is at one version, and what stands after that version in the tag has not happened.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlflow
from filelock import FileLock, Timeout
from mlflow.exceptions import MlflowException

from tasks import config, records, runs
from tasks.errors import StratagemError, UserError, cut, one_of
from tasks.records import Judgement
from tasks.tracking import turns
from tasks.tracking.lifecycle import set_tags
from tasks.tracking.outbox import mlflow_run_id
from tasks.tracking.store import REFUSALS, SQLITE, is_own_store, open_store, retried, store_uri

HISTORY = "champion_history"
# Of a version that was the champion and is not to be again, unless somebody says so.
ROLLED_BACK = "rolled_back"
MAX_TAG = 4000
PAGE = 200
LOCK_SECONDS = 3600.0
NOT_THERE = "RESOURCE_DOES_NOT_EXIST"


class Candidate(NamedTuple):
    """A logged model that is to become a version."""

    run: records.Run
    model_uri: str
    """``models:/<model_id>``."""
    name: str
    """Of the registered model."""
    alias: str
    """That each version gets."""
    tags: Mapping[str, str]
    """Of a new version."""
    metric: str
    """Which of the tags says how good the model is."""
    better: Literal["higher", "lower"]
    """Which values of it are."""


class Standing(NamedTuple):
    """What a registered model has, before a candidate becomes a version of it."""

    own: str | None
    """The version that is the same model already."""
    has_alias: bool
    """Whether that one has the alias of all versions."""
    rolled_back: str | None
    """When that one was rolled back, if it was."""
    champion: str | None
    """The version that is the champion."""
    champion_tags: Mapping[str, str]
    lost: str | None
    """The version that was the champion last, where none is any more."""


@contextlib.contextmanager
def registering() -> Iterator[None]:
    """Let no other process register or roll back in the project's store within the block.

    A server has no such lock: there processes take turns (``turns``) at moving `champion`.
    """
    if not is_own_store():
        yield
        return
    path = Path(store_uri().removeprefix(SQLITE)).absolute()
    lock = FileLock(path.with_name(".registry.lock"), timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except Timeout:
        raise StratagemError(
            f"another process has registered a model in {path} for over an hour: end it, and register again"
        ) from None
    try:
        yield
    finally:
        lock.release()


@retried
def find_standing(candidate: Candidate) -> Standing:
    """Return what the registered model has; nothing is written.

    Raises:
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    model = _find_model(client, candidate.name)
    if model is None:
        return Standing(None, False, None, None, {}, None)
    own = _find_version(client, candidate, _source(client, candidate.model_uri))
    champion, history = _champion(model), _history(model)
    return Standing(
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
    place = _find(lambda: client.get_model_version_download_uri(name, version))
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
    """Make a logged model a version of a registered model, and give it the aliases that it has won.

    A version that has the same ``model_digest`` among its tags is used again.

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
    with contextlib.ExitStack() as stack:
        turn, other = None, None
        if judgement.promoted:
            try:
                turn = stack.enter_context(turns.taken(client, name))
            except turns.Taken as taken:
                other = str(taken)
        before = client.get_registered_model(name)
        if turn is not None and _champion(before) not in (judgement.against, str(made.version)):
            other = f"another registration moved @{config.CHAMPION} meanwhile"
        if other is not None:
            again = {"promoted": False, "reason": f"{other}. Then `stratagem register --run {run.run_id}`"}
            judgement = judgement.model_copy(update=again)
        # Before the aliases: one that has moved has its reason.
        reasons = {"gate": cut(judgement.reason, MAX_TAG)} | ({"forced": "true"} if judgement.forced else {})
        for key, text in reasons.items():
            client.set_model_version_tag(name, made.version, key, text)
        client.set_registered_model_alias(name, alias, made.version)
        aliases = [alias]
        if judgement.promoted and turn is not None:
            _promote(client, before, str(made.version), turn)
        if judgement.promoted or _champion(before) == str(made.version):
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
    """Return the version of a model, a new one or that which is the same, and what is remarkable about it."""
    name, run_id = candidate.name, mlflow_run_id(candidate.run)
    source = _source(client, candidate.model_uri)
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


def _source(client: mlflow.MlflowClient, model_uri: str) -> str:
    """Return what a version is made of."""
    # MLflow looks `models:/` up in the process' default store, which need not be this one; a server uses its own.
    if not is_own_store():
        return model_uri
    place: str = client.get_logged_model(model_uri.removeprefix("models:/")).artifact_location
    return place


def _note_worse(client: mlflow.MlflowClient, candidate: Candidate, made: Any, before: Any) -> list[str]:
    """Return a sentence, and put it down, where the alias of all versions moves to a worse model."""
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

    One that a lost request made beside it is deleted, unless it has an alias.
    """
    name, run_id = candidate.name, mlflow_run_id(candidate.run)
    same = client.search_model_versions(f"name = '{name}' AND tags.model_digest = '{candidate.tags['model_digest']}'")
    # Made before versions had digests, by a registration of this run that was killed.
    same = same or [one for one in client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
                    if one.source == source]  # fmt: skip
    first, *others = sorted(same, key=lambda one: int(one.version)) or [None]
    for one in others:
        if one.run_id == run_id and one.source == source and one.source == first.source and not one.aliases:
            client.delete_model_version(name, one.version)
    return first


def _find_model(client: mlflow.MlflowClient, name: str) -> Any:
    return _find(lambda: client.get_registered_model(name))


def _find(get: Callable[[], Any]) -> Any:
    """Return what is asked for, None where it is not there."""
    try:
        return get()
    except MlflowException as error:
        if error.error_code != NOT_THERE:
            raise
        return None


def _champion(model: Any) -> str | None:
    version = model.aliases.get(config.CHAMPION)
    return None if version is None else str(version)


def _history(model: Any) -> list[str]:
    """Return the versions that were the champion up to the present one, which is the last; or, where none is any more,
    all that were."""
    history = [version for version in str(model.tags.get(HISTORY, "")).split(", ") if version.isdigit()]
    champion = _champion(model)
    if champion is None:
        return history
    if champion not in history:  # Somebody gave it the alias by hand; or the first one's process was killed.
        return [*history, champion]
    last = len(history) - history[::-1].index(champion)
    return history[:last]


def _write_history(client: mlflow.MlflowClient, name: str, history: list[str]) -> None:
    client.set_registered_model_tag(name, HISTORY, ", ".join(history[-500:]))


def _promote(client: mlflow.MlflowClient, before: Any, version: str, turn: turns.Turn) -> None:
    """Move the alias `champion` to a version.

    Raises:
        StratagemError: see ``Turn.check``.
    """
    if _champion(before) == version:
        return
    turn.check()
    history = [*_history(before), version]
    if len(history) > 1:
        _write_history(client, before.name, history)
    turn.check()
    client.set_registered_model_alias(before.name, config.CHAMPION, version)
    if len(history) == 1:  # A tag without an alias would say that the first champion was lost.
        _write_history(client, before.name, history)


class Rollback(NamedTuple):
    """What a rollback would do."""

    name: str
    """Of the registered model."""
    champion: str | None
    """The version that has the alias; None where none has it any more."""
    version: str
    """That is to have it."""
    tags: Mapping[str, str]
    """Of that one."""
    run_id: str | None
    """Of the run in mlruns/ that it was made of, or as MLflow calls that; None where it says nothing of a run."""
    place: str
    """Where its files lie: an address that MLflow reads."""
    missing: tuple[str, ...]
    """Versions in between that are no longer there."""


@retried
def find_rollback(name: str) -> Rollback:
    """Return which version had the alias `champion` before the one that has it; nothing is written.

    Raises:
        UserError: there is no such registered model, or no version that was the champion before.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    model = _find_model(client, name)
    if model is None:
        names = [one.name for one in client.search_registered_models()]
        if not names:
            raise UserError(f"unknown registered model '{name}': there is none in {store_uri()}")
        raise UserError(one_of("registered model", name, names))
    champion, history = _champion(model), _history(model)
    there = {str(one.version): one for one in client.search_model_versions(f"name = '{name}'")}
    earlier = history[:-1] if champion is not None else history
    kept = [version for version in earlier if version in there]
    if not kept:
        gone = f", and version {', '.join(earlier)} is no longer there" if earlier else ""
        who = "no version is" if champion is None else f"version {champion} is the first that was"
        raise UserError(f"'{name}' cannot be rolled back: {who} @{config.CHAMPION}{gone}")
    found = there[kept[-1]]
    return Rollback(
        name=name,
        champion=champion,
        version=kept[-1],
        tags=found.tags,
        run_id=_local_run_id(client, found.run_id),
        place=client.get_model_version_download_uri(name, kept[-1]),
        missing=tuple(earlier[_place(earlier, kept[-1]) :]),
    )


def _place(history: list[str], version: str) -> int:
    """Return how many versions were the champion up to the last time that this one was it."""
    return len(history) - history[::-1].index(version)


@retried
def rollback(back: Rollback) -> None:
    """Move the alias `champion` back to the version that had it before.

    The version that had it gets the tag ``rolled_back``: no registration makes it the champion again, unless forced.

    Raises:
        UserError: that one or the model was deleted since ``find_rollback`` looked.
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: another process is moving the alias, or has moved it since then.
    """
    client, name = open_store(), back.name
    if _find_model(client, name) is None:  # A server lets nobody take a turn at it.
        raise _deleted(back, "the model")
    with turns.taken(client, name) as turn:
        model = _find_model(client, name)
        if model is None:
            raise _deleted(back, "the model")
        champion, history = _champion(model), _history(model)
        if champion == back.version:
            return  # Moved by a request before this one, whose reply was lost.
        earlier = history[:-1] if champion is not None else history
        if champion != back.champion or back.version not in earlier:
            raise StratagemError(
                f"@{config.CHAMPION} of '{name}' was moved meanwhile: it is at "
                f"{'no version' if champion is None else f'version {champion}'} now, and stays there. Then "
                f"`stratagem rollback {name}`"
            )
        _refuse_gone(client, back)
        turn.check()
        try:
            if champion is not None:
                # What stands after the present champion has not happened; then its last place in the tag tells.
                _write_history(client, name, history)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                client.set_model_version_tag(name, champion, ROLLED_BACK, now)
            turn.check()
            client.set_registered_model_alias(name, config.CHAMPION, back.version)
            _write_history(client, name, history[: _place(earlier, back.version)])
        except MlflowException as error:
            # MLflow gives no alias to a version that is not there: it was deleted since the look above.
            if error.error_code == NOT_THERE:
                if champion is not None:
                    with contextlib.suppress(MlflowException):  # It was deleted itself; or it has no mark yet.
                        client.delete_model_version_tag(name, champion, ROLLED_BACK)
                _refuse_gone(client, back)
            raise


def _refuse_gone(client: mlflow.MlflowClient, back: Rollback) -> None:
    """Refuse a rollback of which a version, or the model, is no longer there.

    Raises:
        UserError: says which.
    """
    if _find_model(client, back.name) is None:
        raise _deleted(back, "the model")
    again = f"Then `stratagem rollback {back.name}`"
    if _find(lambda: client.get_model_version(back.name, back.version)) is None:
        stays = "no version" if back.champion is None else f"version {back.champion}"
        raise _deleted(
            back, f"version {back.version}", f". @{config.CHAMPION} stays at {stays}. {again} takes the one before it"
        )
    if back.champion is not None and _find(lambda: client.get_model_version(back.name, back.champion)) is None:
        raise _deleted(
            back, f"version {back.champion}, which was @{config.CHAMPION},", f", so no version is now. {again} moves it"
        )


def _deleted(back: Rollback, what: str, then: str = "") -> UserError:
    which = f"'{back.name}' cannot be rolled back to version {back.version}"
    return UserError(f"{which}: {what} was deleted meanwhile{then}")


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
    for model in _pages(client.search_registered_models):
        for alias, version in model.aliases.items():
            aliases.setdefault((model.name, str(version)), []).append(alias)
    found = [
        records.ModelVersion(
            name=one.name,
            version=str(one.version),
            aliases=tuple(sorted(aliases.get((one.name, str(one.version)), ()))),
            run_id=_local_run_id(client, one.run_id),
            tags=one.tags,
        )
        for one in _pages(client.search_model_versions)
    ]
    return sorted(found, key=lambda one: (one.name, int(one.version)))


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=PAGE, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _local_run_id(client: Any, run_id: str | None) -> str | None:
    """Return the id that a run has in mlruns/: another one than MLflow's where it was started without the server."""
    if not run_id or runs.look_up(run_id) is not None:
        return run_id or None
    try:
        found: str = client.get_run(run_id).data.tags.get("local_run_id", run_id)
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        return run_id  # Deleted for good.
    return found

"""The alias `champion`: how it moves to a version, and back to the one that had it before.

MLflow keeps no history of an alias. A tag of the registered model lists the versions that were the champion, the
oldest first. The tag is written before the alias moves, and moving the alias is one write. So wherever a process is
killed, one version has the alias, and what the tag lists after that version has not happened.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlflow
from mlflow.exceptions import MlflowException

from tasks import config, runs
from tasks.system import clock
from tasks.system.errors import StratagemError, UserError, one_of
from tasks.tracking.store import REFUSALS, open_store, retried, store_uri

HISTORY = "champion_history"
# The tag of a version that a rollback took the alias from: it becomes the champion again only if that is forced.
ROLLED_BACK = "rolled_back"
NOT_THERE = "RESOURCE_DOES_NOT_EXIST"


def find_registered(client: mlflow.MlflowClient, name: str) -> Any:
    """Return the registered model of a name, None where there is none."""
    return find_or_none(lambda: client.get_registered_model(name))


def find_or_none(get: Callable[[], Any]) -> Any:
    """Return what is asked for, None where it is not there."""
    try:
        return get()
    except MlflowException as error:
        if error.error_code != NOT_THERE:
            raise
        return None


def champion_of(model: Any) -> str | None:
    """Return the version of a registered model that is the champion, None where none is."""
    version = model.aliases.get(config.CHAMPION)
    return None if version is None else str(version)


def history_of(model: Any) -> list[str]:
    """Return the versions that were the champion, up to the present one; all of them where no version has the alias."""
    history = [version for version in str(model.tags.get(HISTORY, "")).split(", ") if version.isdigit()]
    champion = champion_of(model)
    if champion is None:
        return history
    if champion not in history:  # Somebody gave it the alias by hand; or the first one's process was killed.
        return [*history, champion]
    return history[: _end_of(champion, history)]


def _write_history(client: mlflow.MlflowClient, name: str, history: list[str]) -> None:
    client.set_registered_model_tag(name, HISTORY, ", ".join(history[-500:]))


def promote(client: mlflow.MlflowClient, before: Any, version: str) -> None:
    """Move the alias `champion` of a registered model to a version."""
    if champion_of(before) == version:
        return
    history = [*history_of(before), version]
    if len(history) > 1:
        _write_history(client, before.name, history)
    client.set_registered_model_alias(before.name, config.CHAMPION, version)
    if len(history) == 1:  # A tag without an alias would say that the first champion was lost.
        _write_history(client, before.name, history)


class Rollback(NamedTuple):
    """What a rollback would do."""

    name: str
    """The registered model."""
    champion: str | None
    """The version that has the alias; None where no version has it any more."""
    version: str
    """The version that the alias moves to."""
    tags: Mapping[str, str]
    """The tags of that version."""
    run_id: str | None
    """The run that made that version: its id in mlruns/, or MLflow's; None where the version names no run."""
    place: str
    """Where the files of that version lie: an address that MLflow reads."""
    missing: tuple[str, ...]
    """Versions in between that were deleted."""


@retried
def find_rollback(name: str) -> Rollback:
    """Return which version had the alias `champion` before the one that has it; nothing is written.

    Raises:
        UserError: there is no such registered model, or no version that was the champion before.
        Unavailable: the tracking server does not answer, or fails.
    """
    client = open_store()
    model = find_registered(client, name)
    if model is None:
        names = [one.name for one in client.search_registered_models()]
        if not names:
            raise UserError(f"unknown registered model '{name}': there is none in {store_uri()}")
        raise UserError(one_of("registered model", name, names))
    champion, history = champion_of(model), history_of(model)
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
        run_id=local_run_id(client, found.run_id),
        place=client.get_model_version_download_uri(name, kept[-1]),
        missing=tuple(earlier[_end_of(kept[-1], earlier) :]),
    )


def _end_of(version: str, history: list[str]) -> int:
    """Return how much of a history there is up to the last place of a version in it."""
    return len(history) - history[::-1].index(version)


@retried
def move_champion_back(back: Rollback) -> None:
    """Move the alias `champion` back to the version that had it before.

    The present champion gets the tag ``rolled_back``: no registration makes it the champion again, unless forced.

    Raises:
        UserError: a version or the model was deleted since ``find_rollback`` looked.
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: another process has moved the alias since then.
    """
    client, name = open_store(), back.name
    model = find_registered(client, name)
    if model is None:
        raise _deleted(back, "the model")
    champion, history = champion_of(model), history_of(model)
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
    try:
        if champion is not None:
            # What the tag lists after the present champion has not happened: cut it off.
            _write_history(client, name, history)
            client.set_model_version_tag(name, champion, ROLLED_BACK, clock.now())
        client.set_registered_model_alias(name, config.CHAMPION, back.version)
        _write_history(client, name, history[: _end_of(back.version, earlier)])
    except MlflowException as error:
        # MLflow gives no alias to a version that does not exist: it was deleted since the look above.
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
    if find_registered(client, back.name) is None:
        raise _deleted(back, "the model")
    again = f"Then `stratagem rollback {back.name}`"
    if find_or_none(lambda: client.get_model_version(back.name, back.version)) is None:
        stays = "no version" if back.champion is None else f"version {back.champion}"
        raise _deleted(
            back, f"version {back.version}", f". @{config.CHAMPION} stays at {stays}. {again} takes the one before it"
        )
    if back.champion is not None and find_or_none(lambda: client.get_model_version(back.name, back.champion)) is None:
        raise _deleted(
            back, f"version {back.champion}, which was @{config.CHAMPION},", f", so no version is now. {again} moves it"
        )


def _deleted(back: Rollback, what: str, then: str = "") -> UserError:
    which = f"'{back.name}' cannot be rolled back to version {back.version}"
    return UserError(f"{which}: {what} was deleted meanwhile{then}")


def local_run_id(client: Any, run_id: str | None) -> str | None:
    """Return the id that a run has in mlruns/, which differs from MLflow's where the server did not answer at its
    start."""
    if not run_id or runs.look_up(run_id) is not None:
        return run_id or None
    try:
        found: str = client.get_run(run_id).data.tags.get("local_run_id", run_id)
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        return run_id  # Deleted for good.
    return found

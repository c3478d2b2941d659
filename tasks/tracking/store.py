"""The store of runs and models: where it is, whether it answers, what is made in it once.

It is mlruns/mlflow.db with its files in mlruns/artifacts, or what MLFLOW_TRACKING_URI names.
"""

import contextlib
import functools
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlflow
from filelock import FileLock
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from tasks.runs import relocation
from tasks.system import files, network
from tasks.system.errors import UserError

SQLITE = "sqlite:///"

PAGE = 100

# What MLflow will not take at any other time either.
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST")


# Between two tries of the same.
PAUSES_SECONDS = (0.5, 2.0)

P = ParamSpec("P")
T = TypeVar("T")


class Unavailable(UserError):
    """The tracking server does not answer."""


def store_uri() -> str:
    """Return the address of the tracking store, which is the model registry too."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{relocation.own_store()}"


def is_own_store() -> bool:
    """Return whether the store is a file of this machine's, and no server that others write to."""
    return store_uri().startswith(SQLITE)


def open_store() -> mlflow.MlflowClient:
    """Return a client of the store. A SQLite store that does not exist yet is made, by one process only.

    Raises:
        UserError: the store cannot be written, is no MLflow store, is of another MLflow version, or does not answer; or
            its folder has a name that MLflow cannot use.
    """
    uri = store_uri()
    if uri.startswith(SQLITE):
        if "?" in uri:  # MLflow would make a file beside the project.
            raise UserError(
                f"MLflow cannot use {uri}: what stands behind a `?` is not part of a file's name to it. Rename that "
                "folder, or give MLFLOW_TRACKING_URI=sqlite:///FILE, or a server's address"
            )
        path = Path(uri.removeprefix(SQLITE)).absolute()
        if not path.exists():
            make_store(path)
        _check_schema(path)
        if path == relocation.own_store():
            relocation.mend()
    elif uri.startswith(("http://", "https://")):
        _check_server(uri)
    try:
        return mlflow.MlflowClient(uri, registry_uri=uri)
    except (MlflowException, ImportError, SQLAlchemyError) as error:
        name = "the MLflow store" if uri.startswith(SQLITE) else "MLFLOW_TRACKING_URI ="
        raise UserError(f"{name} {uri} cannot be used: {error}") from None


def make_store(path: Path) -> None:
    """Make an empty SQLite store; one process does it.

    Raises:
        UserError: its folder cannot be written.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several first runs at once, or one that is killed inside the migration, would leave a broken store for ever.
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=120):
            if path.exists():
                return
            building = path.with_name(f".{path.name}.building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            store = SqlAlchemyStore(f"{SQLITE}{building / path.name}", (path.parent / "artifacts").as_uri())
            store.engine.dispose()
            os.replace(building / path.name, path)
            shutil.rmtree(building)
    except OSError as error:
        raise UserError(f"{path} cannot be made ({error}): make {path.parent} a folder that you can write to") from None


def _check_schema(path: Path) -> None:
    """Refuse what MLflow would damage or misname: to it a newer store is "out-of-date", and a broken one is empty."""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UserError(f"{path} cannot be written: give yourself write access to it and to its folder")
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=20)) as connection:
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise UserError(
            f"{path} is not an MLflow store ({error}): move it away; the next run makes a new one"
        ) from None
    migrations = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    if not any(migrations.glob(f"{revision}_*.py")):
        raise UserError(
            f"{path} was written by a newer MLflow than the installed {mlflow.__version__} (its schema is {revision}): "
            "install that MLflow, or move the file away; the next run makes a new one"
        )


def _check_server(uri: str) -> None:
    # MLflow's client tries for 246 s before it says that a server is down.
    # One that is down refuses at once; a busy one may take as long as for any other request.
    seconds = 3.0, min(float(MLFLOW_HTTP_REQUEST_TIMEOUT.get()), 30.0)
    if (reason := network.unreachable_reason(f"{uri.rstrip('/')}/health", seconds)) is not None:
        raise Unavailable(
            f"MLFLOW_TRACKING_URI = {uri}: no MLflow server answers ({reason}): start it, or unset the variable"
        )


def retried(work: Callable[P, T]) -> Callable[P, T]:
    """Return work that is tried again when the store did not do it or did not answer; twice done, it must be as once.

    MLflow's own client would send the same request again without looking whether the first one was done, and its reply
    lost: so came two runs, and two versions, of one training.

    Raises:
        Unavailable: the store does not do it at any other time either, or does not answer any more.
    """

    @functools.wraps(work)
    def patient(*args: P.args, **kwargs: P.kwargs) -> T:
        for pause in (*PAUSES_SECONDS, None):
            try:
                return work(*args, **kwargs)
            except MlflowException as error:
                if error.error_code in REFUSALS:
                    raise
                full = files.find_full_disk(error, store_uri().removeprefix(SQLITE))
                if full is not None and is_own_store():
                    raise full from None
                if pause is None:
                    raise Unavailable(f"{store_uri()}: MLflow does not do what it is asked ({error})") from None
            time.sleep(pause)
        raise AssertionError

    return patient


def pages(search: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield all that a search finds."""
    token = None
    while True:
        page = search(*arguments, max_results=PAGE, page_token=token, **options)
        yield from page
        if not (token := page.token):
            return


def find_experiment(client: mlflow.MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is made if it is not there.

    Raises:
        UserError: it was deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        # MLflow's default would be relative to the folder that the user happens to be in.
        uri = store_uri()
        beside = Path(uri.removeprefix(SQLITE)).absolute().parent if uri.startswith(SQLITE) else None
        location = (beside / "artifacts" / name).as_uri() if beside else None
        try:
            # The tag makes MLflow's pages show training runs at the side, instead of prompts and agents.
            made: str = client.create_experiment(name, location, {"mlflow.experimentKind": "custom_model_development"})
            return made
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # Another process was quicker.
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the MLflow experiment '{name}' was deleted: bring it back with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or give another one: --set tracking.experiment=NAME"
        )
    found_id: str = found.experiment_id
    return found_id

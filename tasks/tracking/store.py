"""The MLflow stores of runs and models: their addresses, availability and creation.

Runs are written to the project's own store: mlruns/mlflow.db with its files in mlruns/artifacts, or an SQLite file in
MLFLOW_TRACKING_URI. If that variable names a server, models are registered on the server, and runs are copied to it.
"""

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlflow
from alembic.migration import MigrationContext
from filelock import FileLock
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from sqlalchemy import URL, create_engine
from sqlalchemy.exc import SQLAlchemyError

from tasks.runs import relocation
from tasks.system import files, network
from tasks.system.errors import UserError

SQLITE = "sqlite:///"

PAGE = 100

# Errors that a retry cannot fix.
NOT_THERE = "RESOURCE_DOES_NOT_EXIST"
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", NOT_THERE)
DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
CREDENTIALS = ": set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"

# Pauses between retries.
PAUSES_SECONDS = (0.5, 1.0, 2.0, 2.0)

P = ParamSpec("P")
T = TypeVar("T")


class Unavailable(UserError):
    """The tracking server does not answer."""


def store_uri() -> str:
    """Return the address of the store with the model registry: the team's server if set, else the own store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{relocation.own_store()}"


def own_uri() -> str:
    """Return the address of the store that runs are written to, a local file."""
    return store_uri() if is_own_store() else f"{SQLITE}{relocation.own_store()}"


def is_own_store() -> bool:
    """Return whether the registry is in the own store, not on a server that others write to."""
    return store_uri().startswith(SQLITE)


def open_own_store() -> mlflow.MlflowClient:
    """Return a client of the store that runs are written to; see ``open_store``."""
    return open_store(own_uri())


def open_store(uri: str | None = None) -> mlflow.MlflowClient:
    """Return a client of the store with the registry. If a SQLite store does not exist yet, exactly one process creates
    it.

    Args:
        uri: the address of another store.

    Raises:
        UserError: the store is not writable, is not an MLflow store, has another MLflow version, or does not answer; or
            MLflow cannot use the name of its folder.
    """
    uri = uri or store_uri()
    if uri.startswith(SQLITE):
        if "?" in uri:  # MLflow would create a file outside the project.
            raise UserError(
                f"MLflow cannot use {uri}: it does not treat the part after `?` as part of a file name. Rename that "
                "folder, or set MLFLOW_TRACKING_URI=sqlite:///FILE, or a server's address"
            )
        path = Path(uri.removeprefix(SQLITE)).absolute()
        if not path.exists():
            make_store(path)
        _check_schema(path)
        if path == relocation.own_store():
            relocation.correct_paths()
    elif uri.startswith(("http://", "https://")):
        _check_server(uri)
    elif network.NO_SCHEME.match(uri):
        raise UserError(network.NEEDS_SCHEME)
    try:
        return mlflow.MlflowClient(uri, registry_uri=uri)
    except (MlflowException, ImportError, SQLAlchemyError) as error:
        name = "the MLflow store" if uri.startswith(SQLITE) else "MLFLOW_TRACKING_URI ="
        raise UserError(f"{name} {uri} cannot be used: {error}") from None


def open_registry() -> mlflow.MlflowClient:
    """Return a client for reading the registry, without creating its store; see ``open_store``.

    Raises:
        UserError: the store does not exist.
    """
    path = Path(store_uri().removeprefix(SQLITE))
    if store_uri().startswith(SQLITE) and not path.exists():
        raise UserError(f"no model is registered yet: {path} does not exist. `stratagem run` trains and registers one")
    return open_store()


def make_store(path: Path) -> None:
    """Create an empty SQLite store, unless another process has created it.

    Raises:
        UserError: its folder is not writable.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the lock and the rename, simultaneous first runs or a kill during the migration would break the store.
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
        raise UserError(f"{path} cannot be created ({error}): make {path.parent} a writable folder") from None


def _check_schema(path: Path) -> None:
    """Refuse stores that MLflow misreports or damages: it calls a newer store "out-of-date", and a broken one empty."""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        raise UserError(f"{path} cannot be written: make it and its folder writable")
    engine = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": 20})
    try:
        with engine.connect() as connection:
            revision, why = MigrationContext.configure(connection).get_current_revision(), "it has no schema version"
    except SQLAlchemyError as error:
        revision, why = None, str(error.__cause__ or error)
    finally:
        engine.dispose()
    if revision is None:
        raise UserError(f"{path} is not an MLflow store ({why}): move it away; the next run creates a new one")
    migrations = Path(mlflow.__file__).parent / "store" / "db_migrations" / "versions"
    if not any(migrations.glob(f"{revision}_*.py")):
        raise UserError(
            f"{path} was written by a newer MLflow than the installed {mlflow.__version__} (its schema is {revision}): "
            "install that MLflow, or move the file away; the next run creates a new one"
        )


def _check_server(uri: str) -> None:
    if "#" in uri:
        server = uri.partition("#")[0].rstrip("/")
        raise UserError(f"MLFLOW_TRACKING_URI = {uri} is the address of a page. Use that of its server: {server}")
    # MLflow's client retries for 246 s before it reports that a server is down.
    # A server that is down refuses immediately; a busy server gets the usual timeout.
    seconds = 3.0, min(float(MLFLOW_HTTP_REQUEST_TIMEOUT.get()), 30.0)
    if (reason := network.unreachable_reason(f"{uri.rstrip('/')}/health", seconds)) is not None:
        raise Unavailable(
            f"MLFLOW_TRACKING_URI = {uri}: no MLflow server answers ({reason}): start it, or unset the variable"
        )


def retried(work: Callable[P, T]) -> Callable[P, T]:
    """Retry a function when the store fails or does not answer; the function must be idempotent.

    MLflow's own client resends a request without checking whether the first one succeeded: lost replies created two
    runs and two versions of one training.

    Raises:
        Unavailable: the store still fails after all attempts.
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
                refused = error.error_code in DENIED
                if pause is None or refused or "timed out" in str(error):  # No retry if the server hangs.
                    what = str(error).partition(". Response body:")[0]  # It may be a page of a proxy.
                    raise Unavailable(f"{store_uri()}: MLflow fails ({what}){CREDENTIALS if refused else ''}") from None
            time.sleep(pause)
        raise AssertionError

    return patient


def pages(search: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield the results of all pages of a search."""
    token = None
    while True:
        page = search(*arguments, max_results=PAGE, page_token=token, **options)
        yield from page
        if not (token := page.token):
            return


def logged_models(client: mlflow.MlflowClient, run: Any) -> list[Any]:
    """Return the models that were logged for one of MLflow's runs."""
    wanted = f"source_run_id = '{run.info.run_id}'"
    return list(pages(client.search_logged_models, [run.info.experiment_id], wanted))


def find_or_none(get: Callable[[], Any]) -> Any:
    """Return the result of a request, None if the object does not exist."""
    try:
        return get()
    except MlflowException as error:
        if error.error_code != NOT_THERE:
            raise
        return None


def find_experiment(client: mlflow.MlflowClient, name: str, uri: str) -> str:
    """Return the id of an experiment; create the experiment if it does not exist.

    Args:
        client: a client of the store.
        name: the name of the experiment.
        uri: the address of the store.

    Raises:
        UserError: the experiment was deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        # MLflow's default would be relative to the current working directory.
        beside = Path(uri.removeprefix(SQLITE)).absolute().parent if uri.startswith(SQLITE) else None
        location = (beside / "artifacts" / name).as_uri() if beside else None
        try:
            # With this tag, MLflow's sidebar shows training runs instead of prompts and agents.
            made: str = client.create_experiment(name, location, {"mlflow.experimentKind": "custom_model_development"})
            return made
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # Another process was quicker.
    if found.lifecycle_stage == "deleted":
        raise UserError(
            f"the MLflow experiment '{name}' was deleted: restore it with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or use another one: --set tracking.experiment=NAME"
        )
    experiment_id: str = found.experiment_id
    return experiment_id

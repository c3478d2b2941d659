"""Runs that are brought to another MLflow store: what is asked before, and the process that does it."""

import os
from pathlib import Path

from tasks import records
from tasks.process.child import run_in_own_process
from tasks.system import network
from tasks.system.errors import UserError


def sync(to: str | None, folder: Path | None) -> records.Sync:
    """Bring the runs of this project, or of another machine's mlruns/, to an MLflow store, by a process that imports
    MLflow.

    Args:
        to: its address; None is MLFLOW_TRACKING_URI.
        folder: the mlruns/ of another machine.

    Raises:
        UserError: there is no such store or folder.
        StratagemError: the store cannot be used, or stopped answering.
    """
    return _run("sync", _check(to), folder)


def explain(to: str | None, folder: Path | None) -> records.Explanation:
    """Return what ``sync`` would do: both stores are asked, and nothing is written.

    Raises:
        UserError: there is no such store or folder.
        StratagemError: a store cannot be used, or stopped answering.
    """
    found = _run("planned_sync", uri := _check(to), folder)
    does = {"delivered": "would run", "updated": "would run", "there already": "is there already"}
    whys = {"delivered": f"{uri} has not all of it", "updated": "it has changed since it was brought"}
    return records.Explanation(
        stages=tuple(
            records.PlannedStage.model_validate(
                {
                    "stage": f"run {one.run_id[:8]}, {one.name}",
                    "does": does.get(one.outcome, "is left out"),
                    "why": one.reason or whys.get(one.outcome, f"as run {one.there}"),
                }
            )
            for one in found.runs
        )
    )


def _check(to: str | None) -> str:
    """Return the address of the other store."""
    uri = to if to is not None else os.environ.get("MLFLOW_TRACKING_URI", "")
    what = f"--to {uri}" if to is not None else f"MLFLOW_TRACKING_URI = {uri}"
    if not uri:
        raise UserError("where to? Give --to http://HOST:PORT, or set MLFLOW_TRACKING_URI")
    if not uri.startswith(("http://", "https://", "sqlite:///")):
        raise UserError(f"{what}: is no store that runs can be brought to. Give http://HOST:PORT or sqlite:///FILE")
    if network.without_userinfo(uri) != uri:
        raise UserError(
            "--to: a password in a command can be read by every user of this machine. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, and leave it out"
        )
    health = f"{uri.rstrip('/')}/health"
    if uri.startswith("http") and (reason := network.unreachable_reason(health, (5, 30))) is not None:
        raise UserError(f"{what}: no MLflow server answers ({reason}): start it, or give another address")
    if uri.startswith("sqlite:///"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    return uri


def _run(stage: str, uri: str, folder: Path | None) -> records.Sync:
    given = [str(folder.absolute())] if folder is not None else []
    done = run_in_own_process(stage, *given, environment={"MLFLOW_TRACKING_URI": uri})
    done.check_returncode()
    return records.Sync.model_validate_json(done.stdout.splitlines()[-1])

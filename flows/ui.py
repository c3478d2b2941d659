"""The pages that `stratagem ui` serves, to whoever has the key: MLflow's, and a Prefect server with its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import requests

from flows.prefect_server import guarded_environment, make_password
from tasks import config, relocation
from tasks.errors import StratagemError
from tasks.machine import free_ports
from tasks.network import unreachable_reason, without_userinfo
from tasks.process.environment import stage_environment
from tasks.records import HEADLINES

# MLflow's and Prefect's own.
USUAL_PORTS = {"mlflow": 5000, "prefect": 4200}
# What MLflow's table of runs shows on our link; it has no accuracy by itself.
VIEW = {
    "selectedColumns": [
        "attributes.`Dataset`",
        *(f"metrics.`test/{name}`" for name in HEADLINES.values()),
        "metrics.`performance/examples_per_second`",
    ],
    "orderByKey": "attributes.start_time",
    "orderByAsc": False,
}
VIEW_NAME = "stratagem"
MOST_COMPARED = 10


def serve() -> None:
    """Serve MLflow's pages and a Prefect server on 127.0.0.1 until this process is interrupted."""
    root = config.project_root()
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlruns' / 'mlflow.db'}"
    served = store.startswith(("http://", "https://"))  # By somebody else, with pages of its own.
    if not (os.environ.get("MLFLOW_TRACKING_URI") or (root / "mlruns" / "mlflow.db").exists()):
        # A new store that MLflow's server and a run make at the same moment stays broken for ever.
        make = "from tasks import tracking; tracking.open_store()"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=root, env=stage_environment(None))
    elif not os.environ.get("MLFLOW_TRACKING_URI"):
        relocation.mend()
    ports = _choose_ports(root / "mlruns" / "ui.json")
    mlflow, prefect = (f"http://127.0.0.1:{ports[name]}" for name in USUAL_PORTS)
    key = make_password()
    environment = stage_environment(None)
    python = [sys.executable, "-m"]
    # Each knows its own secrets alone, and from its environment: every user can read a command line.
    for_mlflow = [*python, "tasks.tracking.pages", str(ports["mlflow"])]
    for_prefect = [*python, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(ports["prefect"])]
    # What is served, with which environment, and where it answers.
    planned = [
        *([] if served else [(for_mlflow, environment | {"MLFLOW_TRACKING_URI": store, "STRATAGEM_KEY": key}, mlflow)]),
        (
            [*for_prefect, "--no-services"],
            environment
            | guarded_environment(key, prefect)
            # Its pages would ask port 4200 whatever port their server has.
            | {"PREFECT_API_AUTH_STRING": key, "PREFECT_SERVER_UI_API_URL": f"{prefect}/api"},
            f"{prefect}/api/health",
        ),
    ]
    log = root / "mlruns" / "ui.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_server(command, variables, root, output)) for command, variables, _ in planned]
        for (_, _, address), server in zip(planned, servers, strict=True):
            while server.poll() is None and unreachable_reason(address) is not None:
                time.sleep(0.2)
        if all(server.poll() is None for server in servers):
            for name, address in [("MLflow", without_userinfo(store))] if served else mlflow_links(mlflow, key):
                print(f"{name:9}{address}", flush=True)
            print(f"Prefect  {prefect}/runs", flush=True)
            user, _, password = key.partition(":")
            if not served:
                print(f"User     {user}, password {password}   what MLflow's pages ask for, once", flush=True)
            print(f"Password {key}   what Prefect's page asks for, once", flush=True)
            print("Ctrl-C ends all.", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        raise StratagemError(f"a server ended by itself; its log is {log}")


def mlflow_links(mlflow: str, key: str) -> list[tuple[str, str]]:
    """Return what there is to see in MLflow, and where: each experiment's runs, and the newest of them side by side.

    Args:
        mlflow: where its server answers; it is asked which experiments have runs.
        key: of the server.
    """
    user, _, password = key.partition(":")
    with requests.Session() as session:
        session.auth = (user, password)

        def ask(what: str, **body: Any) -> dict[str, Any]:
            answer = session.post(f"{mlflow}/api/2.0/mlflow/{what}", json=body, timeout=60)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found

        found = []
        for experiment in ask("experiments/search", max_results=100).get("experiments", []):
            of = experiment["experiment_id"]
            newest = ask(
                "runs/search",
                experiment_ids=[of],
                max_results=MOST_COMPARED,
                filter="attributes.status = 'FINISHED'",
                order_by=["attributes.start_time DESC"],
            )
            run_ids = [run["info"]["run_id"] for run in newest.get("runs", [])]
            if not run_ids:
                continue
            view = json.dumps(VIEW)
            ask(
                "experiments/set-experiment-tag",
                experiment_id=of,
                key=f"mlflow.sharedViewState.{VIEW_NAME}",
                value=view,
            )
            seen = f"workflowType=machine_learning&viewStateShareKey={VIEW_NAME}"
            found.append(("Runs", f"{mlflow}/#/experiments/{of}/runs?{seen}"))
            if len(run_ids) > 1:
                compared = json.dumps(run_ids, separators=(",", ":"))
                chosen = urllib.parse.urlencode(
                    {"runs": compared, "experiments": json.dumps([of]), "workflowType": "machine_learning"}
                )
                found.append(("Compare", f"{mlflow}/#/compare-runs?{chosen}"))
    return [("MLflow", f"{mlflow}/"), *found]


def _choose_ports(kept: Path) -> dict[str, int]:
    """Return a port for each server: the last time's or the usual one where it is free, so that a bookmark holds."""
    try:
        before = json.loads(kept.read_text(encoding="utf-8"))
        wanted = {name: int(before[name]) for name in USUAL_PORTS}
    except (OSError, ValueError, KeyError, TypeError):
        wanted = USUAL_PORTS
    others = iter(free_ports(len(USUAL_PORTS)))
    chosen = {name: port if _is_free(port) else next(others) for name, port in wanted.items()}
    kept.write_text(json.dumps(chosen), encoding="utf-8")
    return chosen


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def _server(
    command: list[str], environment: dict[str, str], root: Path, output: IO[bytes]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server, and end it with the processes that it started itself, also when this process is killed."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tasks", "guard", *command],
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        process_group=0,  # Ctrl-C reaches this process alone.
    )
    try:
        yield server
    finally:
        if server.stdin is not None:
            server.stdin.close()
        server.wait()

"""The pages that `stratagem ui` serves, to whoever has the key: MLflow's, and a Prefect server with its own."""

import contextlib
import json
import time
import urllib.parse
from typing import Any

import requests

from flows.operate.prefect_server import make_password
from flows.operate.servers import end, listen, mlflow_pages, prefect_server, start, tracking_store
from tasks import config
from tasks.records import HEADLINES
from tasks.system.errors import StratagemError
from tasks.system.network import unreachable_reason, without_userinfo

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
    listening = listen(root / "mlruns" / "ui.json")
    key = make_password()
    pages, server = mlflow_pages(listening["mlflow"], key), prefect_server(listening["prefect"], key, schedules=False)
    store, prefect = tracking_store(), server.address
    planned = [one for one in (pages, server) if one is not None]
    log = root / "mlruns" / "ui.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        servers = []
        for one in planned:
            servers.append(start(one, output))
            stack.callback(end, servers[-1])
        for one, process in zip(planned, servers, strict=True):
            while process.poll() is None and unreachable_reason(one.health) is not None:
                time.sleep(0.2)
        if all(server.poll() is None for server in servers):
            for name, address in mlflow_links(pages.address, key) if pages else [("MLflow", without_userinfo(store))]:
                print(f"{name:9}{address}", flush=True)
            print(f"Prefect  {prefect}/runs", flush=True)
            user, _, password = key.partition(":")
            if pages:
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

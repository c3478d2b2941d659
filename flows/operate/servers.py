"""MLflow's pages and a Prefect server on 127.0.0.1, for clients with the key: how each starts and ends."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flows.operate.prefect_server import guarded_environment, make_password
from tasks import config, records
from tasks.records import HEADLINES, ServiceState
from tasks.runs import relocation
from tasks.strategies.environment import stage_environment
from tasks.system.child import Child, guarded
from tasks.system.errors import StratagemError
from tasks.system.network import unreachable_reason, without_userinfo

VIEW = "stratagem"
COLUMNS = [
    *(f"metrics.`test/{name}`" for name in HEADLINES.values()),
    "metrics.`training/examples_per_second`",
]
# The defaults of MLflow and Prefect.
USUAL_PORTS = {"mlflow": 5000, "prefect": 4200}
LONGEST_PAUSE_SECONDS = 60.0
"""The longest pause before a restart. A program that ran for longer than this restarts after the shortest pause."""
MAX_LOG_BYTES = 20_000_000


@dataclass
class Server:
    """A server, or the worker of `up`: how it starts, and its state.

    Each gets only its own secrets, in its environment, because every user of the machine can read a command line.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    log: Path
    listening: socket.socket | None = None
    """The server's socket; None for the worker. This process keeps it open while the server restarts, so that no other
    program can take the port and receive the password."""
    process: Child | None = None
    began: float = 0.0
    """In seconds since 1970."""
    not_before: float = 0.0
    """When it may start again, on the clock of `time.monotonic`."""
    pause: float = 0.0
    restarts: int = 0
    last_end: str | None = None

    @property
    def address(self) -> str:
        """The server's URL; empty for the worker."""
        return _address(self.listening) if self.listening is not None else ""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.alive

    def start(self) -> None:
        """Start it; it and its children end when it is closed, or when this process dies for any reason.

        A log that is too large is renamed first.
        """
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        handed = [self.listening.fileno()] if self.listening is not None else []
        with self.log.open("ab") as output:
            streams = {"stdout": output, "stderr": output, "pass_fds": handed}
            self.process = Child(guarded(self.command), self.environment, cwd=config.project_root(), **streams)
        self.began = psutil.Process(self.process.pid).create_time()

    def close(self) -> None:
        """End it and wait."""
        if self.process is not None:
            self.process.close(seconds=None)

    def note_end(self, code: int) -> None:
        """Note how it ended; the pause before it starts again doubles with each end."""
        lived = time.time() - self.began
        self.pause = 1.0 if lived > LONGEST_PAUSE_SECONDS else min(2 * self.pause or 1.0, LONGEST_PAUSE_SECONDS)
        number = -code if code < 0 else code - 128  # As a shell, and so a guard, has it.
        self.last_end = signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"
        self.process, self.restarts = None, self.restarts + 1
        self.not_before = time.monotonic() + self.pause

    def answers(self) -> bool:
        """Return whether it runs and accepts requests."""
        return self.alive and server_answers(self.name, self.address, 5.0)

    def state(self) -> ServiceState:
        """Return its record."""
        return ServiceState(
            name=self.name,
            pid=self.process.pid if self.process is not None else 0,
            created=self.began,
            since=records.at(self.began),
            restarts=self.restarts,
            last_end=self.last_end,
            address=self.address,
            log=str(self.log.relative_to(config.project_root())),
        )


def server_answers(name: str, address: str, seconds: float) -> bool:
    """Return whether a server answers within ``seconds``; True if it has no address."""
    health = f"{address}/api/health" if name == "prefect" else address
    return not health or unreachable_reason(health, seconds) is None


def tracking_store() -> str:
    """Return the URI of this project's MLflow tracking store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{config.project_root() / 'mlruns' / 'mlflow.db'}"


def mlflow_pages(listening: socket.socket, key: str, log: Path) -> Server | None:
    """Return the server of MLflow's pages, which creates the store if needed; None if another server has the store."""
    store = tracking_store()
    if not os.environ.get("MLFLOW_TRACKING_URI") and relocation.own_store().exists():
        relocation.correct_paths()  # Here, where the user reads that the project was moved.
    if store.startswith(("http://", "https://")):
        listening.close()
        return None
    command = (sys.executable, "-m", "tasks.tracking.pages", str(listening.fileno()))
    environment = stage_environment(None) | {"MLFLOW_TRACKING_URI": store, "STRATAGEM_KEY": key}
    return Server("mlflow", command, environment, log, listening)


def prefect_server(listening: socket.socket, key: str, log: Path, schedules: bool, home: Path | None = None) -> Server:
    """Return a Prefect server, with its database in ``home`` or Prefect's default folder; with ``schedules`` it also
    runs Prefect's background services, such as the scheduler."""
    address, more = _address(listening), [] if schedules else ["--no-services"]
    command = (sys.executable, "-m", "flows.operate.server", str(listening.fileno()), "--pages", *more)
    environment = (
        stage_environment(None)
        | guarded_environment(key, address)
        # By default the pages ask port 4200, whatever the server's port.
        | {"PREFECT_API_AUTH_STRING": key, "PREFECT_SERVER_UI_API_URL": f"{address}/api"}
        | ({"PREFECT_HOME": str(home)} if home else {})
    )
    return Server("prefect", command, environment, log, listening)


def listen(kept: Path) -> dict[str, socket.socket]:
    """Return a socket for each server, on the port that the file ``kept`` records, so that bookmarks stay valid, or
    else on the default port; on a random port if that is not free."""
    ports = USUAL_PORTS
    with contextlib.suppress(OSError, ValueError):
        ports = json.loads(kept.read_text(encoding="utf-8"))
    listening = {}
    for name, port in ports.items():
        try:
            listening[name] = socket.create_server(("127.0.0.1", port))
        except OSError:
            listening[name] = socket.create_server(("127.0.0.1", 0))
    kept.write_text(json.dumps({name: one.getsockname()[1] for name, one in listening.items()}), encoding="utf-8")
    return listening


def _address(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def show_pages() -> None:
    """Serve MLflow's pages and a Prefect server until this process is interrupted.

    Raises:
        StratagemError: a server ended unexpectedly.
    """
    folder, key = config.project_root() / "mlruns", make_password()
    listening, log = listen(folder / "ui.json"), folder / "ui.log"
    pages = mlflow_pages(listening["mlflow"], key, log)
    prefect = prefect_server(listening["prefect"], key, log, schedules=False)
    servers = [one for one in (pages, prefect) if one is not None]
    with contextlib.ExitStack() as stack:
        for one in servers:
            one.start()
            stack.callback(one.close)
        while not all(one.answers() for one in servers) and all(one.alive for one in servers):
            time.sleep(0.2)
        if all(one.alive for one in servers):
            print(f"MLflow   {pages.address if pages else without_userinfo(tracking_store())}", flush=True)
            for name, address in runs_links(pages.address, key).items() if pages else ():
                print(f"Runs     {address} ({name})", flush=True)
            print(f"Prefect  {prefect.address}/runs", flush=True)
            user, _, password = key.partition(":")
            if pages:
                print(f"User     {user}, password {password}   for MLflow's pages", flush=True)
            print(f"Password {key}   for Prefect's page", flush=True)
            print("Press Ctrl-C to stop everything.", flush=True)
        while all(one.alive for one in servers):
            time.sleep(0.5)
        raise StratagemError(f"a server stopped unexpectedly; see {log}")


def runs_links(mlflow: str, key: str) -> dict[str, str]:
    """Return the URL of each experiment's table of runs, by the experiment's name, with a column for the test metric,
    which MLflow's default table lacks. The MLflow server keeps the columns as a tag of the experiment."""
    import requests  # Takes 0.05 s, which `stratagem status` need not wait for.

    found, view = {}, {"selectedColumns": COLUMNS, "orderByKey": "attributes.start_time", "orderByAsc": False}
    user, _, password = key.partition(":")
    with requests.Session() as session:
        session.auth = (user, password)
        asked = session.post(f"{mlflow}/api/2.0/mlflow/experiments/search", json={"max_results": 100}, timeout=60)
        for experiment in asked.json().get("experiments", []):
            if (of := experiment["experiment_id"]) == "0":
                continue  # MLflow's default experiment, which has no runs.
            tag = {"experiment_id": of, "key": f"mlflow.sharedViewState.{VIEW}", "value": json.dumps(view)}
            session.post(f"{mlflow}/api/2.0/mlflow/experiments/set-experiment-tag", json=tag, timeout=60)
            link = f"{mlflow}/#/experiments/{of}/runs?workflowType=machine_learning&viewStateShareKey={VIEW}"
            found[experiment["name"]] = link
    return found

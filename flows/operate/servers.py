"""MLflow's pages and a Prefect server on 127.0.0.1, for whoever has the key: how each is started, and how it ends."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flows.operate.prefect_server import guarded_environment
from tasks import config
from tasks.process.environment import stage_environment
from tasks.runs import relocation

# MLflow's and Prefect's own.
USUAL_PORTS = {"mlflow": 5000, "prefect": 4200}


@dataclass(frozen=True)
class Server:
    """A program that is kept running. Each knows its own secrets alone, and from its environment: every user of the
    machine can read a command line."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    address: str = ""
    """Where it answers; nothing for one that only asks others."""
    health: str = ""
    """What is asked to know whether it answers."""
    listening: socket.socket | None = None
    """Where it takes requests. It stays open here while the server restarts: they wait, and nobody else can
    take its port and be told the password."""


def tracking_store() -> str:
    """Return the address of the MLflow store of the runs here."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{config.project_root() / 'mlruns' / 'mlflow.db'}"


def mlflow_pages(listening: socket.socket, key: str) -> Server | None:
    """Return MLflow's pages of the store, which is made if there is none; None where somebody else serves them."""
    root, store, environment = config.project_root(), tracking_store(), stage_environment(None)
    if not (os.environ.get("MLFLOW_TRACKING_URI") or (root / "mlruns" / "mlflow.db").exists()):
        # A new store that MLflow's server and a run make at the same moment stays broken for ever.
        make = "from tasks.tracking.store import open_store; open_store()"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=root, env=environment)
    elif not os.environ.get("MLFLOW_TRACKING_URI"):
        relocation.mend()
    if store.startswith(("http://", "https://")):
        listening.close()
        return None
    return Server(
        "mlflow",
        (sys.executable, "-m", "tasks.tracking.pages", str(listening.fileno())),
        environment | {"MLFLOW_TRACKING_URI": store, "STRATAGEM_KEY": key},
        _address(listening),
        _address(listening),
        listening,
    )


def prefect_server(listening: socket.socket, key: str, schedules: bool, home: Path | None = None) -> Server:
    """Return a Prefect server.

    Args:
        listening: of ``listen``.
        key: of ``make_password``.
        schedules: it makes the runs of schedules, and what else such a server does by itself.
        home: of its database; Prefect's usual one if not given.
    """
    address, more = _address(listening), [] if schedules else ["--no-services"]
    return Server(
        "prefect",
        (sys.executable, "-m", "flows.operate.server", str(listening.fileno()), "--pages", *more),
        stage_environment(None)
        | guarded_environment(key, address)
        # Its pages would ask port 4200 whatever port their server has.
        | {"PREFECT_API_AUTH_STRING": key, "PREFECT_SERVER_UI_API_URL": f"{address}/api"}
        | ({"PREFECT_HOME": str(home)} if home else {}),
        address,
        f"{address}/api/health",
        listening,
    )


def listen(kept: Path) -> dict[str, socket.socket]:
    """Return where each server takes requests: on the last time's port or the usual one where it is free, so that a
    bookmark holds."""
    listening = {name: _listen_on(port) for name, port in wanted_ports(kept).items()}
    kept.write_text(json.dumps({name: one.getsockname()[1] for name, one in listening.items()}), encoding="utf-8")
    return listening


def _listen_on(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))


def _address(listening: socket.socket) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def wanted_ports(kept: Path) -> dict[str, int]:
    """Return the ports of the last time, or the usual ones, free or not."""
    with contextlib.suppress(OSError, ValueError):
        ports: dict[str, int] = json.loads(kept.read_text(encoding="utf-8"))
        return ports
    return USUAL_PORTS


def start(server: Server, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a server; it and what it starts itself end with ``end``, and when this process dies, however it does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tasks", "guard", *server.command],
        cwd=config.project_root(),
        env=dict(server.environment),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[server.listening.fileno()] if server.listening is not None else [],
        process_group=0,  # Ctrl-C reaches this process alone.
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a server, and wait for it and for all that it started."""
    if process.stdin is not None:
        process.stdin.close()
    process.wait()

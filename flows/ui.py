"""The pages that `stratagem ui` serves: MLflow's, and a Prefect server with its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tasks import config, relocation
from tasks.errors import StratagemError
from tasks.launchers.local import free_ports
from tasks.network import why_silent
from tasks.process.environment import stage_environment


def serve() -> None:
    """Serve MLflow's pages and a Prefect server on free ports of 127.0.0.1 until this process is interrupted."""
    root = config.project_root()
    database = root / "mlruns" / "mlflow.db"
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
    if not (os.environ.get("MLFLOW_TRACKING_URI") or database.exists()):
        # A new store that MLflow's server and a run make at the same moment stays broken for ever.
        make = "from tasks import tracking; tracking.open_store()"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=root, env=stage_environment(None))
    elif not os.environ.get("MLFLOW_TRACKING_URI"):
        relocation.mend()
    mlflow_port, prefect_port = free_ports(2)
    python = [sys.executable, "-m"]
    commands = {
        f"MLflow   http://127.0.0.1:{mlflow_port}": [
            *python, "mlflow", "ui", "--host", "127.0.0.1", "--port", str(mlflow_port)
        ],
        f"Prefect  http://127.0.0.1:{prefect_port}": [
            *python, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port), "--no-services"
        ],
    }  # fmt: skip
    # Prefect's pages would ask port 4200 whatever port their server has.
    environment = {
        **stage_environment(None),
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{prefect_port}/api",
        "MLFLOW_BACKEND_STORE_URI": store,  # Not an argument: everybody's `ps` shows those, with a password in it.
    }
    log = root / "mlruns" / "ui.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_server(command, environment, root, output)) for command in commands.values()]
        for address, server in zip(commands, servers, strict=True):
            while server.poll() is None and why_silent(address.split()[-1]) is not None:
                time.sleep(0.2)
            print(address, flush=True)
        print("Ctrl-C ends both.", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        raise StratagemError(f"a server ended by itself; its log is {log}")


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

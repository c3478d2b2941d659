"""Servers of the user's own: behind a password, which nobody else sees, and with replies that are lost."""

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tasks.machine import free_ports

pytestmark = pytest.mark.slow

SECRET = uuid.uuid4().hex  # In no file before.
# The ends of paths whose first reply is lost after the server has done what it was asked.
LOST = (
    "runs/create", "runs/log-batch", "mlflow/logged-models", "runs/outputs", "model-versions/create",
    "registered-models/create", "registered-models/alias",
)  # fmt: skip
DATABASE = f"me:{SECRET}-3@127.0.0.1:9/runs"


@contextlib.contextmanager
def serving(command: list[str], health: str, folder: Path, database: Path, **environment: str) -> Iterator[None]:
    """Run a server until the block ends, on a copy of an empty database."""
    folder.mkdir()
    shutil.copy(database, folder)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=os.environ | environment, stdout=log, stderr=log
        )
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(health, timeout=5).close()
                break
            time.sleep(0.2)
        assert server.poll() is None, (folder / "log").read_text()
        yield
    finally:
        server.terminate()
        server.wait()


def test_servers_with_passwords_are_used_and_nobody_sees_them(
    stratagem, tmp_path, proxy, empty_store, prefect_database
):
    mlflow_port, prefect_port = free_ports(2)
    on = ["--host", "127.0.0.1", "--port"]
    mlflow = ["mlflow", "server", *on, str(mlflow_port), "--workers", "1", "--backend-store-uri", "sqlite:///mlflow.db"]
    prefect = ["prefect", "server", "start", *on, str(prefect_port), "--no-services"]
    home = tmp_path / "home"
    with (
        serving(mlflow, f"http://127.0.0.1:{mlflow_port}/health", tmp_path / "mlflow", empty_store),
        serving(
            prefect,
            f"http://127.0.0.1:{prefect_port}/api/health",
            tmp_path / "prefect",
            prefect_database,
            PREFECT_HOME=str(tmp_path / "prefect"),
            PREFECT_SERVER_API_AUTH_STRING=f"admin:{SECRET}-2",
        ),
    ):
        guarded = proxy(mlflow_port, password=f"me:{SECRET}-1")
        command = stratagem(
            "run",
            "train.epochs=1",
            MLFLOW_TRACKING_URI=f"http://me:{SECRET}-1@127.0.0.1:{guarded.port}",
            PREFECT_API_URL=f"http://admin:{SECRET}-2@127.0.0.1:{prefect_port}/api",
            PREFECT_HOME=str(home),
        )
        arguments = set()
        while command.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                for child in psutil.Process(command.process.pid).children(recursive=True):
                    arguments.add(" ".join(child.cmdline()))
            time.sleep(0.05)
    assert command.end() == 0, command.err.read_text()
    assert command.result["model_version"] == "digits-mlp/1"
    assert command.err.read_text().count("cannot") == 0
    assert any("serve" in line for line in arguments)
    assert [line for line in arguments if SECRET in line] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    written = [path for path in (command.project / "mlruns").rglob("*") if path.name != ".gitkeep"]
    assert [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "PREFECT_API_URL",
            f"http://me:{SECRET}-3@127.0.0.1:9/api",
            "http://127.0.0.1:9/api: no Prefect server answers",
        ),
        (
            "PREFECT_API_DATABASE_CONNECTION_URL",
            f"postgresql+asyncpg://{DATABASE}",
            "Prefect's server for this run did not start",
        ),
        (
            "MLFLOW_TRACKING_URI",
            f"postgresql://{DATABASE}",
            "MLFLOW_TRACKING_URI = postgresql://127.0.0.1:9/runs cannot be used",
        ),
    ],
    ids=lambda value: value if value.isupper() else "",  # An id would put the password into the names of folders.
)
def test_what_cannot_be_used_is_told_without_its_password(stratagem, tmp_path, variable, value, message):
    command = stratagem("run", "train.epochs=1", options=("--debug",), **{variable: value})
    assert command.end() != 0
    assert message in command.err.read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_run_whose_replies_are_lost_is_there_once(stratagem, tmp_path, proxy, empty_store):
    (port,) = free_ports(1)
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", "sqlite:///mlflow.db"]
    with serving(command, f"http://127.0.0.1:{port}/health", tmp_path / "mlflow", empty_store):
        losing = proxy(port)
        losing.lose += LOST
        command = stratagem("run", "train.epochs=1", MLFLOW_TRACKING_URI=f"http://127.0.0.1:{losing.port}")
        assert command.end() == 0, command.err.read_text()
    assert losing.lose == []
    assert command.result["model_version"] == "digits-mlp/1"
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database:

        def select(query):
            return database.execute(query).fetchall()

        assert select("SELECT run_uuid, status, lifecycle_stage FROM runs") == [
            (command.result["run_id"], "FINISHED", "active")
        ]
        assert select("SELECT name, version, run_id FROM model_versions") == [
            ("digits-mlp", 1, command.result["run_id"])
        ]
        given = select("SELECT alias, version FROM registered_model_aliases ORDER BY alias")
        assert given == [("challenger", 1), ("champion", 1)]
        assert len(select("SELECT model_id FROM logged_models")) == 1
        assert len(select("SELECT source_id FROM inputs WHERE destination_type = 'MODEL_OUTPUT'")) == 1
        once = "SELECT key, count(*) FROM metrics WHERE key LIKE 'test/%' GROUP BY key"
        assert {count for _, count in select(once)} == {1}

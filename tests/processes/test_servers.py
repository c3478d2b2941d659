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

from tasks.system.machine import free_ports
from tests.mlflow_server import MlflowServer

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


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """By which others read what is written."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.exhaustive
def test_servers_with_passwords_are_used_and_nobody_sees_them(
    stratagem, cluster_project, tmp_path, proxy, empty_store, prefect_database, run, usual_umask
):
    prefect_port, closed = free_ports(2)
    prefect = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port), "--no-services"]
    shutil.copy(empty_store, made(tmp_path / "mlflow"))
    own = _plant_secrets(cluster_project)
    (cluster_project / "mlruns").chmod(0o755)
    seen = Seen()
    with (
        MlflowServer(tmp_path / "mlflow") as mlflow,
        serving(
            prefect,
            f"http://127.0.0.1:{prefect_port}/api/health",
            tmp_path / "prefect",
            prefect_database,
            PREFECT_HOME=str(tmp_path / "prefect"),
            PREFECT_SERVER_API_AUTH_STRING=f"admin:{SECRET}-2",
        ),
    ):
        guarded = proxy(mlflow.port, password=f"me:{SECRET}-1")
        environment = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "120",  # Of 10 s a busy server needs more.
            "MLFLOW_TRACKING_URI": f"http://me:{SECRET}-1@127.0.0.1:{guarded.port}",
            "PREFECT_API_URL": f"http://admin:{SECRET}-2@127.0.0.1:{prefect_port}/api",
            "PREFECT_HOME": str(tmp_path / "home"),
            # Nobody listens there: the notice is lost.
            "STRATAGEM_NOTIFY": f"json://me:{SECRET}-4@127.0.0.1:{closed}/told",
            "AWS_SECRET_ACCESS_KEY": f"{SECRET}-5",
        }
        command = stratagem("run", "train.epochs=1", **environment)
        while command.process.poll() is None:
            seen.look(command.process.pid)
        assert command.end() == 0, command.err.read_text()
        run_id = command.result["run_id"]
        source = f"http://me:{SECRET}-12@127.0.0.1:9/rows.csv"
        shown = (["runs", "show", run_id], ["trace", run_id], ["doctor"])
        for words in (*shown, ["data", "push", "digits"], ["data", "add", source]):
            said = run(["stratagem", *words, "--debug"], env=environment)
            assert SECRET not in said.stdout + said.stderr, words
        for words in (["run", "leaking.yaml"], ["run", "leaking.yaml", "--explain"], ["sweep", "space.yaml"]):
            said = run(["stratagem", *words, "--debug"], env=environment)
            assert (said.returncode, "api_key seems to hold a password" in said.stderr) == (2, True), said.stderr
            assert SECRET not in said.stdout + said.stderr, words
    assert command.result["model_version"] == "digits-mlp/1"
    assert command.err.read_text().count("cannot") == 0
    assert any("serve" in line for line in seen.command_lines)
    assert [line for line in seen.command_lines if SECRET in line] == []
    assert seen.addresses <= {"127.0.0.1"}
    own.add(diff := cluster_project / "mlruns" / "runs" / run_id / "records" / "uncommitted.diff")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in files if SECRET.encode() in path.read_bytes() and path not in own] == []
    assert f"password = {SECRET}-8" in diff.read_text()
    assert (cluster_project / "mlruns" / "notifications" / "lost").read_text()
    written = [path for path in (cluster_project / "mlruns").rglob("*") if path.name != ".gitkeep"]
    assert [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def _plant_secrets(project: Path) -> set[Path]:
    """Write passwords into what a user's project holds some in; return the files that have them."""
    remote = f"http://me:{SECRET}-6@127.0.0.1:9/repository.git"
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=project, check=True)
    with (project / ".dvc" / "config").open("a") as file:
        file.write("    remote = team\n['remote \"team\"']\n")
        file.write(f"    url = http://me:{SECRET}-7@127.0.0.1:9/data\n    password = {SECRET}-8\n")
    with (project / "params.yaml").open("a") as file:
        file.write(f"# token: {SECRET}-9\n")
    (project / "login.py").write_text(f"API_KEY = '{SECRET}-10'\n")
    (project / ".env").write_text(f"PASSWORD={SECRET}-11\n")
    with (project / "cluster.yaml").open("a") as file:  # The recipe of the run.
        file.write(f"# password: {SECRET}-13\n")
    (project / "leaking.yaml").write_text(f"model: {{options: {{api_key: {SECRET}-14}}}}\n")
    space = f"# token: {SECRET}-15\nspace:\n  model.options.api_key:\n  - {SECRET}-16\n  - {SECRET}-17\n"
    (project / "space.yaml").write_text(space)
    names = (".git/config", ".dvc/config", "params.yaml", "login.py", ".env")
    return {project / name for name in (*names, "cluster.yaml", "leaking.yaml", "space.yaml")}


class Seen:
    """What every other user of the machine sees of a command while it runs: the command lines of all processes; and
    where those of its own listen."""

    def __init__(self) -> None:
        self.command_lines: set[str] = set()
        self.addresses: set[str] = set()

    def look(self, pid: int) -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                self.command_lines.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                listening = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
                self.addresses |= {one.laddr.ip for one in listening}
        time.sleep(0.2)


@pytest.mark.in_ci(0)
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


@pytest.mark.exhaustive
def test_a_run_whose_replies_are_lost_is_there_once(stratagem, tmp_path, proxy, empty_store):
    shutil.copy(empty_store, made(tmp_path / "mlflow"))
    with MlflowServer(tmp_path / "mlflow") as server:
        losing = proxy(server.port)
        losing.lose += LOST
        environment = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "120",  # Of 10 s a busy server needs more.
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{losing.port}",
        }
        command = stratagem("run", "train.epochs=1", **environment)
        assert command.end() == 0, command.err.read_text()
    assert losing.lose == []
    assert command.result["model_version"] == "digits-mlp/1"
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database:

        def select(query):
            return database.execute(query).fetchall()

        ((copy, *state),) = select("SELECT run_uuid, status, lifecycle_stage FROM runs")
        assert state == ["FINISHED", "active"]
        assert select("SELECT value FROM tags WHERE key = 'stratagem.run_id'") == [(command.result["run_id"],)]
        assert select("SELECT name, version, run_id FROM model_versions") == [("digits-mlp", 1, copy)]
        given = select("SELECT alias, version FROM registered_model_aliases ORDER BY alias")
        assert given == [("challenger", 1), ("champion", 1)]
        assert len(select("SELECT model_id FROM logged_models")) == 1
        assert len(select("SELECT source_id FROM inputs WHERE destination_type = 'MODEL_OUTPUT'")) == 1
        once = "SELECT key, count(*) FROM metrics WHERE key LIKE 'test/%' GROUP BY key"
        assert {count for _, count in select(once)} == {1}

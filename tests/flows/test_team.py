"""The services of deploy/compose.yaml as plain processes on 127.0.0.1: Prefect and MLflow on PostgreSQL with passwords,
and a worker, whose command lines and variables are those that stand there. The bucket is a folder."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from tasks.system.machine import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.postgresql]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PASSWORDS = ("DATABASE_PASSWORD", "BUCKET_PASSWORD", "PREFECT_PASSWORD", "MLFLOW_PASSWORD", "MLFLOW_SECRET")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of PostgreSQL's programs."""
    places = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for place in places:
        if (place / "postgres").exists():
            return place
    pytest.skip("there is no PostgreSQL: apt-get install postgresql")


@pytest.fixture(scope="module")
def more_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what MLflow's image has beside the locked packages, in its versions."""
    folder = tmp_path_factory.mktemp("packages")
    (driver,) = re.findall(r"psycopg2-binary==\S+", (DEPLOY / "Dockerfile").read_text())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    # Flask-WTF is what `mlflow[auth]` adds, and WTForms what that one needs.
    done = subprocess.run([*command, driver, "Flask-WTF<2", "WTForms<4"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {driver} and Flask-WTF: {done.stderr.strip().splitlines()[-1]}")
    return folder


class Services:
    """compose.yaml with passwords and free ports of this machine; ``start`` runs a service as a process."""

    def __init__(self, folder: Path, bucket: Path, more_packages: Path) -> None:
        self.folder, self.more_packages = folder, more_packages
        self.passwords = {name: f"{name.lower()}0123456789" for name in PASSWORDS}
        self.database, self.prefect, self.mlflow = free_ports(3)
        text = (DEPLOY / "compose.yaml").read_text()
        for place, here in {
            "@database:5432": f"@127.0.0.1:{self.database}", "prefect:4200": f"127.0.0.1:{self.prefect}",
            "127.0.0.1:4200": f"127.0.0.1:{self.prefect}", "mlflow:5000": f"127.0.0.1:{self.mlflow}",
            "127.0.0.1:5000": f"127.0.0.1:{self.mlflow}", '"--port", "5000"': f'"--port", "{self.mlflow}"',
            "0.0.0.0": "127.0.0.1", "s3://mlflow": str(bucket),
        }.items():  # fmt: skip
            assert place in text, place
            text = text.replace(place, here)
        text = re.sub(r"\$\{(\w+)(:[?-][^}]*)?\}", lambda found: self.passwords.get(found[1], ""), text)
        self.compose: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, cwd: Path, **environment: str) -> None:
        """Start a service with its own variables, and files for its `configs`."""
        service = self.compose["services"][name]
        given = {key: value or "" for key, value in service["environment"].items()} | environment
        for one in service.get("configs", ()):
            (path := self.folder / Path(one["target"]).name).write_text(
                self.compose["configs"][one["source"]]["content"]
            )
            given = {key: str(path) if value == one["target"] else value for key, value in given.items()}
        command = [{"python": sys.executable}.get(word, word) for word in service["command"]]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=cwd, env=os.environ | given, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._processes.append((name, process))

    def wait(self, what: str, happened: Callable[[], Any]) -> Any:
        end = time.monotonic() + 900
        while True:
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):
                if result := happened():
                    return result
            for name, process in self._processes:
                assert process.poll() is None, f"{name} ended: {(self.folder / f'{name}.log').read_text()[-3000:]}"
            assert time.monotonic() < end, f"{what} did not happen"
            time.sleep(0.5)

    def end(self) -> None:
        for _, process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def services(programs: Path, more_packages: Path, tmp_path: Path) -> Iterator[Services]:
    """PostgreSQL with the two databases, as the image `postgres` makes them; nothing else runs yet."""
    services = Services(tmp_path, tmp_path / "bucket", more_packages)
    is_root = os.getuid() == 0
    as_owner = ["runuser", "--user", "postgres", "--"] if is_root else []  # PostgreSQL refuses to be root.
    place = Path(tempfile.mkdtemp(prefix="postgres-"))  # Not below tmp_path, which only this user may enter.
    (place / "password").write_text(services.passwords["DATABASE_PASSWORD"])
    if is_root:
        shutil.chown(place, "postgres")
        shutil.chown(place / "password", "postgres")
    data = ["-D", str(place / "data")]
    make = ["-U", "stratagem", "--auth=scram-sha-256", f"--pwfile={place / 'password'}", "--no-sync"]
    made = subprocess.run(
        [*as_owner, str(programs / "initdb"), *data, *make], cwd=place, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    only_here = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-p", str(services.database)]
    server = subprocess.Popen(
        [*as_owner, str(programs / "postgres"), *data, *only_here],
        cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        services.wait("PostgreSQL's answer", lambda: query(programs, services, "SELECT 1", "postgres") == "1")
        name = services.compose["services"]["database"]["environment"]["POSTGRES_DB"]
        query(programs, services, f"CREATE DATABASE {name}", "postgres")
        query(programs, services, services.compose["configs"]["databases"]["content"], "prefect")
        yield services
    finally:
        services.end()
        # Fast: it waits for no client. `runuser` would pass no signal on but SIGTERM, at which it waits for all.
        stop = [*as_owner, str(programs / "pg_ctl"), "stop", *data, "--mode=fast", "--timeout=300"]
        if subprocess.run(stop, cwd=place, check=False, capture_output=True).returncode:
            server.terminate()
        server.wait(300)
        shutil.rmtree(place)


def query(programs: Path, services: Services, text: str, database: str) -> str:
    """Return what PostgreSQL answers."""
    where = ["-h", "127.0.0.1", "-p", str(services.database), "-U", "stratagem", "-d", database]
    environment = os.environ | {"PGPASSWORD": services.passwords["DATABASE_PASSWORD"]}
    command = [str(programs / "psql"), *where, "--no-password", "--tuples-only", "--no-align", "-c", text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


@pytest.mark.exhaustive
def test_a_run_goes_through_prefect_and_mlflow_on_postgresql(services, programs, prepared_project):
    project, passwords = prepared_project, services.passwords
    locked = {"PYTHONPATH": f"{services.more_packages}{os.pathsep}{project}"}
    services.start("prefect", project, PREFECT_SERVER_API_PORT=str(services.prefect))
    services.start("mlflow", project, **locked)
    prefect, mlflow = f"http://127.0.0.1:{services.prefect}/api", f"http://127.0.0.1:{services.mlflow}"
    services.wait("Prefect's answer", lambda: requests.get(f"{prefect}/health", timeout=10).ok)
    services.wait("MLflow's answer", lambda: requests.get(f"{mlflow}/health", timeout=10).ok)
    key, admin = ("stratagem", passwords["PREFECT_PASSWORD"]), ("admin", passwords["MLFLOW_PASSWORD"])

    def ask(path: str, body: dict[str, Any]) -> Any:
        answer = requests.post(f"{prefect}/{path}", json=body, auth=key, timeout=60)
        assert answer.ok, answer.text
        return answer.json()

    runs = f"{mlflow}/api/2.0/mlflow/experiments/search"
    for auth, status in ((None, 401), (("admin", "guessed"), 401), (admin, 200)):
        assert requests.post(runs, json={"max_results": 1}, auth=auth, timeout=60).status_code == status
    for auth, status in ((None, 401), (key, 200)):
        assert requests.post(f"{prefect}/flows/filter", json={}, auth=auth, timeout=60).status_code == status
    services.start("worker", project, PROJECT_ROOT=str(project))
    (training,) = services.wait(
        "the deployments", lambda: ask("deployments/filter", {"deployments": {"name": {"any_": ["training"]}}})
    )
    given = {"parameters": {"overrides": {"train.epochs": 1, "register.minimum": None}}}
    flow_run = ask(f"deployments/{training['id']}/create_flow_run", given)["id"]

    def state() -> str:
        (found,) = ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        assert found["state_type"] not in ("FAILED", "CRASHED"), found["state"]["message"]
        return str(found["state_type"])

    services.wait("the run's end", lambda: state() == "COMPLETED")
    assert query(programs, services, "SELECT count(*) FROM flow_run WHERE state_type = 'COMPLETED'", "prefect") == "1"
    assert query(programs, services, "SELECT status FROM runs", "mlflow") == "FINISHED"
    assert query(programs, services, "SELECT name, version FROM model_versions", "mlflow") == "digits-convnet2|1"
    assert list((services.folder / "bucket").rglob("model.keras")), "its files went through MLflow's server"
    assert not (project / "mlruns" / "mlartifacts").exists()
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert any("mlflow" in line for line in lines)
    assert [line for line in lines if any(word in line for word in passwords.values())] == []

"""Checkpoints, runs, data and MLflow's artifacts in a bucket of a real server, which fails and comes back meanwhile.

It is OpenStack Swift from Debian's packages, on 127.0.0.1 alone (tests/object_store.py).
"""

import contextlib
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tasks.runs.remote import open_place, read_index
from tasks.system.machine import free_ports
from tests import object_store
from tests.processes.trainings import ONE, SAME, newest, stop_and_wait

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(1800)]

PYTHON = "/usr/bin/python3"
SWIFT = ("swift-proxy", "swift-account", "swift-container", "swift-object")


class Server:
    """A server that speaks S3; what lies in its folder is there again when it restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, [str(port) for port in free_ports(4)]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [PYTHON, object_store.__file__, str(self.folder), *self.ports]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 200
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/", timeout=60).status_code < 500:
                    return
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.2)

    def end(self) -> None:
        """End all of it at once, in the middle of whatever it does."""
        if self._process is not None:
            self._process.kill()  # Its children end with it.
            self._process.wait()
            self._process = None

    def limit(self, bucket: str, num_bytes: int) -> None:
        """Give a bucket a quota."""
        command = [PYTHON, object_store.__file__, str(self.folder), *self.ports, "quota", bucket, str(num_bytes)]
        subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("s3fs") is None:
        pytest.skip("s3fs is not installed: pip install 'stratagem[s3]'")
    probe = "import swift.proxy, swift.account, swift.container, swift.obj"
    if subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode:
        pytest.skip(f"there is no OpenStack Swift: apt-get install {' '.join(SWIFT)}")
    server = Server(tmp_path_factory.mktemp("swift"))
    server.start()
    yield server
    server.end()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, with the credentials of it in the environment, and buckets `runs`, `data`, `mlflow` and `full`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_store.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_store.SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    there = {one.rpartition("/")[2] for one in open_place("s3://runs").fs.ls("")}
    for bucket in {"runs", "data", "mlflow", "full"} - there:
        open_place("s3://runs").fs.mkdir(bucket)
    yield running
    running.end()
    running.start()


def steps_at(address: str, run_id: str) -> list[int]:
    """The steps of the checkpoints that are whole at a remote, by what says so."""
    try:
        index = read_index(open_place(address, "runs", run_id))
    except FileNotFoundError:
        return []
    return sorted(int(name.split("/")[1]) for name in index.files if name.endswith("/state.json"))


def test_a_training_goes_on_elsewhere_after_its_server_failed_and_its_machine_was_lost(
    server, stratagem, whole, cluster_project, tmp_path, monkeypatch
):
    """The server is killed and comes back meanwhile; then the machine is lost; a clone ends with the same bits."""
    digest = whole(*ONE)
    shutil.rmtree("mlruns/runs", ignore_errors=True)  # Not there where an earlier test asked for the same.
    address = "s3://runs/project"
    command = stratagem("train", *SAME, *ONE, f"checkpoint.remote={address}")
    command.wait_until(lambda: newest(command) >= 8)
    (stage,) = command.members("serve")
    stop_and_wait(command, stage)  # So that it has not come to its end before what is to happen has.
    (run_id,) = os.listdir("mlruns/runs")
    command.wait_until(lambda: newest(command) in steps_at(address, run_id))
    server.end()
    before = newest(command)
    stage.resume()
    command.wait_until(lambda: newest(command) >= before + 8)
    stop_and_wait(command, stage)
    command.wait_until(lambda: "cannot be copied to s3://runs/project now" in command.err.read_text())
    server.start()
    # As many as here: pruned as they are here.
    command.wait_until(lambda: steps_at(address, run_id) == command.checkpoints())
    assert command.err.read_text().count("cannot be copied") == 1
    command.process.kill()
    stage.kill()
    command.process.wait()

    clone = tmp_path / "another_machine"
    subprocess.run(["git", "clone", "--quiet", str(cluster_project), str(clone)], check=True)
    shutil.copy(cluster_project / "cluster.yaml", clone)
    for part in ("raw", "prepared", "dvc.lock"):
        subprocess.run(["cp", "-a", cluster_project / "data" / "digits" / part, clone / "data" / "digits"], check=False)
    shutil.rmtree(cluster_project)
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PYTHONPATH", str(clone))
    again = stratagem("run", *SAME, *ONE, f"checkpoint.remote={address}", options=("--resume", "latest"))
    assert again.end() == 0, again.err.read_text()
    assert (again.result["run_id"], again.result["weights_digest"]) == (run_id, digest)
    err = again.err.read_text()
    assert f"run {run_id} was fetched from {address}: checkpoints of steps" in err
    assert "resuming at step" in err
    assert object_store.SECRET not in err + command.err.read_text()
    with contextlib.closing(sqlite3.connect("mlruns/mlflow.db")) as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
        points = "SELECT count(DISTINCT step) FROM metrics WHERE key = 'train/loss'"
        assert database.execute(points).fetchone() == (12,), "those of the machine that was lost, too"
    index = read_index(open_place(address, "runs", run_id))
    assert {"models/best.keras", "models/final.keras", "report/report.html"} <= index.files.keys()
    assert {"summary.json", "records/training.json", "records/evaluation.json"} <= index.texts.keys()
    assert json.loads(index.texts["status.json"])["status"] == "FINISHED"
    assert not list(Path("mlruns/runs").glob("*/remote")), "nothing is left to copy"


def without(*names: str) -> dict[str, str | None]:
    return dict.fromkeys(names)


REFUSED: dict[str, tuple[str, dict[str, str | None], str]] = {
    "another secret": (
        "s3://runs/x",
        {"AWS_SECRET_ACCESS_KEY": "a-wrong-secret-of-somebody"},
        "PermissionError",
    ),
    "no credentials": (
        "s3://runs/x",
        without("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        "NoCredentialsError",
    ),
    "no such bucket": ("s3://no-such-bucket/x", {}, "FileNotFoundError"),
    "no room": ("s3://full/x", {}, "OSError: [Errno 90] Upload exceeds quota"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "another secret" else pytest.mark.exhaustive) for name in REFUSED]
)
def test_what_cannot_be_copied_to_is_refused_before_the_training(name, server, cluster_project, run, monkeypatch):
    address, environment, says = REFUSED[name]
    server.limit("full", 10)
    for key, value in environment.items():
        monkeypatch.setenv(key, value) if value is not None else monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(cluster_project))  # No ~/.aws of whoever runs the tests.
    done = run(["stratagem", "train", "cluster.yaml", "--set", f"checkpoint.remote={address}"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"error: checkpoint.remote = {address} cannot be written to: {says}"), done.stderr
    assert "secret-" not in done.stderr
    assert not list(Path("mlruns").glob("runs/*"))


@pytest.mark.exhaustive
def test_a_server_that_is_away_all_the_time_delays_nothing_and_is_told_once(server, stratagem, cluster_project):
    server.end()
    command = stratagem("train", *SAME, *ONE, "checkpoint.remote=s3://runs/away")
    assert command.end() == 0, command.err.read_text()
    err = command.err.read_text()
    assert err.count("does not answer") == 1
    assert err.count("cannot be copied") == 1
    server.start()
    code = "from tasks.runs import remote; print(remote.deliver_kept())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"the copy of run {command.result['run_id']}" in done.stdout
    assert steps_at("s3://runs/away", command.result["run_id"]) == command.checkpoints()


@pytest.mark.exhaustive
def test_dvc_pushes_data_to_a_bucket_and_a_clone_pulls_them(server, cluster_project, run, tmp_path):
    assert run(["stratagem", "data", "prepare"]).returncode == 0
    assert run(["dvc", "remote", "add", "--default", "storage", "s3://data/digits"]).returncode == 0
    pushed = run(["stratagem", "data", "push", "digits", "--json"])
    assert pushed.returncode == 0, pushed.stderr
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(cluster_project), str(clone)], check=True)
    for file in (".dvc/config", "data/digits/dvc.lock"):
        shutil.copy(cluster_project / file, clone / file)
    there: dict[str, Any] = {"cwd": clone, "env": {"PYTHONPATH": str(clone)}}
    pulled = run(["stratagem", "data", "pull", "digits", "--json"], **there)
    assert pulled.returncode == 0, pulled.stderr
    assert json.loads(pulled.stdout)["digits"]["data_version"] == json.loads(pushed.stdout)["digits"]["data_version"]
    arrays = "data/digits/prepared/train_images.npy"
    assert (clone / arrays).read_bytes() == (cluster_project / arrays).read_bytes()
    assert object_store.SECRET not in (clone / ".dvc" / "config").read_text()

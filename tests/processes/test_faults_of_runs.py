"""Whole runs whose flow is killed, and trainings that are robbed of a server, of room on the disk or of their data.

Each is a real command, given again after the fault; see test_faults.py.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tasks import records
from tasks.data import prepared_data
from tasks.system.machine import free_ports
from tests.mlflow_server import MlflowServer
from tests.processes.trainings import EPOCHS, KILL, ONE, SAME, check_whole, epochs_in_mlflow, flip_a_bit, newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def records_of(command) -> list[str]:
    return [path.name for path in command.project.glob("mlruns/runs/*/records/*.json")]


def is_there(pattern: str) -> Callable:
    return lambda command: list(command.project.glob(pattern))


def has(record: str) -> Callable:
    return lambda command: record in records_of(command)


def flow_runs() -> dict[str, str]:
    """The state of every flow run in Prefect's own database, by id."""
    path = Path(os.environ["PREFECT_HOME"], "prefect.db")
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=60)) as database:
        return {str(uuid.UUID(run)): state for run, state in database.execute("SELECT id, state_type FROM flow_run")}


def registers(command) -> bool:
    """Whether the model's files are in the store. The flow, which would end the run a tenth of a second later, stands
    still from the moment when its registration has begun."""
    if "evaluation.json" not in records_of(command):
        return False
    with closing(sqlite3.connect(command.project / "mlruns" / "mlflow.db", timeout=60)) as database:
        ((begun,),) = database.execute("SELECT count(*) FROM logged_models").fetchall()
    if begun:
        command.process.send_signal(signal.SIGSTOP)
    return bool(begun) and is_there("mlruns/artifacts/**/MLmodel")(command)


# Each: where a whole run is when its flow's process is killed, and whether an MLflow run has begun by then.
PLACES = [
    pytest.param("download", is_there("data/digits/.scratch.*"), False, id="download", marks=pytest.mark.exhaustive),
    pytest.param("evaluation", has("training.json"), True, id="evaluation", marks=pytest.mark.exhaustive),
    pytest.param("registration", registers, True, id="registration"),
]
WHOLE = (*SAME, *ONE, "register.minimum=0")


@pytest.mark.parametrize(("place", "when", "begun"), PLACES)
def test_a_whole_run_whose_flow_is_killed(stratagem, cluster_project, mlflow_runs, whole, place, when, begun):
    if not begun:
        for part in ("raw", "prepared"):
            shutil.rmtree(cluster_project / "data" / "digits" / part)
    known = set(flow_runs())

    def start():
        command = stratagem("run", *WHOLE)
        resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (64, 64))  # A run needs no more open files.
        return command

    command = start()
    command.wait_until(lambda: when(command))
    command.members("serve")
    assert len(command.seen) >= (2 if begun else 1), "the API, and the stage process"
    command.process.kill()
    assert command.end() == KILL
    assert command.survivors() == []
    (killed,) = set(flow_runs()) - known
    assert flow_runs()[killed] == "RUNNING", "what Prefect says for ever, if nobody ends it"
    if begun:
        assert [run["status"] for run in mlflow_runs()] == ["RUNNING"]

    again = start()
    assert again.end() == 0, again.err.read_text()
    result = again.result
    assert result["flow_run_id"] != killed
    assert (flow_runs()[killed], flow_runs()[result["flow_run_id"]]) == ("CRASHED", "COMPLETED")
    runs = mlflow_runs()
    assert [run["status"] for run in runs] == ["FINISHED"]
    assert runs[0]["flow_run_id"] == result["flow_run_id"]
    assert result["weights_digest"] == whole(*ONE)
    assert result["model_version"] == "digits-mlp/1", "one version a run"
    assert result["aliases"] == ["challenger", "champion"]
    assert runs[0]["weights_digest"] == result["weights_digest"]
    assert epochs_in_mlflow(cluster_project) == EPOCHS
    with closing(sqlite3.connect(cluster_project / "mlruns" / "mlflow.db")) as database:
        query = "SELECT DISTINCT value FROM metrics WHERE key = 'test/accuracy' AND run_uuid = ?"
        assert database.execute(query, (result["run_id"],)).fetchall() == [(result["metrics"]["test/accuracy"],)]
    leftovers = [*cluster_project.glob("data/digits/.scratch.*"), *cluster_project.glob("data/digits/.prepared.*")]
    assert leftovers == []
    assert [path.name for path in (cluster_project / "mlruns" / "active").glob("*.json")] == []


@pytest.mark.exhaustive
def test_reconcile_ends_a_killed_run(stratagem, mlflow_runs):
    command = stratagem("run", *WHOLE, "train.epochs=9999")
    command.wait_until(lambda: newest(command) > 0)
    command.members("serve")
    reconciling = stratagem("reconcile")
    assert reconciling.end() == 0, reconciling.err.read_text()
    assert reconciling.result == {"ended": [], "undelivered": []}, "a run that is at work is left alone"
    command.process.kill()
    assert command.survivors() == []
    # Some kills meet a checkpoint half-written; here every one does.
    (checkpoints,) = Path("mlruns").glob("runs/*/checkpoints")
    (checkpoints / ".9999.partial").mkdir()
    reconciling = stratagem("reconcile")
    assert reconciling.end() == 0, reconciling.err.read_text()
    (run,) = mlflow_runs()
    assert (run["status"], flow_runs()[run["flow_run_id"]]) == ("KILLED", "CRASHED")
    ended = {record["what"].rpartition(" ")[0]: record["status"] for record in reconciling.result["ended"]}
    assert ended == {"MLflow run": "KILLED", "Prefect flow run": "CRASHED", "": "removed"}
    assert [*Path("mlruns").rglob("*.partial")] == []
    again = stratagem("reconcile")
    assert again.end() == 0
    assert again.result == {"ended": [], "undelivered": []}


def test_without_prefects_server_a_run_is_refused_at_once(stratagem):
    (port,) = free_ports(1)
    command = stratagem("run", *WHOLE, PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
    assert command.end() == 2
    assert f"PREFECT_API_URL = http://127.0.0.1:{port}/api: no Prefect server answers" in command.err.read_text()
    assert not (Path.cwd() / "mlruns" / "runs").exists()


def served_runs(folder: Path) -> list[tuple[str, int]]:
    """The status of each run in a server's store, and how many points of train/loss it has."""
    points = "SELECT count(*) FROM metrics WHERE key = 'train/loss' AND run_uuid = runs.run_uuid"
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        return database.execute(f"SELECT status, ({points}) FROM runs").fetchall()


NOT_TAKEN = "the MLflow server does not accept this run now"


@pytest.mark.exhaustive  # tests/tasks/test_tracking.py has it of a training.
def test_without_a_tracking_server_a_run_comes_to_its_end_and_a_sync_registers_it(
    stratagem, whole, tmp_path, empty_store
):
    shutil.copy(empty_store, tmp_path)
    server = MlflowServer(tmp_path)
    command = stratagem("run", *WHOLE, MLFLOW_TRACKING_URI=server.uri)
    assert command.end() == 0, command.err.read_text()
    result = command.result
    assert result["weights_digest"] == whole(*ONE)
    assert result["model_version"] is None
    assert "no MLflow server answers" in result["reason"]
    assert result["reason"].endswith("; then `stratagem runs sync` registers it")
    assert command.err.read_text().count(NOT_TAKEN) == 1
    with server:
        for outcome in ("delivered", "up to date"):
            syncing = stratagem("sync", MLFLOW_TRACKING_URI=server.uri)
            assert syncing.end() == 0, syncing.err.read_text()
            (synced,) = syncing.result["runs"]
            assert (synced["outcome"], synced["versions"]) == (outcome, ["digits-mlp/1"]), synced
    assert served_runs(tmp_path) == [("FINISHED", EPOCHS)], "no point is missing, and none is there twice"


@pytest.mark.exhaustive
def test_a_tracking_server_that_hangs_and_dies_disturbs_no_step(stratagem, whole, tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path)
    server = MlflowServer(tmp_path)
    environment = {
        "MLFLOW_TRACKING_URI": server.uri,
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    with server:
        command = stratagem("train", *SAME, *ONE, **environment)
        command.wait_until(lambda: newest(command) >= 20)
        family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        for process in family:
            process.suspend()
        command.wait_until(lambda: NOT_TAKEN in command.err.read_text())
        for process in family:
            process.kill()
    assert command.end() == 0, command.err.read_text()
    check_whole(command, whole(*ONE), resumed=False)
    assert command.err.read_text().count(NOT_TAKEN) == 1
    with server:
        # A server that has just started may take longer than the one that hung was given.
        reconciling = stratagem("reconcile", **environment | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60"})
        assert reconciling.end() == 0, reconciling.err.read_text()
        assert reconciling.result["undelivered"] == []
    assert served_runs(tmp_path) == [("FINISHED", EPOCHS)], "no point is missing, and none is there twice"


@pytest.fixture
def small_disk(cluster_project):
    """mlruns, with MLflow's store in it, on a file system of a few megabytes."""
    folder = cluster_project / "mlruns"
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounting.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounting.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_keeps_the_last_checkpoint(stratagem, mlflow_runs, small_disk, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()
    assert command.end() == 1
    said = command.err.read_text()
    (message,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "the checkpoint of step" in message
    assert "Make room, and run the same command again" in message
    assert not re.search("sqlalchemy|sqlite|Traceback", said), "MLflow's store is full, too, and no library tells of it"
    assert newest(command) >= 30
    filler.unlink()
    again = stratagem("train", *SAME, *ONE)
    again.end()
    assert [run["status"] for run in mlflow_runs()] == ["FINISHED"]
    check_whole(again, whole(*ONE))


def test_data_that_changed_are_made_again_and_a_damaged_cache_is_noticed(stratagem, cluster_project, run):
    """DVC trusts what lies in its cache; the manifest has the sha256 of each array."""
    overrides = (*SAME, *ONE, "train.epochs=1")
    done = run(["stratagem", "data", "prepare"])  # Through DVC, which then has them in its cache.
    assert done.returncode == 0, done.stderr
    images = cluster_project / "data/digits/prepared/train_images.npy"
    whole = images.read_bytes()
    os.chmod(images, 0o644)
    flip_a_bit(images)
    command = stratagem("run", *overrides)
    assert command.end() == 0, command.err.read_text()
    assert images.read_bytes() == whole

    (cached,) = [path for path in cluster_project.glob(".dvc/cache/files/md5/*/*") if path.read_bytes() == whole]
    os.chmod(cached, 0o644)
    flip_a_bit(cached)
    os.chmod(cached, 0o444)
    shutil.rmtree(images.parent)
    delivered = run(["dvc", "checkout", "data/digits/dvc.yaml:prepare"])
    assert delivered.returncode == 0, delivered.stderr
    refused = stratagem("run", *overrides)
    assert refused.end() == 2
    (message,) = [line for line in refused.err.read_text().splitlines() if line.startswith("error: ")]
    assert "train_images.npy is damaged: its sha256 is" in message
    assert "Rebuild it: stratagem data prepare --set dataset.name=digits --force" in message
    done = run(["stratagem", "data", "prepare", "--set", "dataset.name=digits", "--force"])
    assert done.returncode == 0, done.stderr
    assert images.read_bytes() == whole


def test_two_dvc_repro_at_once_leave_whole_data(cluster_project):
    for part in ("raw", "prepared"):
        shutil.rmtree(cluster_project / "data" / "digits" / part)
    target = [sys.executable, "-m", "dvc", "repro", "data/digits/dvc.yaml:prepare"]
    both = [subprocess.Popen(target, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0] for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes, said
    for code, text in zip(codes, said, strict=True):
        # The one is said of a stage's files, the other of the whole project, after three seconds.
        assert code == 0 or "is busy" in text or "Unable to acquire lock" in text, text
    again = subprocess.run([*target, "--quiet"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    prepared_data.verify(records.load(records.PreparedDataset, cluster_project / "data/digits/prepared/manifest.json"))


def test_a_run_that_is_stopped_for_a_while_goes_on(stratagem, whole):
    command = stratagem("train", *SAME, *ONE)
    command.wait_until(lambda: newest(command) >= 30)
    family = [psutil.Process(command.process.pid), *command.members("serve")]
    for process in family:
        process.suspend()
    time.sleep(3)
    for process in family:
        process.resume()
    command.end()
    check_whole(command, whole(*ONE), resumed=False)

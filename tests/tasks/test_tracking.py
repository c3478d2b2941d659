import json
import logging
import math
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow
import pytest

from tasks import config, lineage, records, tracking
from tasks.errors import UserError

NO_SPLIT = records.PreparedSplit(
    num_examples=3, images="i.npy", labels="l.npy", sha256={"i.npy": "0"}, class_counts=(1, 2),
    pixel_mean=(0.0,), pixel_std=(1.0,),
)  # fmt: skip
PREPARED = records.PreparedDataset(
    name="digits", version="1.0.0", tfds_version="4.9.10", folder="data/digits/prepared", raw_folder="data/digits/raw",
    image_shape=(8, 8, 1), num_classes=2, class_names=("a", "b"), splits={"train": NO_SPLIT, "test": NO_SPLIT},
    sources=(), licence=None,
)  # fmt: skip
VERSION = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    tracking._make_store(path)
    return path


@pytest.fixture
def store(project: Path, empty_store: Path) -> Path:
    path = project / "mlruns" / "mlflow.db"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(empty_store, path)
    return path


@pytest.fixture
def run(store: Path) -> records.Run:
    return start()


def start(*overrides: str) -> records.Run:
    settings = config.load(overrides=overrides)
    return tracking.start(settings, PREPARED, lineage.trace(settings, VERSION))


def sent(run: records.Run, name: str) -> list[tuple[int, float]]:
    history = tracking.open_store().get_metric_history(run.run_id, name)
    return [(metric.step, metric.value) for metric in history]


# The store


@pytest.mark.slow
def test_four_processes_on_a_new_store_all_succeed(project: Path) -> None:
    code = "import sys; from tasks import tracking; tracking.open_store().create_experiment(sys.argv[1])"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, f"e{i}"], stderr=subprocess.PIPE, text=True) for i in range(4)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    names = {experiment.name for experiment in tracking.open_store().search_experiments()}
    assert names == {"Default", "e0", "e1", "e2", "e3"}
    assert sorted(path.name for path in Path("mlruns").iterdir() if "building" in path.name) == []


def test_a_first_run_killed_in_the_migration_leaves_no_broken_store(project: Path) -> None:
    code = "from tasks import tracking; tracking.open_store()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    building = project / "mlruns" / ".mlflow.db.building" / "mlflow.db"
    while not (building.exists() and building.stat().st_size) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert building.exists()
    assert not (project / "mlruns" / "mlflow.db").exists()
    assert [experiment.name for experiment in tracking.open_store().search_experiments()] == ["Default"]
    assert not building.parent.exists()


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")


def _older(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")


def _half_migrated(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM alembic_version")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_newer, r"written by a newer MLflow than the installed .*ffffffffffff.*install that MLflow, or move the file"),
        (_older, r"mlflow db upgrade"),
        (_half_migrated, "is no MLflow store.*move it away"),
        (lambda path: path.write_bytes(b""), "is no MLflow store.*move it away"),
        (lambda path: path.write_text("not a database" * 99), "is no MLflow store.*move it away"),
        (_directory, "is no MLflow store.*move it away"),
    ],
)
def test_an_unusable_store_is_refused_and_left_alone(store: Path, spoil: object, message: str) -> None:
    assert callable(spoil)
    spoil(store)
    before = store.read_bytes() if store.is_file() else None
    with pytest.raises(UserError, match=message) as refusal:
        start()
    assert str(store) in str(refusal.value)
    assert (store.read_bytes() if store.is_file() else None) == before
    assert not Path("mlruns/runs").exists()


@pytest.mark.parametrize("place", ["a file", "/sys"])
def test_a_place_that_cannot_be_written_is_refused(project: Path, place: str) -> None:
    shutil.rmtree("mlruns", ignore_errors=True)
    if place == "a file":
        Path("mlruns").touch()
    else:
        Path("mlruns").symlink_to(place)  # Not even root makes files there.
    with pytest.raises(UserError, match=r"mlruns/mlflow\.db cannot be made.*folder that you can write to"):
        tracking.open_store()


def test_a_server_that_is_down_is_named_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI = http://127.*no MLflow server answers.*unset"):
        tracking.open_store()


def test_the_users_own_store_is_honoured(project: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = project / "elsewhere" / "own.db"
    own.parent.mkdir()
    shutil.copy(empty_store, own)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{own}")
    run = start()
    tracking.log_files(run, ["params.yaml"], "settings")
    assert not Path("mlruns/mlflow.db").exists()
    assert list(own.parent.glob("artifacts/digits/*/artifacts/settings/params.yaml"))


# Runs


def test_a_run_holds_settings_data_and_where_it_comes_from(store: Path) -> None:
    overrides = [
        "train.epochs=7",
        "schedule.learning_rate=0.25",
        "dataset.version=null",
        "model.options.note=" + "x" * 7000,
    ]
    settings = config.load(overrides=overrides)
    traced = lineage.trace(settings, VERSION)
    run = tracking.start(settings, PREPARED, traced, flow_run_id="flow-1")
    found = tracking.open_store().get_run(run.run_id)

    assert found.info.status == "RUNNING"
    assert found.info.run_name == run.name == f"digits-one_device-fit-{run.run_id[:6]}"
    assert tracking.open_store().get_experiment(found.info.experiment_id).name == "digits"
    assert found.info.artifact_uri == (store.parent / "artifacts" / "digits" / run.run_id / "artifacts").as_uri()

    assert found.data.params.keys() == settings.flat().keys()
    shown = ("train.epochs", "dataset.version", "input.shuffle", "strategy.kind", "schedule.learning_rate")
    assert [found.data.params[key] for key in shown] == ["7", "null", "true", "one_device", "0.25"]
    assert found.data.params["model.options.note"] == "x" * 6000

    expected = {
        "dataset": "digits", "strategy": "one_device", "loop": "fit", "flow_run_id": "flow-1", "git_dirty": "false",
        "data_version": VERSION, "code_digest": traced.code_digest, "settings_digest": settings.digest(),
        "mlflow.source.git.commit": traced.git_commit,
    }  # fmt: skip
    assert expected.items() <= found.data.tags.items()

    (dataset,) = found.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("digits", VERSION)
    assert [(tag.key, tag.value) for tag in dataset.tags] == [("mlflow.data.context", "training")]
    assert json.loads(dataset.dataset.profile) == {"num_train": 3, "num_test": 3, "num_classes": 2}

    assert run.folder == f"mlruns/runs/{run.run_id}"
    assert records.load(records.Run, Path(run.folder, "records", "run.json")) == run


def test_without_git_and_dvc_a_run_says_so(store: Path) -> None:
    shutil.rmtree(".git")
    settings = config.load(overrides=["tracking.experiment=My runs"])
    run = tracking.start(settings, PREPARED, lineage.trace(settings, None))
    found = tracking.open_store().get_run(run.run_id)
    assert run.experiment == "My runs"
    assert not {"mlflow.source.git.commit", "git_dirty", "data_version"} & found.data.tags.keys()
    assert len(found.inputs.dataset_inputs[0].dataset.digest) == 36


def test_a_run_that_cannot_begin_is_not_left_running(store: Path) -> None:
    Path("mlruns/runs").touch()
    with pytest.raises(OSError, match="runs"):
        start()
    client = tracking.open_store()
    experiment = client.get_experiment_by_name("digits")
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_a_deleted_experiment_is_refused(run: records.Run) -> None:
    client = tracking.open_store()
    client.delete_experiment(client.get_experiment_by_name("digits").experiment_id)
    with pytest.raises(UserError, match=r"'digits' was deleted.*mlflow experiments restore.*tracking\.experiment"):
        start()


@pytest.mark.parametrize(
    ("status", "reason"), [("FINISHED", None), ("FAILED", "the loss is not a number"), ("KILLED", "Ctrl-C")]
)
def test_finish_and_resume(run: records.Run, status: object, reason: str | None) -> None:
    tracking.finish(run, status, reason)  # type: ignore[arg-type]
    found = tracking.open_store().get_run(run.run_id)
    assert found.info.status == status
    assert found.info.end_time >= found.info.start_time
    assert found.data.tags.get("reason") == reason

    assert tracking.resume(run.run_id) == run
    assert tracking.open_store().get_run(run.run_id).info.status == "RUNNING"


def test_an_unknown_run_is_answered_with_the_known_ones(store: Path) -> None:
    with pytest.raises(UserError, match=r"unknown run 'abc': The newest runs: \(none yet\)"):
        tracking.resume("abc")
    run = start()
    wrong = run.run_id[:-1] + "_"
    with pytest.raises(
        UserError, match=rf"unknown run '{wrong}': did you mean {run.run_id}\? The newest.*{run.run_id}"
    ):
        tracking.resume(wrong)
    tracking.open_store().delete_run(run.run_id)
    with pytest.raises(UserError, match=rf"run '{run.run_id}' cannot be resumed"):
        tracking.resume(run.run_id)


def test_files_and_tags(run: records.Run) -> None:
    tracking.log_files(run, ["params.yaml", Path("dvc.yaml").absolute()], "settings")
    tracking.set_tags(run, {"checkpoint": "mlruns/runs/x/checkpoints/3"})
    client = tracking.open_store()
    assert [file.path for file in client.list_artifacts(run.run_id, "settings")] == [
        "settings/dvc.yaml",
        "settings/params.yaml",
    ]
    assert client.get_run(run.run_id).data.tags["checkpoint"] == "mlruns/runs/x/checkpoints/3"


# Metrics


def test_metrics_arrive_complete_and_in_order(run: records.Run) -> None:
    with tracking.MetricWriter(run) as writer:
        for step in range(2500):
            writer.write(step, {"train/loss": 1 / (step + 1), "train/accuracy": step / 2500})
    assert sent(run, "train/loss") == [(step, 1 / (step + 1)) for step in range(2500)]
    assert sent(run, "train/accuracy") == [(step, step / 2500) for step in range(2500)]
    assert not Path(run.folder, "unsent_metrics.jsonl").exists()


def test_metrics_of_the_whole_run_and_not_a_number(run: records.Run) -> None:
    tracking.log_metrics(run, {"test/accuracy": 0.5, "test/loss": math.nan})
    assert sent(run, "test/accuracy") == [(0, 0.5)]
    assert math.isnan(sent(run, "test/loss")[0][1])


def test_metrics_are_kept_while_the_store_is_away(
    run: records.Run, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsent = Path(run.folder, "unsent_metrics.jsonl")
    away = store.with_name("away.db")
    store.rename(away)
    store.mkdir()
    with caplog.at_level(logging.WARNING, "tasks.tracking"), tracking.MetricWriter(run) as writer:
        for step in range(1500):
            writer.write(step, {"train/loss": float(step)})
        time.sleep(0.2)  # So that it comes in more than one batch.
        writer.write(1500, {"train/loss": math.nan})
    assert len(unsent.read_text().splitlines()) == 1501
    assert [str(unsent.absolute()) in record.getMessage() for record in caplog.records] == [True]

    store.rmdir()
    away.rename(store)
    with unsent.open("a") as file:
        file.write('["train/loss", 1.0, 17')  # What a process that is killed while it writes leaves.
    with tracking.MetricWriter(run) as writer:
        writer.write(1501, {"train/loss": 1501.0})
    assert not unsent.exists()
    history = sent(run, "train/loss")
    assert sorted(step for step, _ in history) == list(range(1502))
    assert all(value == step or (step == 1500 and math.isnan(value)) for step, value in history)


def test_what_was_sent_twice_counts_once(run: records.Run) -> None:
    unsent = Path(run.folder, "unsent_metrics.jsonl")
    for _ in range(2):
        unsent.write_text('["train/loss", 0.5, 1700000000000, 1]\n["train/loss", NaN, 1700000000001, 2]\n')
        assert tracking.send_unsent_metrics(run)
    assert [step for step, _ in sent(run, "train/loss")] == [1, 2]


def test_training_errors_pass_through_the_writer(run: records.Run) -> None:
    with pytest.raises(ZeroDivisionError), tracking.MetricWriter(run) as writer:  # noqa: PT012
        writer.write(1, {"train/loss": 1.0})
        raise ZeroDivisionError
    assert sent(run, "train/loss") == [(1, 1.0)]


@pytest.mark.parametrize("wanted", [True, False])
def test_system_metrics_come_even_from_a_short_run(store: Path, wanted: bool) -> None:
    settings = config.load(overrides=[f"tracking.system_metrics={str(wanted).lower()}"])
    run = tracking.start(settings, PREPARED, lineage.trace(settings, VERSION))
    with tracking.MetricWriter(run) as writer, tracking.system_metrics(writer, settings):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
    found = tracking.open_store().get_run(run.run_id).data.metrics
    assert ("system/system_memory_usage_megabytes" in found) == wanted
    # This process alone keeps one processor busy: 0 would mean that no time was measured.
    assert (found.get("system/cpu_utilization_percentage", 0) > 0) == wanted


# A server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def server(project: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    shutil.copy(empty_store, project / "server.db")
    uri = f"http://127.0.0.1:{free_port()}"
    command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{project}/server.db", "--workers", "1"]
    place = [
        "--artifacts-destination",
        str(project / "served"),
        "--host",
        "127.0.0.1",
        "--port",
        uri.rpartition(":")[2],
    ]
    log = (project / "server.log").open("wb")
    process = subprocess.Popen([sys.executable, "-m", *command, *place], stdout=log, stderr=log)
    log.close()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{uri}/health", timeout=5).close()
            break
        except OSError:
            time.sleep(0.2)
    yield process
    process.terminate()
    process.wait()


@pytest.mark.slow
def test_a_tracking_server_and_its_end(server: "subprocess.Popen[bytes]") -> None:
    assert server.poll() is None, Path("server.log").read_text()
    run = start()
    tracking.log_files(run, ["params.yaml"], "settings")
    with tracking.MetricWriter(run) as writer:
        writer.write(1, {"train/loss": 0.5})
    assert sent(run, "train/loss") == [(1, 0.5)]
    assert list(Path("served").rglob("params.yaml"))
    assert not Path("mlruns/mlflow.db").exists()

    unsent = Path(run.folder, "unsent_metrics.jsonl")
    with tracking.MetricWriter(run) as writer:
        server.terminate()
        server.wait()
        writer.write(2, {"train/loss": 0.25})
    assert [json.loads(line)[3] for line in unsent.read_text().splitlines()] == [2]


def test_no_run_of_mlflows_own_is_active(run: records.Run) -> None:
    tracking.log_metrics(run, {"test/accuracy": 0.5})
    tracking.finish(run, "FINISHED")
    assert mlflow.active_run() is None
    client = tracking.open_store()
    every = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert [(found.info.run_id, found.info.status) for found in every] == [(run.run_id, "FINISHED")]

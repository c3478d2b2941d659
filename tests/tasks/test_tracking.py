import errno
import hashlib
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
from itertools import product
from pathlib import Path

import keras
import psutil
import pytest

from tasks import config, records, runs
from tasks.runs import lineage
from tasks.serving import raw_model
from tasks.system.errors import UserError
from tasks.system.machine import free_ports
from tasks.tracking import outbox, parents
from tasks.tracking.lifecycle import end_crashed, end_run, log_files, resume_run, set_tags, start_run
from tasks.tracking.metrics import MetricWriter, log_metrics, system_metrics
from tasks.tracking.outbox import OUTBOX, mlflow_run_id
from tasks.tracking.parents import Sweeping, log_comparison, start_comparison
from tasks.tracking.store import open_store
from tests.tasks import made_up

NO_SPLIT = records.PreparedSplit(
    num_examples=3, features={"image": "i.npy"}, labels="l.npy", sha256={"i.npy": "0"}, class_counts=(1, 2),
)  # fmt: skip
PREPARED = records.PreparedDataset(
    name="digits", kind="tfds", version="1.0.0", tfds_version="4.9.10", folder="data/digits/prepared",
    raw_folder="data/digits/raw",
    features={"image": records.Feature(kind="image", shape=(8, 8, 1), dtype="uint8")},
    target=records.Target(task="classification", num_outputs=2, class_names=("a", "b")),
    splits={"train": NO_SPLIT, "test": NO_SPLIT},
    sources=(), licence=None,
)  # fmt: skip
VERSION = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def store(project: Path, empty_store: Path) -> Path:
    path = project / "mlruns" / "mlflow.db"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(empty_store, path)
    OUTBOX.retry_now()  # That of the test before may have been away.
    return path


@pytest.fixture
def run(store: Path) -> records.Run:
    return start()


def start(*overrides: str) -> records.Run:
    settings = config.load(overrides=overrides)
    return start_run(settings, PREPARED, lineage.collect(settings, VERSION))


def sent(run: records.Run, name: str) -> list[tuple[int, float]]:
    history = open_store().get_metric_history(run.run_id, name)
    return [(metric.step, metric.value) for metric in history]


# The store


@pytest.mark.slow
def test_four_processes_on_a_new_store_all_succeed(project: Path) -> None:
    code = "import sys; from tasks.tracking.store import open_store; open_store().create_experiment(sys.argv[1])"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, f"e{i}"], stderr=subprocess.PIPE, text=True) for i in range(4)
    ]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    names = {experiment.name for experiment in open_store().search_experiments()}
    assert names == {"Default", "e0", "e1", "e2", "e3"}
    assert sorted(path.name for path in Path("mlruns").iterdir() if "building" in path.name) == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_first_run_killed_in_the_migration_leaves_no_broken_store(project: Path) -> None:
    code = "from tasks.tracking.store import open_store; open_store()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    building = project / "mlruns" / ".mlflow.db.building" / "mlflow.db"
    while not (building.exists() and building.stat().st_size) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert building.exists()
    assert not (project / "mlruns" / "mlflow.db").exists()
    assert [experiment.name for experiment in open_store().search_experiments()] == ["Default"]
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
        (_half_migrated, "is not an MLflow store.*move it away"),
        (lambda path: path.write_bytes(b""), "is not an MLflow store.*move it away"),
        (lambda path: path.write_text("not a database" * 99), "is not an MLflow store.*move it away"),
        (_directory, "is not an MLflow store.*move it away"),
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
        open_store()


def test_a_server_that_is_down_is_named_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI = http://127.*no MLflow server answers.*unset"):
        open_store()


def test_the_users_own_store_is_honoured(project: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = project / "elsewhere" / "own.db"
    own.parent.mkdir()
    shutil.copy(empty_store, own)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{own}")
    run = start()
    log_files(run, ["params.yaml"], "settings")
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
    traced = lineage.collect(settings, VERSION)
    uses = {"train": ("train", 2), "validation": ("train", 1), "test": ("test", 3)}
    run = start_run(settings, PREPARED, traced, flow_run_id="flow-1", uses=uses)
    found = open_store().get_run(run.run_id)

    assert found.info.status == "RUNNING"
    assert found.info.run_name == run.name == f"convnet2-one_device-fit-{run.run_id[:6]}"
    assert open_store().get_experiment(found.info.experiment_id).name == "digits"
    assert found.info.artifact_uri == (store.parent / "artifacts" / "digits" / run.run_id / "artifacts").as_uri()

    flat = settings.flat()
    assert flat["register.floors"] == {}
    assert found.data.params.keys() == flat.keys() - {"register.floors", "register.ceilings"}
    shown = ("train.epochs", "dataset.version", "input.shuffle", "strategy.kind", "schedule.learning_rate")
    assert [found.data.params[key] for key in shown] == ["7", "null", "true", "one_device", "0.25"]
    assert found.data.params["model.options.note"] == "x" * 6000

    expected = {
        "dataset": "digits", "strategy": "one_device", "loop": "fit", "flow_run_id": "flow-1", "git_dirty": "false",
        "data_version": VERSION, "code_digest": traced.code_digest, "settings_digest": settings.digest(),
        "mlflow.source.git.commit": traced.git_commit,
    }  # fmt: skip
    assert expected.items() <= found.data.tags.items()

    described = [
        (one.dataset.name, one.dataset.digest, one.tags[0].value, json.loads(one.dataset.profile)["num_examples"])
        for one in found.inputs.dataset_inputs
    ]
    assert sorted(described) == [
        ("digits/test", VERSION, "test", 3),
        ("digits/train", f"{VERSION[:27]}-{described[0][1][-8:]}", "training", 2),
        ("digits/validation", f"{VERSION[:27]}-{described[0][1][-8:]}", "validation", 1),
    ]
    assert {one.tags[0].key for one in found.inputs.dataset_inputs} == {"mlflow.data.context"}
    assert json.loads(found.inputs.dataset_inputs[0].dataset.source) == {"uri": PREPARED.folder, "split": "train"}

    assert run.folder == f"mlruns/runs/{run.run_id}"
    assert records.load(records.Run, Path(run.folder, "records", "run.json")) == run


def test_a_comparison_is_the_parent_of_its_runs(store: Path) -> None:
    settings = config.load(overrides=["strategy.kind=mirrored", "strategy.devices=2"])
    traced = lineage.collect(settings, VERSION)
    parent = start_comparison(settings, PREPARED, traced, "comparison-1", "flow-1")
    first, second, failed = (
        start_run(settings, PREPARED, traced, "flow-1", parent_run_id=parent.run_id) for _ in range(3)
    )
    client = open_store()
    found = client.get_run(parent.run_id)
    assert found.info.run_name == parent.name == f"digits-comparison-{parent.run_id[:6]}"
    assert found.data.params == {
        key: outbox.text_of(value)
        for key, value in settings.flat().items()
        if not key.startswith("strategy.") and key not in ("train.loop", "register.floors", "register.ceilings")
    }
    expected = {"dataset": "digits", "data_version": VERSION, "flow_run_id": "flow-1"}
    assert expected.items() <= found.data.tags.items()
    assert not {"strategy", "loop", "mlflow.parentRunId"} & found.data.tags.keys()
    assert parent.folder == f"mlruns/comparisons/{parent.run_id}"
    assert records.load(records.Run, Path(parent.folder, "records", "run.json")) == parent
    assert not Path("mlruns/runs", parent.run_id).exists(), "the newest run to resume is never a comparison"
    children = client.search_runs([found.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'")
    assert {child.data.params["comparison"] for child in children} == {"mirrored fit"}
    assert {child.info.run_id for child in children} == {first.run_id, second.run_id, failed.run_id}

    one = {"strategy": "one_device", "loop": "fit", "num_replicas": 1, "tracing_seconds": 0.5}

    def once(run: records.Run) -> tuple[records.Repeat, ...]:
        one = {"round": 1, "examples_per_second": 9.0, "total_seconds": 1.0, "load": 0.5, "start_up_seconds": 1.0}
        return (records.Repeat(run_id=run.run_id, **one),)

    rows = (
        records.ComparisonRow(run_id=first.run_id, repeats=once(first), speed_up=1.0, **one),
        records.ComparisonRow(run_id=second.run_id, repeats=once(second), speed_up=0.25, **one),
        records.ComparisonRow(run_id=failed.run_id, reason="it broke", **one),
        records.ComparisonRow(strategy="tpu", loop="fit", reason="no TPU"),
    )
    table = records.Comparison(
        run_id=parent.run_id, folder=parent.folder, flow_run_id=None, git_commit=None, data_version=None,
        dataset="digits", model="mlp", seed=0, epochs=1, global_batch_size=32, num_cores=2, rows=rows, left_out=(),
        note=None, seconds=1.0, finished_at="now",
    )  # fmt: skip
    page, csv = Path(parent.folder, "page.md").absolute(), Path(parent.folder, "table.csv").absolute()
    page.write_text("# heading\n\nthe table" + "." * 9000)
    csv.touch()
    log_comparison(parent, table, page, [csv])
    for run, speed_up in ((first, 1.0), (second, 0.25)):
        assert sent(run, "performance/speed_up") == [(0, speed_up)]
        assert sent(run, "performance/tracing_seconds") == [(0, 0.5)]
        assert sent(run, "performance/load") == [(0, 0.5)]
        assert "performance/efficiency" not in client.get_run(run.run_id).data.metrics
    assert client.get_run(failed.run_id).data.metrics == {}
    files = [file.path for file in client.list_artifacts(parent.run_id, "comparison")]
    assert files == ["comparison/page.md", "comparison/table.csv"]
    assert client.get_run(parent.run_id).data.tags["mlflow.note.content"].startswith("the table....")


def start_sweep(name: str) -> records.Run:
    settings = config.load()
    sweeping = Sweeping(f"sweep-{name}", name, ("schedule.learning_rate",))
    return parents.start_sweep(settings, PREPARED, lineage.collect(settings, VERSION), sweeping, None)


def log_sweep(run: records.Run, name: str, final: records.Run) -> None:
    """Tell MLflow of a sweep that has come to its end, as the stage does."""
    summary = records.RunSummary(
        run_id=final.run_id, flow_run_id=None, git_commit=None, git_dirty=None, code_digest="c", settings_digest="s",
        data_version=VERSION, dataset="digits", strategy="one_device", loop="fit", num_replicas=1, epochs=1, steps=1,
        examples_per_second=None, metrics={}, checkpoint="c", weights_digest="w", model_uri=None, model_version=None,
        aliases=(), seconds={}, finished_at="now",
    )  # fmt: skip
    plan = records.SweepPlan(
        name=name, space={"space": {}, "set": {}}, metric="validation/loss", lower_is_better=True, parallel=1,
        sampler="s",
    )  # fmt: skip
    trial = records.Trial(number=0, state="complete", params={}, value=0.5, values=(0.5,))
    done = records.Sweep(
        run_id=run.run_id, folder=run.folder, flow_run_id=None, git_commit=None, data_version=VERSION, dataset="digits",
        model="mlp", plan=plan, trials=(trial,), best=0, final=summary, seconds=1.0, finished_at="now",
    )  # fmt: skip
    parents.log_sweep(run, done, [records.save(done, Path(run.folder, "sweep.json").absolute())])


def test_the_last_training_of_a_sweep_stays_where_it_is_when_another_one_has_the_same(store: Path) -> None:
    alone, first, at_once = start("train.seed=1"), start_sweep("first"), start_sweep("at_once")
    shared = start("train.seed=2")
    later = start_sweep("later")
    own = start("train.seed=3")
    for run, final in ((first, shared), (at_once, shared), (later, alone), (later, shared), (later, own), (later, own)):
        log_sweep(run, run.name, final)
        tags = open_store().get_run(run.run_id).data.tags
        assert tags["final_run"] == final.run_id
        assert final.run_id in tags["mlflow.note.content"]
    client = open_store()
    parents = [client.get_run(run.run_id).data.tags.get("mlflow.parentRunId") for run in (alone, shared, own)]
    assert parents == [None, first.run_id, later.run_id]


def test_without_git_and_dvc_a_run_says_so(store: Path) -> None:
    shutil.rmtree(".git")
    settings = config.load(overrides=["tracking.experiment=My runs"])
    run = start_run(settings, PREPARED, lineage.collect(settings, None))
    found = open_store().get_run(run.run_id)
    assert run.experiment == "My runs"
    assert not {"mlflow.source.git.commit", "git_dirty", "data_version"} & found.data.tags.keys()
    assert {len(one.dataset.digest) for one in found.inputs.dataset_inputs} == {36}


def test_a_run_that_a_late_request_made_twice_is_ended_and_deleted(run: records.Run) -> None:
    client = open_store()
    found = client.get_run(run.run_id)
    tags = {"creation_id": run.creation_id, "mlflow.source.name": "stratagem"}
    assert tags.items() <= found.data.tags.items()
    twin = client.create_run(found.info.experiment_id, tags=tags).info.run_id
    ended = end_crashed(except_run_id=run.run_id)
    assert ended == []
    assert client.get_run(run.run_id).info.status == "RUNNING"
    info = client.get_run(twin).info
    assert (info.status, info.lifecycle_stage) == ("KILLED", "deleted")
    assert client.get_run(twin).data.tags["reason"].startswith(f"a twin of run {run.run_id}")


def test_a_folder_whose_name_mlflow_cannot_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made_up.project(tmp_path / "what?"))
    with pytest.raises(UserError, match=r"MLflow cannot use .*what\?/mlruns/mlflow.db: .*Rename that folder"):
        open_store()
    assert {path.name for path in tmp_path.iterdir()} == {"what?"}, "MLflow would make a file `what`"


def test_a_deleted_experiment_is_refused(run: records.Run) -> None:
    client = open_store()
    client.delete_experiment(client.get_experiment_by_name("digits").experiment_id)
    with pytest.raises(UserError, match=r"'digits' was deleted.*mlflow experiments restore.*tracking\.experiment"):
        start()


@pytest.mark.parametrize(
    ("status", "reason"), [("FINISHED", None), ("FAILED", "the loss is not a number"), ("KILLED", "Ctrl-C")]
)
def test_finish_and_resume(run: records.Run, status: object, reason: str | None) -> None:
    end_run(run, status, reason)
    found = open_store().get_run(run.run_id)
    assert found.info.status == status
    assert found.info.end_time >= found.info.start_time
    assert found.data.tags.get("reason") == reason

    settings = config.load(overrides=["train.epochs=99"])
    traced = run.lineage.model_copy(update={"settings_digest": settings.digest()})
    state = Path(run.folder, "checkpoints", "82", "state.json")
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"state": {"global_batch_size": 32}}))
    resumed = resume_run(run, settings, traced, "flow")
    assert [f"{one.what} {one.values}" for one in resumed.changed] == ["train.epochs 15 up to step 82, then 99"]
    assert (resumed.run_id, resumed.settings, resumed.flow_run_id) == (run.run_id, settings.to_json(), "flow")
    assert records.load(records.Run, Path(run.folder, "records", "run.json")) == resumed
    found = open_store().get_run(run.run_id)
    assert found.info.status == runs.status(run).status == "RUNNING"
    assert found.data.tags["changed.train.epochs"] == "15 -> 99"
    assert found.data.tags["flow_run_id"] == "flow"


def test_a_run_that_was_deleted_is_not_resumed(run: records.Run) -> None:
    open_store().delete_run(run.run_id)
    with pytest.raises(UserError, match=rf"run '{run.run_id}' cannot be resumed: .*mlflow runs restore .*--fresh"):
        resume_run(run, config.load(), run.lineage)


def statuses() -> dict[str, tuple[str, str | None]]:
    """Return the status and the reason of every run in MLflow, by our id."""
    client = open_store()
    every = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return {
        found.data.tags.get("local_run_id", found.info.run_id): (found.info.status, found.data.tags.get("reason"))
        for found in every
    }


def test_runs_whose_process_died_are_ended_as_they_had_put_down_or_as_killed(store: Path) -> None:
    killed, failed, at_work, elsewhere, mine, resumed = (start(f"train.seed={seed}") for seed in range(6))
    client = open_store()
    # As of a process that died between its own note and MLflow's.
    runs.set_status(failed, "FAILED", "no number")
    client.set_tag(elsewhere.run_id, "held_by", f"elsewhere:{elsewhere.key}")
    theirs = elsewhere.model_copy(update={"host": "elsewhere", "boot": "another"})
    records.save(theirs, Path(elsewhere.folder, "records", "run.json"))
    with runs.lock(at_work.key, "a training"), runs.lock(mine.key, "a training"):
        ended = end_crashed(mine.key, resumed.run_id)
    died = f"its process on {socket.gethostname()} died"
    assert {record.what: (record.status, record.reason) for record in ended} == {
        f"MLflow run {killed.run_id}": ("KILLED", died),
        f"MLflow run {failed.run_id}": ("FAILED", "no number"),
        f"MLflow run {mine.run_id}": ("KILLED", died),
    }
    assert statuses() == {
        killed.run_id: ("KILLED", died),
        failed.run_id: ("FAILED", "no number"),
        at_work.run_id: ("RUNNING", None),
        elsewhere.run_id: ("RUNNING", None),
        mine.run_id: ("KILLED", died),
        resumed.run_id: ("RUNNING", None),
    }
    assert [runs.status(run).status for run in (killed, failed, mine)] == ["KILLED", "FAILED", "KILLED"]
    assert {record.what for record in end_crashed()} == {
        f"MLflow run {at_work.run_id}",
        f"MLflow run {resumed.run_id}",
    }
    assert end_crashed() == []


LEADING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tasks import config, records, runs
from tasks.runs import lineage
from tasks.tracking.lifecycle import end_run, start_run
settings = config.load(overrides=[f"train.seed={sys.argv[2]}"])
prepared = records.PreparedDataset.model_validate_json(Path(sys.argv[3]).read_text())
with runs.lock_run(settings):
    run = start_run(settings, prepared, lineage.collect(settings, "0123"))
    print(run.run_id, flush=True)
    sys.stdin.read()
    end_run(run, "FINISHED")
"""
ENDING = "from tasks.tracking.lifecycle import end_crashed; print([ended.what for ended in end_crashed()])"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("other", ["another project in a container", "a copy"])
def test_a_project_with_the_same_name_and_place_or_a_copy_ends_no_run_that_is_at_work(
    store: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Two containers with one hostname, and each with its own project at the same path, share a store."""
    seen, shared = tmp_path / "seen", tmp_path / "shared.db"
    seen.mkdir()
    shutil.move(store, shared)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shared}")
    (tmp_path / "prepared.json").write_text(PREPARED.model_dump_json())
    second = tmp_path / "second"
    shutil.copytree(project, second, symlinks=True)

    def inside(folder: Path, *code: str) -> list[str]:
        mounted = 'mount --bind "$0" "$1" && cd "$1" && PYTHONPATH="$1" && shift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mounted, str(folder), str(seen), sys.executable, "-c", *code]

    if shutil.which("unshare") is None or subprocess.run(inside(project, ""), check=False).returncode != 0:
        pytest.skip("this user may not mount")
    leading = inside(project, LEADING, str(seen), "1", str(tmp_path / "prepared.json"))
    leader = subprocess.Popen(leading, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        run_id = leader.stdout.readline().strip()  # type: ignore[union-attr]
        if other == "a copy":
            shutil.copytree(project / "mlruns", second / "mlruns", dirs_exist_ok=True)
        done = subprocess.run(inside(second, ENDING), check=True, capture_output=True, text=True)
        assert (done.stdout, statuses()) == ("[]\n", {run_id: ("RUNNING", None)})
        leader.communicate("", timeout=60)
        assert statuses() == {run_id: ("FINISHED", None)}
        # A process that was killed is ended, by the next start of its own project alone.
        again = subprocess.Popen(leading, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        killed_id = again.stdout.readline().strip()  # type: ignore[union-attr]
        again.kill()
        again.communicate()
        assert subprocess.check_output(inside(second, ENDING), text=True) == "[]\n"
        assert subprocess.check_output(inside(project, ENDING), text=True) == f"['MLflow run {killed_id}']\n"
    finally:
        leader.kill()
        leader.communicate()


# What an old run's file may hold: nothing, half of it, another encoding, JSON of another kind; or it is a folder.
DAMAGED = (b"", b'{"status": "RUNN', b"\xff\xfe\x00{", b"[5]\n7\nnull\n", None)
FILES = (
    "status.json", "unsent.jsonl", "metrics.jsonl", "mlflow_run_id", "records/run.json", "records/nonfinite.json",
    "summary.json",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("ended", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_an_unreadable_file_of_an_old_run_stops_no_other_one(store: Path, ended: bool) -> None:
    damaged = {
        (name, content): start(f"train.seed={seed}") for seed, (name, content) in enumerate(product(FILES, DAMAGED))
    }
    left = start("train.seed=1000")
    for (name, content), run in damaged.items():
        if ended:
            runs.set_status(run, "FINISHED")
        path = Path(run.folder, name)
        path.unlink(missing_ok=True)
        path.mkdir(parents=True) if content is None else path.write_bytes(content)
    found = {record.what: record.status for record in end_crashed()}
    assert found[f"MLflow run {left.run_id}"] == "KILLED"
    assert runs.remove_leftovers() == []
    now = config.load(overrides=["train.seed=1000"])
    traced = lineage.collect(now, VERSION)
    assert runs.find_unfinished(now, traced) == left
    for seed in range(len(damaged)):
        old = config.load(overrides=[f"train.seed={seed}"])
        traced = lineage.collect(old, VERSION)
        runs.find_unfinished(old, traced)
        runs.why_not_resumed(old, traced)
        lineage.finished_run("digits", traced)
    mended = [damaged["status.json", content] for content in DAMAGED if content is not None]
    assert [runs.status(run).status for run in mended] == ["KILLED"] * 4, "it is ended, and readable from then on"
    assert not [status for status, _ in statuses().values() if status == "RUNNING" and not ended]
    assert len(statuses()) == len(damaged) + 1, "none is deleted as the twin of itself"


def test_without_the_store_a_run_whose_process_died_is_ended_in_its_folder(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="no MLflow server answers"):
        end_crashed()
    assert runs.status(run).status == "KILLED"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    answers_again()
    assert end_crashed() == []
    assert statuses()[run.run_id][0] == "KILLED"


def test_a_run_that_becomes_another_training_forgets_its_results_before_it_says_so(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Path(run.folder, "records", "training.json")
    settings = config.load(overrides=["train.epochs=7"])

    def killed(run: records.Run, *events: object) -> None:
        raise KeyboardInterrupt

    for now, stays in ((config.parse(run.settings), True), (settings, False)):
        result.write_text("{}")
        monkeypatch.setattr(OUTBOX, "deliver", killed)
        with pytest.raises(KeyboardInterrupt):
            resume_run(run, now, lineage.collect(now, VERSION))
        assert result.exists() is stays


# Metrics


def test_metrics_arrive_complete_and_in_order(run: records.Run) -> None:
    with MetricWriter(run) as writer:
        for step in range(2500):
            writer.write(step, {"train/loss": 1 / (step + 1), "train/accuracy": step / 2500})
    assert sent(run, "train/loss") == [(step, 1 / (step + 1)) for step in range(2500)]
    assert sent(run, "train/accuracy") == [(step, step / 2500) for step in range(2500)]
    assert not Path(run.folder, "unsent.jsonl").exists()


def test_what_a_killed_process_had_on_its_way_is_told_by_the_next_and_nothing_twice(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(OUTBOX, "deliver", lambda run, *events: None)  # It died before it could.
        with MetricWriter(run) as writer:
            for step in (21, 42, 63):
                writer.write(step, {"train/loss": step / 100})
    with Path(run.folder, "metrics.jsonl").open("a") as file:
        file.write('[["train/lo')
    assert sent(run, "train/loss") == []
    with MetricWriter(run) as writer:
        writer.write(63, {"train/loss": 7.0})  # From a checkpoint of step 42 it comes to step 63 again.
        writer.write(84, {"train/loss": 0.84})
    assert sent(run, "train/loss") == [(21, 0.21), (42, 0.42), (63, 0.63), (84, 0.84)]
    with Path(run.folder, "metrics.jsonl").open("a") as file:
        file.write(json.dumps([["train/loss", 1.05, int(time.time() * 1000), 105]]) + "\n")
    end_crashed()
    assert sent(run, "train/loss")[-1] == (105, 1.05), "nobody resumes it, and nothing is missing"


def answers_again() -> None:
    """Let the store be asked at once, and not after the pause that follows a failure."""
    OUTBOX.retry_now()


def test_all_is_kept_in_its_order_while_the_store_is_away_and_delivered_once(
    run: records.Run, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unsent = Path(run.folder, "unsent.jsonl")
    away = store.with_name("away.db")
    store.rename(away)
    store.mkdir()
    with caplog.at_level(logging.WARNING, "tasks.tracking"), MetricWriter(run) as writer:
        for step in range(1500):
            writer.write(step, {"train/loss": float(step)})
        time.sleep(0.2)  # So that it comes in more than one batch.
        writer.write(1500, {"train/loss": math.nan})
    set_tags(run, {"checkpoint": "first"})
    log_files(run, ["params.yaml"], "settings")
    set_tags(run, {"checkpoint": "second"})
    end_run(run, "FAILED", "the disk was full")
    (told,) = [record.getMessage() for record in caplog.records]
    assert "it goes on, and what there is to tell is kept and delivered later, also by `stratagem reconcile`" in told
    assert [next(iter(json.loads(line))) for line in unsent.read_text().splitlines()[-5:]] == [
        "tags", "file", "tags", "tags", "status"
    ]  # fmt: skip
    assert runs.undelivered() == [run.run_id]

    store.rmdir()
    away.rename(store)
    kept = unsent.read_text()
    for _ in range(2):  # As when a process is killed between the delivery and its note of it.
        unsent.write_text(kept + '{"metrics": [["train/loss", 1.0, 17')  # What a process that is killed then leaves.
        answers_again()
        assert end_crashed() == []
        assert not unsent.exists()
        history = sent(run, "train/loss")
        assert [step for step, _ in history] == list(range(1501))
        assert all(value == step or (step == 1500 and math.isnan(value)) for step, value in history)
        found = open_store().get_run(run.run_id)
        assert (found.info.status, found.data.tags["checkpoint"]) == ("FAILED", "second")
        assert found.data.tags["reason"] == "the disk was full"
        assert [file.path for file in open_store().list_artifacts(run.run_id, "settings")] == ["settings/params.yaml"]


def test_what_is_kept_of_a_run_that_had_ended_is_known(run: records.Run, store: Path) -> None:
    end_run(run, "FINISHED")
    assert runs.undelivered() == []
    store.rename(store.with_name("away.db"))
    store.mkdir()
    set_tags(run, {"checkpoint": "first"})
    assert runs.undelivered() == [run.run_id]


def test_what_mlflow_refuses_does_not_hold_up_the_rest(run: records.Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tasks.tracking"):
        log_metrics(run, {"no such: \0 name": 1.0, "test/loss": 1.0})
        log_metrics(run, {"test/accuracy": 0.5})
    assert "MLflow rejects a record of run" in caplog.text
    assert sent(run, "test/accuracy") == [(0, 0.5)]
    assert runs.undelivered() == []


def test_training_errors_pass_through_the_writer(run: records.Run) -> None:
    with pytest.raises(ZeroDivisionError), MetricWriter(run) as writer:  # noqa: PT012
        writer.write(1, {"train/loss": 1.0})
        raise ZeroDivisionError
    assert sent(run, "train/loss") == [(1, 1.0)]


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("wanted", [True, False])
def test_system_metrics_come_even_from_a_short_run(store: Path, wanted: bool) -> None:
    settings = config.load(overrides=[f"tracking.system_metrics={str(wanted).lower()}"])
    run = start_run(settings, PREPARED, lineage.collect(settings, VERSION))
    with MetricWriter(run) as writer, system_metrics(writer, settings):
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
    found = open_store().get_run(run.run_id).data.metrics
    assert ("system/system_memory_usage_megabytes" in found) == wanted
    # This process alone keeps one processor busy: 0 would mean that no time was measured.
    assert (found.get("system/cpu_utilization_percentage", 0) > 0) == wanted


# A server


class Server:
    """An MLflow server of the tests in this file, which may end it; ``start`` starts it again, on its port."""

    def __init__(self, folder: Path) -> None:
        self.database, self.served, self._log = folder / "server.db", folder / "served", folder / "server.log"
        (self.port,) = free_ports(1)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, if it does not run, and wait for its first answer."""
        if self.process is not None and self.process.poll() is None:
            return
        command = ["mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}", "--workers", "1"]
        place = ["--artifacts-destination", str(self.served), "--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", *command, *place], stdout=log, stderr=log)
        while self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        assert self.process.poll() is None, self._log.read_text()

    def end(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


@pytest.fixture(scope="module")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.end()


@pytest.fixture
def server(project: Path, only_server: Server, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, with nothing in it; it is the store that the environment names."""
    shutil.rmtree(only_server.served, ignore_errors=True)
    with closing(sqlite3.connect(empty_store)) as empty, closing(sqlite3.connect(only_server.database)) as database:
        empty.backup(database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{only_server.port}")
    OUTBOX.retry_now()  # That of the test before may have been away.
    return only_server


@pytest.mark.slow
def test_code_that_a_servers_model_brings_is_not_imported(server: Server, tmp_path: Path, monkeypatch) -> None:
    """Whoever may write to a server may register this."""
    server.start()
    (tmp_path / "model" / "code").mkdir(parents=True)
    (tmp_path / "model" / "code" / "planted.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "model" / "data").mkdir()
    keras_file = tmp_path / "model" / "data" / "model.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(keras_file)
    client = open_store()
    run = client.create_run("0")
    client.log_artifacts(run.info.run_id, str(tmp_path / "model"), "model")
    client.create_registered_model("m")
    tags = {"keras_file_sha256": hashlib.sha256(keras_file.read_bytes()).hexdigest(), "model": "planted:build"}
    client.create_model_version("m", f"{run.info.artifact_uri}/model", run.info.run_id, tags=tags)
    with pytest.raises(UserError, match=r"m/1 = 'planted:build': a model of a server, MLFLOW_TRACKING_URI, may not"):
        raw_model.load("models:/m/1")
    assert not Path("imported").exists()
    monkeypatch.setenv("STRATAGEM_OWN_CODE", "planted")
    assert raw_model.load("models:/m/1").name == "m/1"
    assert Path("imported").exists()


@pytest.mark.slow
def test_a_run_that_begins_without_its_server_is_whole_when_it_is_back(server: Server) -> None:
    server.end()
    run = start("train.epochs=7")
    with MetricWriter(run) as writer:
        writer.write(1, {"train/loss": 0.5})
    log_files(run, ["params.yaml"], "settings")
    end_run(run, "FINISHED")
    assert runs.undelivered() == [run.run_id]
    assert runs.status(run).status == "FINISHED"
    server.start()
    answers_again()
    assert end_crashed() == []
    assert runs.undelivered() == []
    found = open_store().get_run(mlflow_run_id(run))
    assert statuses() == {run.run_id: ("FINISHED", None)}
    assert found.data.tags["local_run_id"] == run.run_id != found.info.run_id
    assert (found.info.run_name, found.info.start_time) == (run.name, run.start_time)
    assert (found.data.params["train.epochs"], found.data.metrics["train/loss"]) == ("7", 0.5)
    assert found.inputs.dataset_inputs[0].dataset.digest == VERSION
    assert list(server.served.rglob("params.yaml"))
    # As when the process was killed before it noted MLflow's id.
    Path(run.folder, "mlflow_run_id").unlink()
    Path(run.folder, "unsent.jsonl").write_text(
        json.dumps({"create": {"experiment": "digits", "start_time": 0, "tags": {"creation_id": run.creation_id}}})
        + "\n"
    )
    assert end_crashed() == []
    assert mlflow_run_id(run) == found.info.run_id


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_no_step(server: Server, monkeypatch) -> None:
    server.start()
    run = start()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    first = psutil.Process(server.process.pid)
    family = [first, *first.children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        with MetricWriter(run) as writer:
            for step in range(1000):
                writer.write(step, {"train/loss": 1.0})
        assert runs.undelivered() == [run.run_id]
    finally:
        for process in family:
            process.resume()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # For a thousand points at once.
    answers_again()
    end_run(run, "FINISHED")
    assert [step for step, _ in sent(run, "train/loss")] == list(range(1000))
    assert statuses() == {run.run_id: ("FINISHED", None)}


@pytest.mark.slow
def test_a_lost_reply_makes_no_twin(server: Server, proxy, monkeypatch) -> None:
    server.start()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # As a stage process has it.
    losing = proxy(server.port)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{losing.port}")
    losing.lose = ["runs/create", "runs/log-batch"]
    run = start()
    assert mlflow_run_id(run) == run.run_id, "the run that the lost reply was about"
    answers_again()
    log_metrics(run, {"test/accuracy": 0.5})
    client = open_store()
    experiment = client.get_run(run.run_id).info.experiment_id
    tags = {"creation_id": run.creation_id, "mlflow.source.name": "stratagem"}
    late = client.create_run(experiment, tags=tags).info.run_id
    losing.lose.append("runs/log-batch")
    log_metrics(run, {"test/loss": 0.25})
    end_run(run, "FINISHED")
    assert losing.lose == []
    assert end_crashed() == []
    assert statuses() == {run.run_id: ("FINISHED", None)}
    assert client.get_run(late).info.lifecycle_stage == "deleted"
    assert (sent(run, "test/accuracy"), sent(run, "test/loss")) == ([(0, 0.5)], [(0, 0.25)])
    assert open_store().get_run(run.run_id).data.params["train.epochs"] == "15"


def test_a_full_disk_without_a_files_name_is_told_of_the_folder(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with outbox.best_effort():
        raise OSError(errno.ENOSPC, "No space left on device")  # As a write says it.
    assert f"{project}/mlruns cannot be written (No space left on device)" in caplog.text

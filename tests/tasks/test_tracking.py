import hashlib
import json
import logging
import math
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import keras
import psutil
import pytest

from tasks import config, experiments, records, tracked
from tasks.runs import entries, lineage, locks, outcome
from tasks.serving import raw_model
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import free_ports
from tasks.tracking import copier, lifecycle, registry, trained_models, writing
from tasks.tracking import metrics as tracking_metrics
from tasks.tracking import store as tracking_store
from tasks.tracking.lifecycle import end_crashed, end_run, resume_run, start_run
from tasks.tracking.metrics import MetricWriter, log_metrics, system_metrics
from tasks.tracking.store import Unavailable, open_own_store, open_store
from tasks.tracking.writing import log_files, set_tags
from tests.mlflow_server import MlflowServer
from tests.tasks import made_up
from tests.tasks.written_runs import PREPARED, write_summary
from tests.waiting import wait

VERSION = "0123456789abcdef0123456789abcdef"


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


def at_version(number: str) -> Callable[[Path], None]:
    """Make a store one of this version of MLflow's schema."""

    def spoil(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (number,))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            at_version("ffffffffffff"),
            r"written by a newer MLflow than the installed .*ffffffffffff.*install that MLflow, or move the file",
        ),
        (at_version("451aebb31d03"), r"mlflow db upgrade"),
        (lambda path: path.write_text("not a database" * 99), "is not an MLflow store.*move it away"),
    ],
)
def test_an_unusable_store_is_refused_and_left_alone(
    store: Path, spoil: Callable[[Path], object], message: str
) -> None:
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
    with pytest.raises(UserError, match=r"mlruns/mlflow\.db cannot be created.*a writable folder"):
        open_store()


def test_a_server_that_is_down_is_named_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI = http://127.*no MLflow server answers.*unset"):
        open_store()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:5000", "Write http:// before its host"),
        ("mlflow.example.org:80/", "Write http:// before its host"),
        ("http://host:80/#/experiments/1", "is the address of a page. Use that of its server: http://host:80"),
        ("my_runs", "MLFLOW_TRACKING_URI = my_runs cannot be used: "),
    ],
)
def test_an_address_that_is_not_a_servers_is_refused_before_a_run(
    store: Path, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for refuse in (open_store, start):
        with pytest.raises(UserError) as refused:
            refuse()
        assert said in str(refused.value)


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
    assert found.info.run_name == run.name == f"{run.run_id[:6]}-convnet2-one_device-fit"
    assert open_store().get_experiment(found.info.experiment_id).name == "digits"
    assert found.info.artifact_uri == (store.parent / "artifacts" / "digits" / run.run_id / "artifacts").as_uri()

    flat = settings.flat()
    assert flat["register.floors"] == {}
    assert found.data.params.keys() == {key for key, value in flat.items() if value != {}}
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


def start_sweep(name: str) -> records.Run:
    settings = config.load()
    own = ["schedule.learning_rate"]
    new = lifecycle.parent(f"digits-sweep-{name}", "mlruns/sweeps", f"sweep-{name}", settings, own, sweep=name)
    return start_run(settings, PREPARED, lineage.collect(settings, VERSION), new=new)


def log_sweep(run: records.Run, name: str, final: records.Run) -> None:
    """Tell MLflow of a sweep that has come to its end, as the stage does."""
    space = {"space": {}, "set": {}, "recipe": None, "seed": 0, "pruner": None}
    plan = records.SweepPlan(
        name=name, space=space, metric="validation/loss", lower_is_better=True, parallel=1, sampler="s"
    )
    trial = records.Trial(number=0, state="complete", params={}, value=0.5, values=(0.5,))
    done = records.Sweep(
        run_id=run.run_id, folder=run.folder, flow_run_id=None, git_commit=None, data_version=VERSION, dataset="digits",
        model="mlp", plan=plan, trials=(trial,), best=0, final=write_summary(final), seconds=1.0, finished_at="now",
    )  # fmt: skip
    experiments.report_sweep(config.load(), run=run, sweep=done)


def test_the_last_training_of_a_sweep_stays_where_it_is_when_it_was_there_before(store: Path) -> None:
    alone, sweep = start("train.seed=1"), start_sweep("sweep")
    own = start("train.seed=3")
    for final in (alone, own, own):
        log_sweep(sweep, "sweep", final)
        tags = open_store().get_run(sweep.run_id).data.tags
        assert tags["final_run"] == final.run_id
        assert final.run_id in tags["mlflow.note.content"]
    client = open_store()
    parents = [client.get_run(run.run_id).data.tags.get("mlflow.parentRunId") for run in (alone, own)]
    assert parents == [None, sweep.run_id]


def test_without_git_and_dvc_a_run_says_so(store: Path) -> None:
    shutil.rmtree(".git")
    settings = config.load(overrides=["tracking.experiment=My runs"])
    run = start_run(settings, PREPARED, lineage.collect(settings, None))
    found = open_store().get_run(run.run_id)
    assert run.experiment == "My runs"
    assert not {"mlflow.source.git.commit", "git_dirty", "data_version"} & found.data.tags.keys()
    assert {len(one.dataset.digest) for one in found.inputs.dataset_inputs} == {36}


def test_an_evaluation_that_is_killed_before_its_metrics_are_in_mlflow_is_repeated(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = outcome.load(made_up.run(*made_up.classification()), records.EvaluationResult)
    settings = config.load(overrides=["register.enabled=false"])

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    for name, stand_in in {"evaluate_stage": lambda *_, **__: measured, "augmented_examples": lambda *_: None}.items():
        monkeypatch.setattr(tracked, name, stand_in)
    monkeypatch.setattr(tracked, "log_metrics", killed)
    with pytest.raises(KeyboardInterrupt):
        tracked.evaluate(settings, prepared=PREPARED, training=None, run=run)  # type: ignore[arg-type]
    assert outcome.load(run, records.EvaluationResult) is None, "a resumed run skips a stage that has a record"


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
    assert found.info.status == outcome.status(run).status == "RUNNING"
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
        found.data.tags.get("stratagem.run_id", found.info.run_id): (found.info.status, found.data.tags.get("reason"))
        for found in every
    }


def test_runs_whose_process_died_are_ended_as_they_had_put_down_or_as_killed(store: Path) -> None:
    killed, failed, at_work, elsewhere, mine, resumed = (start(f"train.seed={seed}") for seed in range(6))
    client = open_store()
    # As of a process that died between its own note and MLflow's.
    outcome.set_status(failed, "FAILED", "no number")
    client.set_tag(elsewhere.run_id, "held_by", f"elsewhere:{elsewhere.key}")
    theirs = elsewhere.model_copy(update={"host": "elsewhere", "boot": "another"})
    records.save(theirs, Path(elsewhere.folder, "records", "run.json"))
    with locks.lock(at_work.key, "a training"), locks.lock(mine.key, "a training"):
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
    assert [outcome.status(run).status for run in (killed, failed, mine)] == ["KILLED", "FAILED", "KILLED"]
    assert {record.what for record in end_crashed()} == {
        f"MLflow run {at_work.run_id}",
        f"MLflow run {resumed.run_id}",
    }
    assert end_crashed() == []


LEADING = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tasks import config, records
from tasks.runs import locks
from tasks.runs import lineage
from tasks.tracking.lifecycle import end_run, start_run
settings = config.load(overrides=[f"train.seed={sys.argv[2]}"])
prepared = records.PreparedDataset.model_validate_json(Path(sys.argv[3]).read_text())
with locks.lock_run(settings):
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


def test_an_unreadable_file_of_an_old_run_stops_no_other_one(store: Path) -> None:
    without_status, without_record, left = (start(f"train.seed={seed}") for seed in range(3))
    Path(without_status.folder, "status.json").write_bytes(b'{"status": "RUNN')
    Path(without_record.folder, "records", "run.json").write_bytes(b"")
    assert f"MLflow run {left.run_id}" in {record.what for record in end_crashed()}
    assert outcome.status(without_status).status == "KILLED", "it is ended, and readable from then on"


def test_without_the_server_a_run_whose_process_died_is_ended(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert [one.status for one in end_crashed()] == ["KILLED"]
    assert outcome.status(run).status == "KILLED"
    assert [one.run_id for one in entries.find_uncopied()] == [run.run_id]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert end_crashed() == []
    assert statuses()[run.run_id][0] == "KILLED"


def test_a_run_that_becomes_another_training_forgets_its_results_before_it_says_so(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Path(run.folder, "records", "training.json")
    settings = config.load(overrides=["train.epochs=7"])

    def killed(run: records.Run, *given: object) -> None:
        raise KeyboardInterrupt

    for now, stays in ((config.parse(run.settings), True), (settings, False)):
        result.write_text("{}")
        monkeypatch.setattr(lifecycle, "write", killed)
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
    assert not Path(run.folder, "uncopied").exists()


def test_metrics_have_the_names_of_keras_where_they_are_asked_for(store: Path) -> None:
    settings = config.load(overrides=["tracking.metric_names=keras"])
    run = start_run(settings, PREPARED, lineage.collect(settings, VERSION))
    with MetricWriter(run) as writer:
        writer.write(5, {"train/loss": 0.5, "validation/accuracy": 0.9, "training/host_ms": 1.0})
    log_metrics(run, {"test/loss": 0.6})
    found = open_own_store().get_run(run.run_id).data.metrics
    assert found == {"loss": 0.5, "val_accuracy": 0.9, "training/host_ms": 1.0, "test/loss": 0.6}


def test_what_a_killed_process_had_on_its_way_is_told_by_the_next_and_nothing_twice(
    run: records.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tracking_metrics, "log_points", lambda run, points: True)  # It died before it could.
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


def test_metrics_are_complete_though_the_store_was_away(
    run: records.Run, store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.tracking.store.PAUSES_SECONDS", ())
    away = store.with_name("away.db")
    store.rename(away)
    store.mkdir()
    with caplog.at_level(logging.WARNING, "tasks.tracking"), MetricWriter(run) as writer:
        writer.write(1, {"train/loss": 1.0})
        while not caplog.records:
            time.sleep(0.05)
        store.rmdir()
        away.rename(store)
        writer.write(2, {"train/loss": math.nan})
    assert "MLflow did not accept a record of run" in caplog.text
    assert [step for step, _ in sent(run, "train/loss")] == [1, 2]


def test_what_mlflow_refuses_does_not_hold_up_the_rest(run: records.Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tasks.tracking"):
        log_metrics(run, {"no such: \0 name": 1.0, "test/loss": 1.0})
        log_metrics(run, {"test/accuracy": 0.5})
    assert "MLflow rejects a record of run" in caplog.text
    assert sent(run, "test/accuracy") == [(0, 0.5)]


def test_system_metrics(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_metrics, "SYSTEM_METRICS_EVERY_SECONDS", 0.5)
    settings = config.load(overrides=["tracking.system_metrics=true"])
    run = start_run(settings, PREPARED, lineage.collect(settings, VERSION))
    with system_metrics(run, settings):
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
    found = open_store().get_run(run.run_id).data.metrics
    assert "system/system_memory_usage_megabytes" in found
    # This process alone keeps one processor busy: 0 would mean that no time was measured.
    assert found["system/cpu_utilization_percentage"] > 0


# A server


@pytest.fixture(scope="module")
def only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    yield server
    server.end()


@pytest.fixture
def server(
    project: Path, only_server: MlflowServer, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> MlflowServer:
    """The server, with nothing in it; it is the store that the environment names."""
    (project / "mlruns").mkdir(exist_ok=True)
    shutil.copy(empty_store, project / "mlruns" / "mlflow.db")
    monkeypatch.setattr(copier, "_WARNED", set())
    shutil.rmtree(only_server.served, ignore_errors=True)
    with closing(sqlite3.connect(empty_store)) as empty, closing(sqlite3.connect(only_server.database)) as database:
        empty.backup(database)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", only_server.uri)
    return only_server


@pytest.fixture
def odd(store: Path, proxy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that answers each request with `{}`; it is the store that the environment names."""
    odd = proxy(0)
    odd.own = {"": (0, b"{}")}
    monkeypatch.setattr(copier, "_WARNED", set())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{odd.port}")
    return odd


def test_a_version_without_a_status_is_not_waited_for(odd: Any) -> None:
    with pytest.raises(Unavailable, match="version of model 'digits' is PENDING_REGISTRATION, not READY: no alias"):
        registry.make_version(open_store(), "m-1", "1", "digits", {"model_digest": "d"})
    assert len([path for path in odd.asked if "model-versions/get?" in path]) == 1


@pytest.mark.parametrize(
    ("status", "answer"),
    [(500, b"Internal Server Error"), (404, b'{"error_code": "ENDPOINT_NOT_FOUND", "message": "Not Found"}')],
    ids=["fails", "has another version"],
)
def test_a_server_that_fails_or_has_another_version_costs_a_warning(
    odd: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, answer: bytes
) -> None:
    monkeypatch.setattr(tracking_store, "PAUSES_SECONDS", (0.0,))
    odd.own, odd.status = {"": (0, answer)}, status
    run = start()
    with caplog.at_level(logging.WARNING, "tasks.tracking"):
        end_run(run, "FINISHED")
        end_run(run, "FINISHED")
    assert len([one for one in caplog.messages if "the MLflow server does not accept this run now" in one]) == 1
    assert (uncopied(), outcome.status(run).status) == ([run.run_id], "FINISHED")


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_the_user_is_asked_once_and_names_the_variables(odd: Any, status: int) -> None:
    odd.own, odd.status = {"": (0, b"<html>a page of a proxy</html>")}, status
    with pytest.raises(Unavailable, match=rf"failed with error code {status} != 200\): set MLFLOW_TRACKING_USERNAME"):
        registry.find_versions("digits")
    assert len([path for path in odd.asked if "/api/" in path]) == 1


def test_a_server_that_hangs_is_asked_once(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [start(), start(), start()]
    for run in runs:
        lifecycle._end(run, "FINISHED", None)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    odd.own = {"/health": (0, b"OK"), "/api/": (2, b"{}")}
    odd.asked.clear()
    with pytest.raises(Unavailable, match="timed out"):
        registry.find_versions("digits")
    assert len([path for path in odd.asked if "/api/" in path]) == 1
    assert sorted(uncopied()) == sorted(run.run_id for run in runs)
    odd.asked.clear()
    copier.copy_pending()
    assert len([path for path in odd.asked if "/api/" in path]) == 2, "one run, and whether the server answers at all"


def test_the_address_of_a_copy_is_printed_once(
    run: records.Run,
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    team = shutil.copy(empty_store, tmp_path / "team.db")
    monkeypatch.setattr(copier, "store_uri", lambda: "http://me:secret@team:5000/")
    monkeypatch.setattr(copier, "open_store", lambda uri=None: open_store(uri or f"sqlite:///{team}"))
    with caplog.at_level(logging.INFO, "tasks.tracking"):
        there = copier.copy(run).there
        set_tags(run, {"note": "evaluated again"})
        assert copier.copy(run).there == there
    assert [one.getMessage() for one in caplog.records if " is at " in one.getMessage()] == [
        f"run {run.run_id[:8]} is at http://team:5000/#/experiments/1/runs/{there}"
    ]


def test_two_projects_with_one_server_take_turns(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(registry, "LOCK_SECONDS", 0.1)
    with registry.registering():
        monkeypatch.setattr(config, "project_root", lambda: tmp_path / "other")
        with pytest.raises(StratagemError, match="another process has registered a model"), registry.registering():
            pass
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:10")
        with registry.registering():  # Another server.
            pass
    assert (tmp_path / "cache" / "stratagem").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "/sys")  # Not even root makes files there.
    with registry.registering():
        pass


@pytest.mark.slow
def test_code_that_a_servers_model_brings_is_not_imported(server: MlflowServer, tmp_path: Path, monkeypatch) -> None:
    """Whoever may write to a server may register this."""
    server.start()
    (tmp_path / "model" / "code").mkdir(parents=True)
    (tmp_path / "model" / "code" / "planted.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "model" / "data").mkdir()
    keras_file = tmp_path / "model" / "data" / "model.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(keras_file)
    client = open_store()
    run = client.create_run("0")
    trained_models.write_manifest(tmp_path / "model")
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


def uncopied() -> list[str]:
    return [run.run_id for run in entries.find_uncopied()]


def copies(run: records.Run) -> list[Any]:
    client = open_store()
    experiments = [one.experiment_id for one in client.search_experiments()]
    return list(client.search_runs(experiments, f"tags.stratagem.run_id = '{run.run_id}'"))


def served(run: records.Run) -> Any:
    """The copy of a run on the server."""
    (found,) = copies(run)
    return found


@pytest.mark.slow
def test_a_run_that_begins_without_its_server_is_whole_when_it_is_back(
    server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.end()
    run = start("train.epochs=7")
    with MetricWriter(run) as writer:
        writer.write(1, {"train/loss": 0.5})
    log_files(run, ["params.yaml"], "settings")
    with caplog.at_level(logging.WARNING, "tasks.tracking"):
        end_run(run, "FINISHED")
    assert "the MLflow server does not accept this run now" in caplog.text
    assert uncopied() == [run.run_id]
    assert outcome.status(run).status == "FINISHED"
    assert open_own_store().get_run(run.run_id).info.status == "FINISHED"
    server.start()
    for _ in range(2):  # A second copy changes nothing.
        copier.copy_pending()
        assert uncopied() == []
        found = served(run)
        assert statuses() == {run.run_id: ("FINISHED", None)}
        assert found.data.tags["stratagem.run_id"] == run.run_id != found.info.run_id
        assert (found.info.run_name, found.info.start_time) == (run.name, run.start_time)
        assert (found.data.params["train.epochs"], found.data.metrics["train/loss"]) == ("7", 0.5)
        assert found.inputs.dataset_inputs[0].dataset.digest == VERSION
        assert list(server.served.rglob("params.yaml"))
        writing.mark_uncopied(run)  # As when the process was killed before it noted the end of the copy.


@pytest.mark.slow
def test_a_run_that_the_server_does_not_take_holds_up_no_other(server: MlflowServer) -> None:
    server.start()
    deleted = start()
    end_run(deleted, "FINISHED")
    open_store().delete_run(served(deleted).info.run_id)
    server.end()
    set_tags(deleted, {"note": "evaluated again"})
    other = start()
    end_run(other, "FINISHED")
    assert sorted(uncopied()) == sorted([deleted.run_id, other.run_id])
    server.start()
    copier.copy_pending()
    assert uncopied() == [deleted.run_id]


@pytest.mark.slow
def test_a_run_is_copied_while_it_trains(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.start()
    monkeypatch.setattr(tracking_metrics, "COPY_EVERY_SECONDS", 0.1)
    run = start()
    with MetricWriter(run) as writer:
        for step in range(20):
            writer.write(step, {"train/loss": float(step)})
            time.sleep(0.1)
        wait("the copy", lambda: any("train/loss" in one.data.metrics for one in copies(run)), 60)
        assert served(run).info.status == "RUNNING"
    end_run(run, "FAILED", "no power")
    assert statuses() == {run.run_id: ("FAILED", "no power")}
    history = open_store().get_metric_history(served(run).info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(step, float(step)) for step in range(20)]
    assert uncopied() == []


@pytest.mark.slow
def test_a_server_that_hangs_holds_up_no_step(server: MlflowServer, monkeypatch) -> None:
    server.start()
    monkeypatch.setattr(tracking_metrics, "COPY_EVERY_SECONDS", 0.1)
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
        assert uncopied() == [run.run_id]
    finally:
        for process in family:
            process.resume()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # For a thousand points at once.
    end_run(run, "FINISHED")
    history = open_store().get_metric_history(served(run).info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1000))
    assert statuses() == {run.run_id: ("FINISHED", None)}


@pytest.mark.slow
def test_a_lost_reply_makes_no_twin(server: MlflowServer, proxy, monkeypatch) -> None:
    server.start()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # As a stage process has it.
    losing = proxy(server.port)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{losing.port}")
    run = start()
    log_metrics(run, {"test/accuracy": 0.5})
    losing.lose = ["runs/create", "runs/log-batch"]
    end_run(run, "FINISHED")
    assert losing.lose == []
    assert statuses() == {run.run_id: ("FINISHED", None)}
    # A request whose reply came late has made another one.
    client, copy = open_store(), served(run)
    late = client.create_run(copy.info.experiment_id, tags={"stratagem.run_id": run.run_id}).info.run_id
    log_metrics(run, {"test/loss": 0.25})
    copier.copy_pending()
    states = sorted(client.get_run(one).info.lifecycle_stage for one in (late, copy.info.run_id))
    assert states == ["active", "deleted"]
    found = served(run)
    assert found.data.metrics == {"test/accuracy": 0.5, "test/loss": 0.25}
    assert found.data.params["train.epochs"] == "15"
    assert statuses() == {run.run_id: ("FINISHED", None)}

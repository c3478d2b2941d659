"""Runs that were made without the team's store, brought to it: a real SQLite store, and a real server over HTTP."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from tasks import records, runs
from tasks.operations import pipeline
from tasks.runs import lineage
from tasks.system.errors import UserError
from tasks.system.machine import free_ports
from tasks.tracking import copier
from tasks.tracking.lifecycle import end_crashed, end_run, log_files, set_tags, start_run
from tasks.tracking.metrics import MetricWriter
from tasks.tracking.models import find_model
from tasks.tracking.outbox import OUTBOX
from tasks.tracking.parents import Sweeping, start_comparison, start_sweep, start_trial
from tests.tasks.registering import IMAGES, VERSION, Trained

STRATAGEM = (sys.executable, "-c", "from flows.cli.main import main; main()")


@pytest.fixture
def team(tmp_path: Path, empty_store: Path) -> str:
    """The team's store."""
    (tmp_path / "team").mkdir()
    shutil.copy(empty_store, tmp_path / "team" / "mlflow.db")
    return f"sqlite:///{tmp_path / 'team' / 'mlflow.db'}"


@pytest.fixture
def sync(team: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., records.Sync]:
    """``sync(folder)`` brings the runs to the team's store."""

    def sync(folder: Path | None = None, to: str = team) -> records.Sync:
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", to)
            return copier.sync(folder)

    return sync


def trained(*overrides: str, right: int = 5) -> Trained:
    """A run that is registered, with metrics of two steps and a file."""
    made = Trained(*overrides)
    with MetricWriter(made.run) as writer:
        writer.write(1, {"train/loss": 0.5})
        writer.write(2, {"train/loss": float("nan")})
    log_files(made.run, ["params.yaml"], "settings")
    made.register(right=right)
    return made


def store_state(uri: str) -> dict[str, Any]:
    """All that a store says, and no times of its own."""
    client = MlflowClient(uri, registry_uri=uri)
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    state: dict[str, Any] = {}
    for run in found:
        models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
        state[run.info.run_id] = {
            "info": [run.info.status, run.info.start_time, run.info.end_time, run.info.run_name],
            "params": run.data.params,
            "tags": run.data.tags,
            "metrics": {
                key: sorted((one.step, str(one.value)) for one in client.get_metric_history(run.info.run_id, key))
                for key in run.data.metrics
            },
            "data": [one.dataset.digest for one in run.inputs.dataset_inputs],
            "models": [[one.model_id, str(one.status), one.tags, len(one.metrics or [])] for one in models],
            "outputs": len(run.outputs.model_outputs) if run.outputs else 0,
        }
    state["versions"] = [[one.name, one.version, one.run_id, one.tags] for one in client.search_model_versions()]
    state["aliases"] = {
        one.name: ({alias: str(version) for alias, version in one.aliases.items()}, one.tags)
        for one in client.search_registered_models()
    }
    return state


def test_a_run_is_brought_whole_and_twice_is_as_once(store: Path, sync: Callable[..., records.Sync], team: str) -> None:
    made = trained()
    run_id = made.run.run_id
    own = store_state(f"sqlite:///{store.absolute()}")
    done = sync()
    (brought,) = done.runs
    assert (brought.run_id, brought.outcome, brought.versions) == (run_id, "delivered", ("digits-convnet2/1",))
    state = store_state(team)
    here, there = own[run_id], state[brought.there]
    for same in ("info", "params", "metrics", "data", "outputs"):
        assert there[same] == here[same], same
    assert there["metrics"]["train/loss"] == [(1, "0.5"), (2, "nan")]
    assert there["tags"].items() >= here["tags"].items()
    assert there["tags"]["data_version"] == VERSION
    assert there["tags"]["code_digest"] == made.run.lineage.code_digest
    assert there["tags"]["local_run_id"] == run_id
    ((_, status, tags, num_metrics),) = there["models"]
    assert (status, num_metrics) == (here["models"][0][1], here["models"][0][3])
    assert tags.items() >= {k: v for k, v in here["models"][0][2].items() if k != "mlflow.modelVersions"}.items()
    assert state["versions"][0][2] == brought.there
    assert state["aliases"]["digits-convnet2"][0] == {"challenger": "1", "champion": "1"}
    assert list(Path(team.removeprefix("sqlite:///")).parent.rglob("settings/params.yaml"))

    again = sync()
    assert [one.outcome for one in again.runs] == ["there already"]
    assert again.runs[0].versions == brought.versions
    assert store_state(team) == state
    assert store_state(f"sqlite:///{store.absolute()}") == own


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_copy_that_is_half_made_is_left_for_the_next_sync(
    store: Path, sync: Callable[..., records.Sync], team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained()
    (brought,) = sync().runs
    client = MlflowClient(team)
    client.update_run(brought.there, status="RUNNING")  # As a sync that was killed leaves it.
    client.delete_tag(brought.there, "sync_digest")
    client.set_tag(brought.there, "reason", "of a run that was resumed since")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", team)
        end_crashed()
    found = client.get_run(brought.there)
    assert (found.info.status, found.info.lifecycle_stage) == ("RUNNING", "active")
    (again,) = sync().runs
    assert (again.run_id, again.outcome, again.there) == (made.run.run_id, "delivered", brought.there)
    found = client.get_run(brought.there)
    assert found.info.status == MlflowClient(f"sqlite:///{store.absolute()}").get_run(made.run.run_id).info.status
    assert "reason" not in found.data.tags


@pytest.mark.slow
def test_a_model_that_was_brought_predicts_as_before(
    store: Path, sync: Callable[..., records.Sync], team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained()
    ours = mlflow.pyfunc.load_model(str(next(Path("mlruns/artifacts").rglob("MLmodel")).parent)).predict(IMAGES)
    sync()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", team)
    found = find_model("models:/digits-convnet2@champion")
    assert found.run_id == made.run.run_id  # Its id here, by which its folder is found.
    shutil.rmtree("mlruns/artifacts")  # Nothing there may lean on it.
    place = MlflowClient(team, registry_uri=team).get_model_version_by_alias("digits-convnet2", "champion").source
    theirs = mlflow.pyfunc.load_model(place)
    np.testing.assert_array_equal(theirs.predict(IMAGES), ours)
    assert theirs.metadata.run_id != made.run.run_id


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_folder_of_another_machine(
    store: Path, sync: Callable[..., records.Sync], team: str, tmp_path: Path
) -> None:
    trained()
    copy = tmp_path / "copied" / "mlruns"
    shutil.copytree("mlruns", copy)
    shutil.rmtree("mlruns")
    for given in (copy, copy.parent):
        done = sync(given)
        assert [one.versions for one in done.runs] == [("digits-convnet2/1",)]
    assert len(store_state(team)["versions"]) == 1


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("inside", [True, False])
def test_a_link_in_the_folder_of_another_machine_brings_no_file_of_this_one(
    store: Path, sync: Callable[..., records.Sync], tmp_path: Path, inside: bool
) -> None:
    """What rsync or an archive has brought may hold a link to whatever whoever syncs can read."""
    made = trained()
    copy = tmp_path / "copied" / "mlruns"
    shutil.copytree("mlruns", copy)
    shutil.rmtree("mlruns")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("the key of this machine")
    (file,) = copy.glob(f"artifacts/*/{made.run.run_id}/artifacts/settings")
    (model,) = copy.glob("artifacts/*/models/*/artifacts/MLmodel")
    if inside:
        (file / "key").symlink_to(tmp_path / "private" / "key")
        (model.parent / "more").symlink_to(tmp_path / "private")
    else:
        shutil.rmtree(file.parent)
        file.parent.symlink_to(tmp_path / "private")
    done = sync(copy)
    assert [one.outcome for one in done.runs] == ["left out" if inside else "delivered"]
    if inside:
        assert "is a link" in str(done.runs[0].reason)
    brought = [path for path in (tmp_path / "team").rglob("*") if path.is_file()]
    assert len(brought) > 1 or inside
    assert [path for path in brought if b"the key of this machine" in path.read_bytes()] == []


@pytest.mark.slow
def test_what_changes_after_a_sync_is_brought_by_the_next(
    store: Path, sync: Callable[..., records.Sync], team: str
) -> None:
    made = trained()
    sync()
    set_tags(made.run, {"seen_by": "somebody"})
    client = MlflowClient(uri := f"sqlite:///{store.absolute()}", registry_uri=uri)
    (model,) = client.search_logged_models([client.get_run(made.run.run_id).info.experiment_id])
    client.set_logged_model_tags(model.model_id, {"seen_by": "somebody else"})
    client.log_metric(made.run.run_id, "shown", 0.5, model_id=model.model_id)
    before = len(store_state(uri)[made.run.run_id]["models"][0][2])
    (brought,) = sync().runs
    assert brought.outcome == "updated"
    there = store_state(team)[brought.there]
    assert there["tags"]["seen_by"] == "somebody"
    ((_, _, tags, num_metrics),) = there["models"]
    assert tags["seen_by"] == "somebody else"
    assert len(tags) == before + 1  # Its id of before.
    assert num_metrics == store_state(uri)[made.run.run_id]["models"][0][3]
    assert [one.outcome for one in sync().runs] == ["there already"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_is_being_written_is_left_out(store: Path, sync: Callable[..., records.Sync], team: str) -> None:
    done, running = trained(), Trained("train.seed=1")
    outcomes = {one.run_id: (one.outcome, one.reason) for one in sync().runs}
    assert outcomes[done.run.run_id][0] == "delivered"
    assert outcomes[running.run.run_id][0] == "left out"
    assert "has not ended" in outcomes[running.run.run_id][1]
    end_run(running.run, "FAILED", "no power")
    with runs.lock(running.run.key, "a run"):
        assert {one.outcome: one.reason for one in sync().runs}["left out"] == "a process is at work on it"
    assert sorted(one.outcome for one in sync().runs) == ["delivered", "there already"]
    there = [one for one in store_state(team).values() if "info" in one]
    assert sorted(one["info"][0] for one in there) == ["FAILED", "FINISHED"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_comparison_keeps_its_runs(store: Path, sync: Callable[..., records.Sync], team: str) -> None:
    made = trained()
    origin = lineage.collect(made.settings, VERSION)
    parent = start_comparison(made.settings, made.prepared, origin, "key", None)
    child = start_run(made.settings, made.prepared, origin, parent_run_id=parent.run_id)
    for one in (child, parent):
        end_run(one, "FINISHED")
    there = {one.run_id: one.there for one in sync().runs}
    assert store_state(team)[there[child.run_id]]["tags"]["mlflow.parentRunId"] == there[parent.run_id]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_alias_that_came_from_elsewhere_stays(
    store: Path, sync: Callable[..., records.Sync], team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", team)
        trained("train.seed=2", right=0)  # The team's own, another model.
    trained("train.seed=1")
    done = sync()
    assert len(done.notes) == 2
    assert "digits-convnet2@champion stays at version 1, which came from elsewhere; version 2 has it here" in done.notes
    assert store_state(team)["aliases"]["digits-convnet2"][0]["champion"] == "1"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_aliases_of_a_project_follow_it(store: Path, sync: Callable[..., records.Sync], team: str) -> None:
    trained("train.seed=1", right=0)
    sync()
    trained("train.seed=2")
    assert sync().notes == ()
    aliases, tags = store_state(team)["aliases"]["digits-convnet2"]
    assert aliases == {"challenger": "2", "champion": "2"}
    assert tags["champion_history"] == "1, 2"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_was_deleted_there_is_not_made_again(
    store: Path, sync: Callable[..., records.Sync], team: str
) -> None:
    trained()
    there = sync().runs[0].there
    MlflowClient(team).delete_run(there)
    (left,) = sync().runs
    assert (left.outcome, left.there) == ("left out", there)
    assert f"mlflow runs restore --run-id {there}" in left.reason


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_store_that_was_copied_half_is_refused(
    store: Path, sync: Callable[..., records.Sync], tmp_path: Path
) -> None:
    trained()
    (tmp_path / "half").mkdir()
    content = store.read_bytes()
    (tmp_path / "half" / "mlflow.db").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="copy it again"):
        sync(tmp_path / "half")
    with pytest.raises(UserError, match=r"there is no mlflow\.db in it"):
        sync(tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_store_is_not_brought_to_itself(store: Path, sync: Callable[..., records.Sync]) -> None:
    trained()
    with pytest.raises(UserError, match="where these runs are already"):
        sync(to=f"sqlite:///{store.absolute()}")
    with pytest.raises(UserError, match="where these runs are already"):
        sync(to=f"sqlite:///{store.parent.absolute()}/../{store.parent.name}/{store.name}")


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (None, "where to?"),
        ("mlruns", "is not a store that runs can be brought to"),
        ("http://me:secret@127.0.0.1:1", "can be read by every user"),
        ("http://127.0.0.1:1", "no MLflow server answers"),
    ],
)
def test_what_is_no_store_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, to: str | None, words: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as refused:
        pipeline.sync(to, None)
    assert "secret" not in str(refused.value)


# Over HTTP.


@contextlib.contextmanager
def served(folder: Path, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The team's server, until the block ends."""
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/served"]
    with (folder / "log").open("ab") as log:
        server = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield server
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_a_sync_that_is_killed_goes_on_and_makes_nothing_twice(
    store: Path, team: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")  # Of 10 s a busy server needs more.
    made = [trained(f"train.seed={seed}", right=seed) for seed in (1, 2)]
    folder = Path(team.removeprefix("sqlite:///")).parent
    (port,) = free_ports(1)
    uri = f"http://127.0.0.1:{port}"
    with served(folder, port):
        # Killed with its children, as by a machine that is switched off, when the first run is half there.
        process = subprocess.Popen(
            [*STRATAGEM, "sync", "--to", uri], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        end = time.monotonic() + 200
        while not list(folder.glob("served/**/MLmodel")) and time.monotonic() < end:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        with closing(sqlite3.connect(folder / "mlflow.db")) as database:
            (complete,) = database.execute("SELECT count(*) FROM tags WHERE key = 'sync_digest'").fetchone()
        assert complete < len(made)
        done = run([*STRATAGEM, "sync", "--to", uri, "--json"])
        assert done.returncode == 0, done.stderr
        brought = records.Sync.model_validate_json(done.stdout)
        assert sorted(one.run_id for one in brought.runs) == sorted(one.run.run_id for one in made)
        state = store_state(f"sqlite:///{folder}/mlflow.db")
        again = run([*STRATAGEM, "sync"], env={"MLFLOW_TRACKING_URI": uri})
        assert (again.returncode, "2 there already" in again.stdout) == (0, True), again.stderr
        assert store_state(f"sqlite:///{folder}/mlflow.db") == state
        ids = {one.there for one in brought.runs}
        assert ids == {one for one in state if one not in ("versions", "aliases")}
        assert [len(state[one]["models"]) for one in ids] == [1, 1]
        assert len(state["versions"]) == 2
        mlflow.set_tracking_uri(uri)
        try:
            assert mlflow.pyfunc.load_model("models:/digits-convnet2/1").predict(IMAGES).shape == (5, 3)
        finally:
            mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_what_a_server_that_is_gone_was_not_told_goes_to_another(
    store: Path, team: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")  # Of 10 s a busy server needs more.
    gone, port = free_ports(2)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{gone}")
        OUTBOX.retry_now()
        made = Trained()
        with MetricWriter(made.run) as writer:
            writer.write(1, {"train/loss": 0.5})
        end_run(made.run, "FINISHED")
    OUTBOX.retry_now()
    assert Path(made.run.folder, "unsent.jsonl").exists()
    folder = Path(team.removeprefix("sqlite:///")).parent
    with served(folder, port):
        done = run([*STRATAGEM, "sync", "--to", f"http://127.0.0.1:{port}", "--json"])
        assert done.returncode == 0, done.stderr
        (brought,) = records.Sync.model_validate_json(done.stdout).runs
    assert (brought.outcome, brought.run_id) == ("delivered", made.run.run_id)
    assert f"stratagem register --run {made.run.run_id[:8]}" in brought.reason
    (there,) = [one for one in store_state(f"sqlite:///{folder}/mlflow.db").values() if "info" in one]
    assert there["metrics"]["train/loss"] == [(1, "0.5")]
    assert not Path(made.run.folder, "unsent.jsonl").exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_sweep_that_nobody_was_told_of_comes_before_its_trials(
    store: Path, sync: Callable[..., records.Sync], team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the folders of mlruns/ are read in."""
    made = trained()
    origin = lineage.collect(made.settings, VERSION)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
        OUTBOX.retry_now()
        sweeping = Sweeping("key", "space", ("train.seed",))
        parent = start_sweep(made.settings, made.prepared, origin, sweeping, None)
        trial = start_trial(made.settings, made.prepared, origin, parent, 0)
        for one in (trial, parent):
            end_run(one, "FINISHED")
    OUTBOX.retry_now()
    sync()
    brought = [(run_id, run["tags"]) for run_id, run in store_state(team).items() if "info" in run]
    there = {tags["local_run_id"]: (run_id, tags.get("mlflow.parentRunId")) for run_id, tags in brought}
    assert there[trial.run_id][1] == there[parent.run_id][0]

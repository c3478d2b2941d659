"""Runs that were made without the team's store, brought to it: a real SQLite store, and a real server over HTTP."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from tasks import records
from tasks.operations import pipeline
from tasks.runs import lineage
from tasks.system.errors import UserError
from tasks.tracking import copier, lifecycle
from tasks.tracking.lifecycle import end_run, start_run
from tasks.tracking.metrics import MetricWriter
from tasks.tracking.models import find_version
from tasks.tracking.writing import log_files, set_tags
from tests.mlflow_server import MlflowServer
from tests.tasks.registering import IMAGES, VERSION, Trained
from tests.waiting import wait

STRATAGEM = (sys.executable, "-c", "from flows.cli.main import main; main()")


@pytest.fixture
def team(tmp_path: Path, empty_store: Path) -> str:
    """The team's store."""
    (tmp_path / "team").mkdir()
    shutil.copy(empty_store, tmp_path / "team" / "mlflow.db")
    return f"sqlite:///{tmp_path / 'team' / 'mlflow.db'}"


@pytest.fixture
def sync(team: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., records.Sync]:
    """``sync()`` brings the runs to the team's store."""

    def sync(to: str = team) -> records.Sync:
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", to)
            return copier.sync(to)

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


def test_five_runs_look_the_same_there_and_twice_is_as_once(
    store: Path, sync: Callable[..., records.Sync], team: str
) -> None:
    made, worse, failed = trained(), trained("train.seed=2", right=0), Trained("train.seed=3")
    end_run(failed.run, "FAILED", "no power")
    origin = lineage.collect(made.settings, VERSION)
    own = ["train.loop", "strategy"]
    new = lifecycle.parent("digits-comparison", "mlruns/comparisons", "key", made.settings, own)
    parent = start_run(made.settings, made.prepared, origin, new=new)
    child = start_run(made.settings, made.prepared, origin, new=lifecycle.training(made.settings, parent.run_id))
    for one in (child, parent):
        end_run(one, "FINISHED")
    own = store_state(f"sqlite:///{store.absolute()}")
    done = sync(to=team)
    state = store_state(team)
    again = sync(to=team)
    assert {one.outcome for one in done.runs} == {"delivered"}
    there = {one.run_id: str(one.there) for one in done.runs}
    assert there.keys() == {one.run_id for one in (made.run, worse.run, failed.run, parent, child)}
    assert len({*there.values()}) == 5
    for run_id, copy in there.items():
        for same in ("info", "params", "metrics", "data", "outputs"):
            assert state[copy][same] == own[run_id][same], same
        tags = dict(own[run_id]["tags"])
        if "mlflow.parentRunId" in tags:
            tags["mlflow.parentRunId"] = there[tags["mlflow.parentRunId"]]
        assert state[copy]["tags"].items() >= {**tags, "stratagem.run_id": run_id}.items()
        for (_, *known, num_metrics), (_, *copied, num_copied) in zip(
            own[run_id]["models"], state[copy]["models"], strict=True
        ):
            assert (copied[0], num_copied) == (known[0], num_metrics)
            assert copied[1].items() >= {k: v for k, v in known[1].items() if k != "mlflow.modelVersions"}.items()
    assert state[there[made.run.run_id]]["metrics"]["train/loss"] == [(1, "0.5"), (2, "nan")]
    assert len(state["versions"]) == len(own["versions"]) == 2
    for (name, version, run_id, tags), copied in zip(own["versions"], state["versions"], strict=True):
        assert copied[:3] == [name, version, there[run_id]]
        assert copied[3].items() >= tags.items()
    assert state["aliases"] == own["aliases"]
    files = Path(team.removeprefix("sqlite:///")).parent
    assert len(list(files.rglob("settings/params.yaml"))) == 2

    assert {one.outcome for one in again.runs} == {"up to date"}
    assert sorted(one.versions for one in again.runs) == sorted(one.versions for one in done.runs)
    assert store_state(team) == state
    assert store_state(f"sqlite:///{store.absolute()}") == own


@pytest.mark.slow
def test_a_model_that_was_brought_predicts_as_before(
    store: Path, sync: Callable[..., records.Sync], team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained()
    ours = mlflow.pyfunc.load_model(str(next(Path("mlruns/artifacts").rglob("MLmodel")).parent)).predict(IMAGES)
    sync()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", team)
    found = find_version("models:/digits-convnet2@champion")
    assert found.run_id == made.run.run_id  # Its id here, by which its folder is found.
    shutil.rmtree("mlruns/artifacts")  # Nothing there may lean on it.
    place = MlflowClient(team, registry_uri=team).get_model_version_by_alias("digits-convnet2", "champion").source
    theirs = mlflow.pyfunc.load_model(place)
    np.testing.assert_array_equal(theirs.predict(IMAGES), ours)
    assert theirs.metadata.run_id != made.run.run_id


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
    assert [one.outcome for one in sync().runs] == ["up to date"]


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
    assert (
        "digits-convnet2@champion stays at version 1 of another project; in this project, version 2 has the alias"
        in done.notes
    )
    assert store_state(team)["aliases"]["digits-convnet2"][0]["champion"] == "1"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_was_deleted_there_is_not_made_again(
    store: Path, sync: Callable[..., records.Sync], team: str
) -> None:
    trained()
    there = sync().runs[0].there
    MlflowClient(team).delete_run(there)
    (left,) = sync().runs
    assert left.outcome == "left out"
    assert f"mlflow runs restore --run-id {there}" in left.reason


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (None, "--to is missing"),
        ("mlruns", "runs cannot be copied to such a store"),
        ("http://me:secret@127.0.0.1:1", "every user of this machine can read"),
        ("http://127.0.0.1:1", "no MLflow server answers"),
    ],
)
def test_what_is_no_store_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, to: str | None, words: str
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=words.replace("?", r"\?")) as refused:
        pipeline.sync(to)
    assert "secret" not in str(refused.value)


def test_an_experiment_that_was_deleted_there_is_named_and_nothing_is_lost(
    store: Path, sync: Callable[..., records.Sync], team: str
) -> None:
    end_run(Trained().run, "FINISHED")
    client = MlflowClient(team)
    place = client.create_experiment("digits")
    client.delete_experiment(place)
    (left,) = sync().runs
    assert (left.outcome, left.there) == ("left out", None)
    assert f"`mlflow experiments restore --experiment-id {place}`" in left.reason
    client.restore_experiment(place)
    assert [one.outcome for one in sync().runs] == ["delivered"]


def test_a_run_that_is_not_in_the_own_store_is_named(
    store: Path, sync: Callable[..., records.Sync], empty_store: Path
) -> None:
    run = Trained().run
    shutil.copy(empty_store, store)
    (left,) = sync().runs
    assert (left.run_id, left.outcome) == (run.run_id, "left out")
    assert left.reason.endswith("mlruns/mlflow.db: to resume or register it writes it there again")


# Over HTTP.


@pytest.mark.slow
def test_a_sync_that_is_killed_goes_on_and_makes_nothing_twice(
    store: Path, team: str, monkeypatch: pytest.MonkeyPatch, run: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")  # Of 10 s a busy server needs more.
    made = [trained(f"train.seed={seed}", right=seed) for seed in (1, 2)]
    folder = Path(team.removeprefix("sqlite:///")).parent
    with MlflowServer(folder) as server:
        uri = server.uri
        # Killed with its children, as by a machine that is switched off, when the first run is half there.
        process = subprocess.Popen(
            [*STRATAGEM, "sync", "--to", uri], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        wait("half of the first run", lambda: list(folder.glob("served/**/MLmodel")), 200)
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
        assert (again.returncode, "2 up to date" in again.stdout) == (0, True), again.stderr
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

"""Whole runs that are killed at random moments, together with the MLflow server of the team, until all have ended."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from tests.mlflow_server import MlflowServer
from tests.processes.trainings import ONE, SAME

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(6000)]

KILLS = int(os.environ.get("STRATAGEM_TEST_KILLS", "12"))
LONGEST_SECONDS = 45.0
"""A run of these settings takes less on a quiet machine."""


def kill_family(pid: int) -> None:
    """Kill a process and all that it started, as a machine that is switched off does."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, 60)


def state(uri: str, id_tag: str | None) -> dict[str, Any]:
    """What a store says of each training, by the id that the run has in the project."""
    client = MlflowClient(uri, registry_uri=uri)
    found = client.search_runs([one.experiment_id for one in client.search_experiments()], max_results=1000)
    assert len(found) == len({one.data.tags.get(id_tag, one.info.run_id) for one in found}), "no run is there twice"
    return {
        one.data.tags.get(id_tag, one.info.run_id): (
            one.info.status,
            one.data.params,
            {key: [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, key)]
             for key in one.data.metrics},
            len(client.search_logged_models([one.info.experiment_id], f"source_run_id = '{one.info.run_id}'")),
        )
        for one in found
    }  # fmt: skip


def finished(project: Path) -> list[str]:
    """The ids of the runs whose folder says that they ended well."""
    places = project.glob("mlruns/runs/*/status.json")
    return [path.parent.name for path in places if json.loads(path.read_text())["status"] == "FINISHED"]


def test_nothing_is_lost_or_done_twice(stratagem, cluster_project, tmp_path, empty_store):
    draw = random.Random(os.environ.get("STRATAGEM_TEST_SEED", "0"))
    folder = tmp_path / "team"
    folder.mkdir()
    shutil.copy(empty_store, folder)
    server = MlflowServer(folder)
    environment = {"MLFLOW_TRACKING_URI": server.uri, "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}

    def start(command: str, *overrides: str) -> Any:
        return stratagem(command, *overrides, **environment)

    longest, killed = LONGEST_SECONDS, {"run": 0, "stage": 0, "server": 0}
    with server:
        while sum(killed.values()) < KILLS:
            server.start(wait=draw.random() < 0.5)
            # The same command until its run has ended, then that of another run.
            command = start("run", *SAME, *ONE, f"train.seed={len(finished(cluster_project))}")
            began = time.monotonic()
            until = began + draw.uniform(0, longest)
            while time.monotonic() < until and command.process.poll() is None:
                time.sleep(0.01)
            what = draw.choice(("run", "run", "stage", "server"))
            if what == "server":  # The run goes on.
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
                assert command.end() == 0, command.err.read_text()
                killed[what] += 1
            elif command.process.poll() is None:
                members = command.members("serve")
                what = what if members else "run"
                kill_family(members[0].pid if what == "stage" else command.process.pid)
                command.end()
                killed[what] += 1
            if command.process.returncode == 0:
                longest = time.monotonic() - began
        server.start()
        last = start("run", *SAME, *ONE, f"train.seed={len(finished(cluster_project))}")
        assert last.end() == 0, last.err.read_text()
        seen = []
        for _ in range(2):  # The second time nothing changes.
            for words in ("reconcile", "sync"):
                command = start(words)
                assert command.end() == 0, command.err.read_text()
            client = MlflowClient(server.uri, registry_uri=server.uri)
            versions = sorted((one.name, str(one.version), one.run_id) for one in client.search_model_versions())
            (model,) = client.search_registered_models()
            own = state(f"sqlite:///{cluster_project}/mlruns/mlflow.db", None)
            seen.append((own, state(server.uri, "stratagem.run_id"), versions, model.aliases))
    own, there, versions, aliases = seen[1]
    ended = finished(cluster_project)
    print(f"{killed}: {len(ended)} runs of {len(own)} ended, {len(versions)} versions, {aliases}")
    assert seen[0] == seen[1]
    assert there == own, "every run is on the server, as it is here"
    assert sorted(run_id for run_id, (status, *_) in own.items() if status == "FINISHED") == sorted(ended)
    assert {status for status, *_ in own.values()} <= {"FINISHED", "FAILED", "KILLED"}
    seeds = [params["train.seed"] for status, params, *_ in own.values() if status == "FINISHED"]
    assert len(set(seeds)) == len(seeds), "nothing is trained twice"
    assert len({run_id for _, _, run_id in versions}) == len(versions) == len(ended), "one version of each"
    assert "champion" in aliases
    assert not list(cluster_project.glob("mlruns/runs/*/uncopied"))

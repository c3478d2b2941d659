"""prefect.yaml for real: a server, a work pool, a worker; runs on demand and by schedule."""

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.tasks.training.test_own_parts import PARTS
from tests.waiting import wait

pytestmark = pytest.mark.slow


@dataclass
class Prefect:
    """A Prefect server with a worker, and a project that is deployed there."""

    project: Path
    environment: dict[str, str]
    worker: psutil.Process

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `prefect ...` as a script would: with nobody to answer questions."""
        return subprocess.run(
            ["prefect", *args],
            cwd=self.project,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the API's answer to a POST, or to a GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.environment['PREFECT_API_URL']}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """Return the runs of a deployment that have begun, the oldest first."""
        runs = self.ask(
            "flow_runs/filter", {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        )
        return [run for run in runs if run["start_time"] is not None]

    def task_runs(self, flow_run: dict[str, Any]) -> list[str]:
        """Return the names of a run's tasks, in the order in which they began."""
        body = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return [run["name"] for run in self.ask("task_runs/filter", body)]

    def mlflow_runs(self) -> dict[str, str]:
        """Return the state of each MLflow run by the id of its flow run."""
        query = "SELECT value, status FROM runs JOIN tags ON runs.run_uuid = tags.run_uuid AND key = 'flow_run_id'"
        with contextlib.closing(sqlite3.connect(self.project / "mlruns" / "mlflow.db", timeout=60)) as database:
            return dict(database.execute(query))


@pytest.fixture(scope="module")
def prefect(prepared_template, prefect_database, start, tmp_path_factory) -> Iterator[Prefect]:
    project = tmp_path_factory.mktemp("deployed") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("prefect")
    shutil.copy(prefect_database, home)
    environment = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PROJECT_ROOT": str(project),
        "PYTHONPATH": str(project),
    }
    server = start("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), **environment)

    def answers() -> bool:
        assert server.process.poll() is None, server.err.read_text()
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5).status == 200
        return False

    wait("the server's first answer", answers)
    deployed = Prefect(project, environment, None)
    pool = deployed.command("work-pool", "create", "local-process", "--type", "process", "--overwrite")
    assert pool.returncode == 0, pool.stderr
    done = deployed.command("--no-prompt", "deploy", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    # From elsewhere: only the deployment's pull step leads to the project.
    worker = start(
        "prefect", "worker", "start", "--pool", "local-process", "--type", "process", "--limit", "1",
        cwd=tmp_path_factory.mktemp("elsewhere"), **environment,
    )  # fmt: skip
    deployed.worker = psutil.Process(worker.process.pid)
    yield deployed
    for command in (worker, server):
        command.family = psutil.Process(command.process.pid).children(recursive=True)
        command.process.terminate()
        command.process.wait(300)
        assert command.survivors() == []


def test_the_deployments_are_there(prefect):
    found = {entry["name"]: entry for entry in prefect.ask("deployments/filter", {})}
    assert found.keys() == {"training", "comparison", "sweep", "nightly"}
    for deployment in found.values():
        assert deployment["description"]
        assert "training" in deployment["tags"]
        assert deployment["global_concurrency_limit"]["limit"] == 1
        (pull,) = deployment["pull_steps"]
        assert pull == {"prefect.deployments.steps.set_working_directory": {"directory": str(prefect.project)}}
    assert found["training"]["schedules"] == found["comparison"]["schedules"] == []
    (nightly,) = found["nightly"]["schedules"]
    assert f'- cron: "{nightly["schedule"]["cron"]}"' in (prefect.project / "prefect.yaml").read_text()
    assert found["nightly"]["parameters"] == {"if_changed": True}


def test_a_bad_value_is_refused_before_a_run_exists(prefect):
    overrides = {"common": {"train.epochs": 0}}
    asked_for = {"deployments": {"name": {"any_": ["training"]}}}
    before = prefect.ask("flow_runs/count", asked_for)
    result = prefect.command("deployment", "run", "training/training", "-p", f"overrides={json.dumps(overrides)}")
    assert result.returncode == 1
    said = " ".join((result.stdout + result.stderr).split())
    assert "overrides.common['train.epochs']" in said, said
    assert prefect.ask("flow_runs/count", asked_for) == before


def test_a_run_on_demand_is_completed_there_and_finished_in_mlflow(prefect):
    overrides = {"train.epochs": 2, "model.options": {"dropout": 0.1}, "train.global_batch_size": 64}
    result = prefect.command(
        "deployment", "run", "training/training", "-p", f"overrides={json.dumps(overrides)}", "--watch"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (flow_run,) = prefect.flow_runs("training")
    assert flow_run["state_type"] == "COMPLETED"
    assert flow_run["name"] == "digits-one_device-fit"
    # Prefect writes tasks down beside the run, some of them after its end.
    wait("the last task", lambda: len(prefect.task_runs(flow_run)) >= 4)
    assert prefect.task_runs(flow_run) == [
        "data digits", "train convnet2 on digits, one_device fit", "evaluate latest on digits, one_device fit",
        "register convnet2 on digits, one_device",
    ]  # fmt: skip
    assert prefect.mlflow_runs() == {flow_run["id"]: "FINISHED"}
    # What was asked for is what was trained.
    (record,) = prefect.project.glob("mlruns/runs/*/summary.json")
    summary = json.loads(record.read_text())
    assert summary["flow_run_id"] == flow_run["id"]
    assert summary["epochs"] == 2
    assert summary["steps"] == 2 * 21, "1,293 examples are 21 batches of 64"
    artifacts = prefect.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
    by_key = {artifact["key"]: artifact for artifact in artifacts}
    page = by_key["result"]
    assert page["type"] == "markdown"
    assert summary["run_id"] in page["data"]
    assert f"{summary['metrics']['test/accuracy']:.4f}" in page["data"]

    def epochs() -> list[str]:
        logs = prefect.ask("logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}})
        return [log["message"] for log in logs if "train/loss" in log["message"]]

    wait("Prefect's log of both epochs", lambda: len(epochs()) == 2)
    assert sorted(line.partition(":")[0] for line in epochs()) == ["step 21", "step 42"]


@pytest.mark.exhaustive
def test_a_comparison_on_demand_leaves_its_table(prefect):
    overrides = {"train.epochs": 1, "strategy.devices": 2}
    asked = ["-p", 'strategies=["one_device"]', "-p", f"overrides={json.dumps(overrides)}"]
    refused = prefect.command("deployment", "run", "comparison/comparison", *asked, "--watch")
    assert refused.returncode == 1, "one_device has no devices"
    asked[-1] = 'overrides={"train.epochs": 1}'
    result = prefect.command("deployment", "run", "comparison/comparison", *asked, "-p", "repeats=1", "--watch")
    assert result.returncode == 0, result.stdout + result.stderr
    first, flow_run = prefect.flow_runs("comparison")
    assert "none of one_device has this key" in first["state"]["message"]
    assert first["id"] not in prefect.mlflow_runs()
    assert flow_run["name"] == "comparison of one_device"
    wait("the last task", lambda: len(prefect.task_runs(flow_run)) >= 5)
    assert prefect.task_runs(flow_run) == [
        "data digits", "train convnet2 on digits, one_device fit", "evaluate latest on digits, one_device fit",
        "train convnet2 on digits, one_device custom", "evaluate latest on digits, one_device custom",
    ]  # fmt: skip
    artifacts = prefect.ask("artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
    (page,) = [artifact for artifact in artifacts if artifact["key"] == "comparison"]
    assert "| one_device | fit | 1 |" in page["data"]


def test_a_flow_run_names_no_code_and_no_file_of_anywhere(prefect, tmp_path):
    (prefect.project / "planted.py").write_text("open('imported', 'w').close()\n\ndef build(*shape): ...\n")
    before = set(prefect.project.glob("mlruns/runs/*"))
    # A space that somebody else of this machine has written.
    space = tmp_path / "space.yaml"
    space.write_text((prefect.project / "recipes" / "sweeps" / "digits.yaml").read_text())
    model, loss = {"model.name": "planted:build"}, {"train.loss": "planted:build"}
    for deployment, parameters, words in (
        ("training/training", {"overrides": model}, "model.name = 'planted:build': a flow run may not name code"),
        ("comparison/comparison", {"overrides": loss}, "train.loss = 'planted:build': a flow run may not name code"),
        ("sweep/sweep", {"space": str(space)}, "a flow run may only name files in"),
    ):
        asked = [part for name, value in parameters.items() for part in ("-p", f"{name}={json.dumps(value)}")]
        result = prefect.command("deployment", "run", deployment, *asked, "--watch")
        assert result.returncode == 1, result.stdout
        flow_run = prefect.flow_runs(deployment.partition("/")[0])[-1]
        assert flow_run["state_type"] == "FAILED"
        assert words in flow_run["state"]["message"]
    assert set(prefect.project.glob("mlruns/runs/*")) == before
    assert not (prefect.project / "imported").exists()


def test_a_flow_run_trains_with_the_own_parts_of_its_recipe(prefect):
    (prefect.project / "parts.py").write_text(PARTS)
    own = {"optimizer": {"kind": "parts:Sign"}, "schedule": {"kind": "parts:Halving", "options": {"first": 0.01}},
           "train": {"epochs": 1, "callbacks": [{"parts:Slower": {"factor": None}}]}}  # fmt: skip
    (prefect.project / "recipes" / "own.yaml").write_text(yaml.safe_dump(own))
    assert prefect.command("--no-prompt", "deploy", "--all").returncode == 0  # The form lists the new recipe.
    result = prefect.command("deployment", "run", "training/training", "-p", 'recipe="own"', "--watch")
    assert result.returncode == 0, result.stdout + result.stderr
    flow_run = prefect.flow_runs("training")[-1]
    (metrics,) = [
        path.with_name("metrics.jsonl")
        for path in prefect.project.glob("mlruns/runs/*/summary.json")
        if json.loads(path.read_text())["flow_run_id"] == flow_run["id"]
    ]
    assert "train/seen" in metrics.read_text()


@pytest.mark.exhaustive
def test_a_run_that_is_cancelled_ends_as_killed(prefect):
    long = json.dumps({"train.epochs": 3000})
    assert prefect.command("deployment", "run", "training/training", "-p", f"overrides={long}").returncode == 0

    def training() -> dict[str, Any] | None:
        begun = [run for run in prefect.flow_runs("training") if run["state_type"] == "RUNNING"]
        trains = begun and list(prefect.project.glob("mlruns/runs/*/checkpoints/*"))
        return begun[0] if trains and prefect.mlflow_runs().get(begun[0]["id"]) == "RUNNING" else None

    flow_run = wait("training", training)
    family = prefect.worker.children(recursive=True)
    assert any(child.cmdline()[-2:] == ["tasks", "serve"] for child in family)
    assert prefect.command("flow-run", "cancel", flow_run["id"]).returncode == 0
    wait("the end as killed", lambda: prefect.mlflow_runs()[flow_run["id"]] == "KILLED")
    wait("the cancellation", lambda: prefect.flow_runs("training")[-1]["state_type"] == "CANCELLED")
    ends = [json.loads(path.read_text()) for path in prefect.project.glob("mlruns/runs/*/status.json")]
    assert [" is saved. " in end["reason"] for end in ends if end["status"] == "KILLED"] == [True]
    _, alive = psutil.wait_procs(family, 120)
    assert [child.cmdline() for child in alive] == []


def test_a_scheduled_run_fires_and_the_next_one_trains_nothing(prefect):
    path = prefect.project / "prefect.yaml"
    values = yaml.safe_load(path.read_text())
    (nightly,) = [entry for entry in values["deployments"] if entry["name"] == "nightly"]
    nightly["schedules"] = [{"interval": 15, "slug": "soon"}]
    nightly["parameters"]["overrides"] = {"train.epochs": 1}
    path.write_text(yaml.safe_dump(values))
    before = prefect.mlflow_runs()
    done = prefect.command("--no-prompt", "deploy", "--all")
    assert done.returncode == 0, done.stdout + done.stderr

    def completed() -> list[dict[str, Any]]:
        return [run for run in prefect.flow_runs("nightly") if run["state_type"] == "COMPLETED"]

    wait("two scheduled runs", lambda: len(completed()) >= 2)
    first, second = completed()[:2]
    assert first["auto_scheduled"]
    assert second["auto_scheduled"]
    assert "train convnet2 on digits, one_device fit" in prefect.task_runs(first)
    wait("its task", lambda: prefect.task_runs(second))
    assert prefect.task_runs(second) == ["data digits"]
    new = {flow_run: status for flow_run, status in prefect.mlflow_runs().items() if flow_run not in before}
    assert new == {first["id"]: "FINISHED"}
    # Nothing more is started, and what has begun comes to its end.
    (deployment,) = prefect.ask("deployments/filter", {"deployments": {"name": {"any_": ["nightly"]}}})
    prefect.ask(f"deployments/{deployment['id']}/pause_deployment", {})
    wait("quiet", lambda: prefect.worker.children() == [])

import json
import os
import re
import shutil
import signal

import psutil
import pytest
import requests

from tasks.system.machine import free_ports
from tests.flows.doors import assert_shut, assert_socket_shut

# What MLflow, Prefect and uvicorn would listen on by themselves.
EVERYWHERE = {"MLFLOW_HOST": "0.0.0.0", "PREFECT_SERVER_API_HOST": "0.0.0.0", "UVICORN_HOST": "0.0.0.0"}


def _lines(out: str) -> dict[str, str]:
    """Return what `stratagem ui` says, by its first word; the last one where there are two."""
    return dict(re.findall(r"^(\w+) +(\S.*)$", out, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
    ids=["Ctrl-C", "SIGHUP", "kill -9"],
)
def test_ui_shows_the_runs_to_whoever_has_its_key_until_it_is_interrupted(in_finished, start, number, exit_code):
    ports = in_finished.project / "mlruns" / "ui.json"
    before = dict(zip(("mlflow", "prefect"), free_ports(2), strict=True))
    ports.write_text(json.dumps(before))
    command = start("stratagem", "ui", **EVERYWHERE)
    command.wait_until("Press Ctrl-C to stop everything.", of=command.out)
    assert json.loads(ports.read_text()) == before, "those of the last time, so that a bookmark holds"
    said = _lines(command.out.read_text())
    mlflow, prefect = said["MLflow"].removesuffix("/"), said["Prefect"].removesuffix("/runs")
    key = said["Password"].split()[0]
    user, _, password = key.partition(":")
    summary = in_finished.summary
    for address, expected in {
        mlflow: "MLflow",
        f"{mlflow}/api/2.0/mlflow/runs/get?run_id={summary['run_id']}": "FINISHED",
        f"{prefect}/api/flow_runs/{summary['flow_run_id']}": "COMPLETED",
    }.items():
        assert requests.get(address, timeout=60).status_code == 401, address
        assert requests.get(address, auth=(user, "guessed"), timeout=60).status_code == 401, address
        answer = requests.get(address, auth=(user, password), timeout=60)
        assert expected in answer.text, address
    if number == signal.SIGINT:
        assert_shut(mlflow, "/api/2.0/mlflow/experiments/search", key, {"max_results": 1})
        assert_shut(prefect, "/api/flows/filter", key, {})
        assert_socket_shut(prefect)
    # What is printed to be opened holds no password, and no cookie does: another port's page would be sent it.
    assert password in said["User"]
    with requests.Session() as browser:
        browser.auth = (user, password)
        assert password not in said["Runs"]
        assert browser.get(said["Runs"], timeout=60).status_code == 200
        assert not browser.cookies
        # A page of the web that reaches it under a name of its own, and one in a browser that kept the password.
        assert browser.get(mlflow, headers={"Host": "attacker.example"}, timeout=60).status_code == 403
        written, tag = f"{mlflow}/api/2.0/mlflow/runs/set-tag", {"key": "from a page", "value": "yes"}
        elsewhere = ("http://attacker.example", "http://127.0.0.1:9")  # The second: another user's, on this machine.
        for origin, status in {**dict.fromkeys(elsewhere, 403), mlflow: 200}.items():
            answer = browser.post(
                written, json=tag | {"run_id": summary["run_id"]}, headers={"Origin": origin}, timeout=60
            )
            assert answer.status_code == status, origin
            assert browser.get(mlflow, headers={"Origin": origin}, timeout=60).status_code == status, origin
        for origin, allowed in {**dict.fromkeys(elsewhere), prefect: prefect}.items():
            asked_from = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = requests.options(f"{prefect}/api/deployments/", headers=asked_from, timeout=60)
            assert answer.headers.get("access-control-allow-origin") == allowed
        job = {"job_name": "optimize_prompts", "params": {}}
        assert "job execution feature is not enabled" in browser.post(f"{mlflow}/ajax-api/3.0/jobs/", json=job).text
        experiments = f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=1"
        experiment = browser.get(experiments, timeout=60).json()["experiment"]
    # Behind the link is the table of trainings, not the view for language models, with a column for the accuracy.
    assert "/experiments/1/runs?workflowType=machine_learning&viewStateShareKey=stratagem" in said["Runs"]
    tags = {tag["key"]: tag["value"] for tag in experiment["tags"]}
    assert "metrics.`test/accuracy`" in tags["mlflow.sharedViewState.stratagem"]
    assert requests.get(f"{mlflow}/?key={password}", timeout=60).status_code == 401
    command.wait_until("Press Ctrl-C to stop everything.", of=command.out)
    assert len(command.family) >= 2
    for line in (" ".join(process.cmdline()) for process in [*command.family, psutil.Process(command.process.pid)]):
        assert password not in line
        assert "jobs" not in line, "no workers of MLflow's that nobody asked for"
    if number == signal.SIGKILL:
        command.process.kill()
    else:
        os.killpg(command.process.pid, number)  # As a terminal sends it: to the whole group.
    assert command.process.wait(300) == exit_code
    assert command.survivors() == []
    assert "Traceback" not in command.err.read_text()


def test_ui_refuses_a_project_that_cannot_be_written_as_run_does(project, run):
    shutil.rmtree(project / "mlruns")
    (project / "mlruns").symlink_to("/proc/self")  # Nobody can make a file there, root neither.
    done = run(["stratagem", "ui"])
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*mlruns cannot be written .*: make the project's folder writable.*\n", done.stderr)

import os
import re
import signal
import urllib.request

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["Ctrl-C", "SIGHUP", "kill -9"],
)
def test_ui_shows_the_runs_until_it_is_interrupted(in_finished, start, number, exit_code):
    command = start("stratagem", "ui")
    command.wait_until("Ctrl-C ends both.", of=command.out)
    said = re.findall(r"^(MLflow|Prefect) +(http://127\.0\.0\.1:\d+)$", command.out.read_text(), re.MULTILINE)
    mlflow, prefect = (dict(said)[name] for name in ("MLflow", "Prefect"))
    summary = in_finished.summary
    for address, expected in {
        mlflow: "MLflow",
        f"{mlflow}/api/2.0/mlflow/runs/get?run_id={summary['run_id']}": "FINISHED",
        prefect: "Prefect",
        f"{prefect}/api/flow_runs/{summary['flow_run_id']}": "COMPLETED",
    }.items():
        assert expected in urllib.request.urlopen(address, timeout=60).read().decode(), address
    command.wait_until("Ctrl-C ends both.", of=command.out)
    assert len(command.family) >= 2
    if number == signal.SIGKILL:
        command.process.kill()
    else:
        os.killpg(command.process.pid, number)  # As a terminal sends it: to the whole group.
    assert command.process.wait(60) == exit_code
    assert command.survivors() == []
    assert "Traceback" not in command.err.read_text()

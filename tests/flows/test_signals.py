"""A signal that a service manager or a closed terminal sends to every process of a run, and one to each of them."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time

import psutil
import pytest

# It does not end by itself.
ENDLESS = """
input: {augmentation: {crop_padding: 0}}
model: {name: mlp, options: {units: [16]}}
schedule: {kind: constant, learning_rate: 0.01}
train: {epochs: 100000}
checkpoint: {every_epochs: 1}
tracking: {system_metrics: false}
"""


def everyone(family):
    return family


def the_stage(family):
    return [process for process in family if process.cmdline()[-2:] == ["tasks", "serve"]]


TOLD = [
    (everyone, signal.SIGINT, 130),
    (everyone, signal.SIGHUP, 143),
    (everyone, signal.SIGTERM, 143),
    pytest.param(the_stage, signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
]


def begin(project, start, home, *overrides):
    """Return a command whose run has saved a step, and all processes of that run."""
    (project / "endless.yaml").write_text(ENDLESS)
    given = [word for override in overrides for word in ("--set", override)]
    command = start("stratagem", "run", "endless.yaml", *given, PREFECT_HOME=str(home))
    command.wait_until(lambda: list(project.glob("mlruns/runs/*/checkpoints/*/state.json")))
    return command, psutil.Process(command.process.pid)


@pytest.mark.in_ci(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "number", "exit_code"), TOLD, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_run_ends_with_a_saved_step_whoever_is_told(prepared_project, start, prefect_home, whom, number, exit_code):
    command, leader = begin(prepared_project, start, prefect_home)
    (server,) = [process for process in command.family if "flows.operate.server" in process.cmdline()]
    server.send_signal(number)  # Alone: the run needs it to report its end.
    told = whom(command.family)
    if whom is everyone:  # The group, as a terminal tells it, and whoever is in another one.
        told = [process for process in told if os.getpgid(process.pid) != leader.pid]
        os.killpg(leader.pid, number)
    for process in told:
        process.send_signal(number)
    assert command.process.wait(900) == exit_code, command.err.read_text()
    said = command.err.read_text()
    assert re.search(r"interrupted: .*step [\d,]+, which is saved", said.splitlines()[-1]), said
    assert "Traceback" not in said
    with contextlib.closing(sqlite3.connect(prepared_project / "mlruns" / "mlflow.db")) as database:
        assert database.execute("SELECT status FROM runs").fetchall() == [("KILLED",)]
    (status,) = prepared_project.glob("mlruns/runs/*/status.json")
    assert json.loads(status.read_text())["status"] == "KILLED"
    with contextlib.closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        ((state,),) = database.execute("SELECT state_type FROM flow_run").fetchall()
    assert state == "CANCELLED"
    assert command.survivors() == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_servers_of_a_cluster_leave_it_to_the_chief_to_stop(prepared_project, start, prefect_home):
    layout = ("strategy.kind=parameter_server", "train.loop=custom")
    command, leader = begin(prepared_project, start, prefect_home, *layout)
    servers = [process for process in command.family if process.cmdline()[-2:] == ["tasks", "tf_server"]]
    assert len(servers) == 3
    for process in servers:
        process.send_signal(signal.SIGTERM)
    time.sleep(2)  # Time to die, and for the chief to miss them.
    for process in [*servers, leader]:
        process.send_signal(signal.SIGHUP)
    assert command.process.wait(900) == 143, command.err.read_text()
    said = command.err.read_text()
    assert re.search(r"interrupted: .*step [\d,]+, which is saved", said), said
    assert "died" not in said
    assert command.survivors() == []


def test_a_signal_does_not_break_a_commands_end():
    ends = (
        "import atexit, os, signal, sys\n"
        "from flows.cli.command import ending\n"
        "def end():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('its end', flush=True)\n"
        "    if sys.argv[1:]:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('deaf', flush=True)\n"
        "atexit.register(end)\n"
        "with ending():\n    pass\n"
    )
    for arguments, returned in (([], 0), (["twice"], -signal.SIGTERM)):
        command = [sys.executable, "-c", ends, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (ended.stdout, ended.returncode) == ("its end\n", returned), ended.stderr
        assert "Traceback" not in ended.stderr

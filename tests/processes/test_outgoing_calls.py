"""A run asks nobody outside of this machine for anything: no telemetry, no look for a newer version."""

import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Python imports a module of this name when it starts: in the command and in each process that it starts.
NOTE = """
import os, sys

def note(event, args, of={"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}):
    if event in of:
        with open(os.environ["CALLS"], "a") as file:
            print(args[of[event]], file=file)

sys.addaudithook(note)
"""


def test_a_whole_run_calls_nobody_outside_of_the_machine(project, run, tmp_path):
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(NOTE)
    calls = tmp_path / "calls"
    path = os.pathsep.join([str(tmp_path / "hook"), str(project)])
    ended = run(
        ["stratagem", "run", "--set", "dataset.name=digits", "--set", "train.epochs=1", "--set", "model.name=mlp"],
        env={"PYTHONPATH": path, "CALLS": str(calls)},
    )
    assert ended.returncode == 0, ended.stderr
    asked = calls.read_text().splitlines()
    # Its own Prefect server is asked; so calls are noted, and no others is no accident.
    assert any("127.0.0.1" in address for address in asked)
    assert [address for address in asked if not address.startswith(("('127.0.0.1'", "127.0.0.1", "/"))] == []

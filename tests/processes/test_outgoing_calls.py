"""A run asks nobody outside of this machine for anything: no telemetry, no look for a newer version. It needs none."""

import os

import pytest

from tasks.strategies.engines import isolation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Python imports a module of this name when it starts: in the command and in each process that it starts.
NOTE = """
import os, sys

def note(event, args, of={"socket.connect": 1, "socket.sendto": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}):
    if event in of:
        with open(os.environ["CALLS"], "a") as file:
            print(args[of[event]], file=file)

sys.addaudithook(note)
"""
# Becomes a command in a network with nothing but 127.0.0.1 in it: what calls outside, from C++ too, fails there.
ALONE = """
import os, sys
from tasks.strategies.engines import isolation

network = isolation.make()
for descriptor in network.descriptors:
    os.set_inheritable(descriptor, True)
command = network.command(sys.argv[1:])
os.execvp(command[0], command)
"""


def test_a_whole_run_calls_nobody_outside_of_the_machine(project, run, tmp_path):
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(NOTE)
    calls = tmp_path / "calls"
    path = os.pathsep.join([str(tmp_path / "hook"), str(project)])
    command = ["stratagem", "run", "--set", "dataset.name=digits", "--set", "train.epochs=1", "--set", "model.name=mlp"]
    refused = None
    try:
        isolation.make().close()
    except OSError as error:
        refused = str(error)
    else:
        command = ["python", "-c", ALONE, *command]
    ended = run(command, env={"PYTHONPATH": path, "CALLS": str(calls)})
    assert ended.returncode == 0, ended.stderr
    asked = calls.read_text().splitlines()
    # Its own Prefect server is asked; so calls are noted, and no others is no accident.
    assert any("127.0.0.1" in address for address in asked)
    assert [address for address in asked if not address.startswith(("('127.0.0.1'", "127.0.0.1", "/"))] == []
    if refused is not None:
        pytest.skip(f"no call was made, but with a network: {refused}")

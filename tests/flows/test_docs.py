"""The commands of README.md, as they stand there."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def block_after(heading: str, language: str) -> str:
    """Return the first block of code in a language under a heading."""
    under = README.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(rf"^```{language}\n(.*?)^```$", under, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.slow
def test_the_schedule_of_the_readme_runs_as_it_stands(prepared_project, tmp_path):
    try:
        socket.create_server(("127.0.0.1", 4200)).close()
    except OSError:
        pytest.skip("port 4200, which the block names, is in use")
    block = block_after("On a schedule", "sh") + "\ncurl --silent $PREFECT_API_URL/deployments/filter --json '{}'\n"
    log = (tmp_path / "log").open("w+")
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block],
        env=os.environ | {"PREFECT_HOME": str(tmp_path / "home")},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = shell.wait(500)
    finally:
        os.killpg(shell.pid, signal.SIGTERM)  # The server and the worker, which stay in the background.
    log.seek(0)
    said = log.read()
    log.close()
    assert code == 0, said
    assert "Completed" in said
    assert said.rstrip().endswith('{"exception_message":"Unauthorized"}'), "who has no password"
    assert list(prepared_project.glob("mlruns/runs/*/summary.json"))

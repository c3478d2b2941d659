"""`python -m tasks STAGE` in a process of its own, until it ends."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tasks import config, errors
from tasks.process import guard, scratch
from tasks.process.environment import stage_environment


def run_in_own_process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a stage; its standard output is in what is returned.

    Raises:
        StratagemError: the stage's own error.
    """
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder, guard.held_open() as stdin:
        problem = Path(folder) / "error"
        done = subprocess.run(
            [sys.executable, "-m", "tasks", *arguments],
            check=False,
            cwd=config.project_root(),
            env={**stage_environment(None), "STRATAGEM_ERROR": str(problem)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
        )
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
    return done

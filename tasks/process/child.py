"""`python -m tasks STAGE` in a process of its own, until it ends."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tasks import config
from tasks.process.environment import stage_environment
from tasks.system import errors, lifetime, temporary

END_SECONDS = 40.0
"""After so long a server that was told to end is killed."""


def run_in_own_process(
    *arguments: str, pass_fds: Collection[int] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a stage; its standard output is in what is returned.

    Args:
        arguments: the stage and what it takes.
        pass_fds: descriptors that it has, too, by the same numbers.
        environment: what of its environment is another one than this process'.

    Raises:
        StratagemError: the stage's own error.
    """
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder, lifetime.held_open() as stdin:
        problem = Path(folder) / "error"
        done = subprocess.run(
            [sys.executable, "-m", "tasks", *arguments],
            check=False,
            cwd=config.project_root(),
            env={**stage_environment(None), **(environment or {}), "STRATAGEM_ERROR": str(problem)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
    return done


@contextlib.contextmanager
def serving(*arguments: str, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a stage that serves until it is told to end; what it says on standard output can be read meanwhile.

    It is told by SIGTERM when the block ends, and answers what it was asked before; it ends with this process, however
    that dies. Ctrl-C reaches this process alone.

    Args:
        arguments: the stage and what it takes.
        environment: what it has beside that of each stage.

    Raises:
        StratagemError: the stage's own error, when the block ends.
    """
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder, lifetime.held_open() as stdin:
        problem = Path(folder) / "error"
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks", *arguments],
            cwd=config.project_root(),
            env={**stage_environment(None), "STRATAGEM_ERROR": str(problem), **environment},
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        with process:
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))

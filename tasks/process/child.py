"""Child processes that a command starts for one thing: a stage of `python -m tasks`, DVC, or `stratagem` elsewhere.

Each ends with this process, however that dies, and what it refuses is raised here as its own error.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tasks import config
from tasks.process.environment import stage_environment
from tasks.system import errors, lifetime, temporary
from tasks.system.errors import StratagemError, UserError

END_SECONDS = 40.0
"""A server that was told to end is killed after so long."""
COMMAND = "from flows.cli.main import main; main()"


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: "int | IO[str]" = subprocess.PIPE,
    pass_fds: Collection[int] = (),
    own_group: bool = True,
) -> Iterator["subprocess.Popen[str]"]:
    """Start a process in the project's folder, and wait for its end when the block ends.

    Args:
        command: of Python, without the interpreter.
        environment: in addition to that of each stage.
        stdout: where its standard output goes.
        pass_fds: descriptors that it inherits, under the same numbers.
        own_group: Ctrl-C does not reach it.

    Raises:
        StratagemError: the error that it left in the file STRATAGEM_ERROR.
    """
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder, lifetime.held_open() as stdin:
        problem = Path(folder) / "error"
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=config.project_root(),
            env={**stage_environment(None), **environment, "STRATAGEM_ERROR": str(problem)},
            stdin=stdin,
            stdout=stdout,
            text=True,
            pass_fds=pass_fds,
            process_group=0 if own_group else None,
        ) as process:
            yield process
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))


def run_stage(*arguments: str, pass_fds: Collection[int] = (), environment: Mapping[str, str] | None = None) -> str:
    """Run a stage of `python -m tasks` to its end; return its standard output.

    Args:
        arguments: the stage and its own arguments.
        pass_fds: descriptors that it inherits, under the same numbers.
        environment: in addition to that of each stage.

    Raises:
        StratagemError: the stage's own error; or it died.
        BrokenPipeError: nobody reads what it writes any more.
    """
    command = ["-m", "tasks", *arguments]
    with started(command, environment or {}, pass_fds=pass_fds, own_group=False) as process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode == 128 + signal.SIGPIPE:
        raise BrokenPipeError
    if process.returncode:
        raise StratagemError(f"the process of `{arguments[0]}` ended with exit code {process.returncode}")
    return out


@contextlib.contextmanager
def serving(*arguments: str, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a stage that serves until the block ends; its standard output can be read in the block.

    SIGTERM ends it, after it has answered what it was asked. Ctrl-C reaches this process only.

    Args:
        arguments: the stage and its own arguments.
        environment: in addition to that of each stage.

    Raises:
        StratagemError: the stage's own error, when the block ends.
    """
    with started(["-m", "tasks", *arguments], environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def run_command(arguments: Sequence[str], folder: Path) -> str:
    """Run `stratagem` with the code in a folder, there, to its end; return its standard output.

    It ends as if by Ctrl-C when this process is interrupted or dies.

    Raises:
        UserError: it refused what it was asked for.
        StratagemError: it failed. Its own message has gone to standard error.
    """
    guarded = [sys.executable, "-m", "tasks", "guard", sys.executable, "-c", COMMAND, *arguments]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    child: subprocess.Popen[str] | None = None
    try:
        with lifetime.held_open() as stdin:
            child = subprocess.Popen(
                guarded,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=stdin,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C reaches this process, which passes it on by closing the standard input.
            )
            out, _ = child.communicate()
    except BaseException:
        if child is not None:
            child.wait()
        raise
    if child.returncode:
        said = f"`stratagem {arguments[0]}` with the code of that commit ended with exit code {child.returncode}"
        raise (UserError if child.returncode == UserError.exit_code else StratagemError)(f"{said}, see above")
    return out

"""A command of another checkout of the project, with that one's code."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.system.errors import StratagemError, UserError
from tasks.system.lifetime import held_open

COMMAND = "from flows.cli.main import main; main()"


def run_command(arguments: Sequence[str], folder: Path) -> str:
    """Run `stratagem` of the code in a folder, there, to its end; return what it printed to standard output.

    It ends, as Ctrl-C ends it, when this process is interrupted or dies.

    Raises:
        UserError: it refused what it was asked for.
        StratagemError: it failed. What it says about that has gone to standard error.
    """
    guarded = [sys.executable, "-m", "tasks", "guard", sys.executable, "-c", COMMAND, *arguments]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    child: subprocess.Popen[str] | None = None
    try:
        with held_open() as stdin:
            child = subprocess.Popen(
                guarded,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=stdin,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C comes to this process, which tells it by closing its standard input.
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

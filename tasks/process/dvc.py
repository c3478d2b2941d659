"""DVC at work: in processes of their own, one after the other; what a stage of it refuses comes through as an error."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from tasks.process import dvc_cache
from tasks.process.environment import stage_environment
from tasks.system import errors, temporary
from tasks.system.errors import StratagemError, UserError
from tasks.system.lifetime import held_open

BUSY_SECONDS = 600.0


def lock(root: Path, timeout: float) -> FileLock:
    """Return the lock that each command which lets DVC work in a project holds meanwhile.

    Raises:
        UserError: .dvc/tmp cannot be written.
    """
    state = root / ".dvc" / "tmp"
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{state} cannot be written ({error}): make the project's folder writable") from None
    return FileLock(state / "stratagem.lock", timeout=timeout)


def let(
    action: str, targets: Sequence[str], root: Path, options: Iterable[str] = (), more: Mapping[str, str] | None = None
) -> None:
    """Let DVC do something, see ``process.repro``.

    Args:
        action: ``repro``, ``push`` or ``pull``.
        targets: files of stages, or stages in them, from the project's folder.
        root: the project's folder.
        options: before the action.
        more: of the stages' environment.

    Raises:
        UserError: what a stage refused, or .dvc/tmp cannot be written.
        StratagemError: a stage failed, DVC died, or another command was preparing data for too long.
    """
    dvc_cache.configure()
    mine = lock(root, BUSY_SECONDS)
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder:
        problem = Path(folder) / "error"
        environment = {**stage_environment(None), **(more or {}), "STRATAGEM_ERROR": str(problem)}
        command = [sys.executable, "-m", "tasks.process.dvc_program", *options, action, *targets]
        try:
            # DVC refuses at once when another of its commands runs; a second flow waits here instead.
            with mine:
                code = _run(command, environment, root)
        except Timeout:
            raise StratagemError(
                "another run has been preparing data for ten minutes: wait for it, then run again"
            ) from None
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        if code != 0:
            raise StratagemError(
                f"{', '.join(targets)}: the process in which DVC works died (exit code {code}): run again"
            )


def _run(command: list[str], environment: dict[str, str], root: Path) -> int:
    """Run DVC in a process of its own, and return its exit code; its stage ends when this process does."""
    with held_open() as stdin:
        child = subprocess.Popen(command, cwd=root, env=environment, stdin=stdin, stdout=sys.stderr, process_group=0)
        try:
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise


def is_up_to_date(target: str, root: Path) -> bool:
    """Return whether DVC finds a stage, and all that it depends on, to be done; nothing is made."""
    dvc_cache.configure()
    with held_open() as stdin:
        looked = subprocess.run(
            [sys.executable, "-m", "dvc", "status", "--quiet", "--with-deps", target],
            check=False,
            cwd=root,
            env=stage_environment(None),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return looked.returncode == 0

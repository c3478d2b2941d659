"""Starts every process of a command: a stage of `python -m tasks`, DVC, a member of a cluster, `stratagem` elsewhere.

Each ends when this process dies, because its standard input closes then. Its errors are raised here as their own
classes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tasks import config
from tasks.process.environment import stage_environment
from tasks.system import errors, lifetime, temporary
from tasks.system.errors import StratagemError, UserError

END_SECONDS = 40.0
"""How long a server may take to end before it is killed."""
READER_SECONDS = 1.0
COMMAND = "from flows.cli.main import main; main()"

Message = dict[str, Any]


class Child:
    """A process on this machine, which may read and write JSON lines."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        stdout: "int | IO[str]" = subprocess.PIPE,
        log: Path | None = None,
        pass_fds: Collection[int] = (),
        own_group: bool = True,
    ) -> None:
        """Start the process.

        Args:
            command: the program and its arguments.
            environment: its whole environment.
            folder: its working folder; by default the project's.
            stdout: where its standard output goes.
            log: for its standard error, which otherwise goes to that of this process.
            pass_fds: descriptors that it inherits, under the same numbers.
            own_group: Ctrl-C reaches this process alone, which passes it on once.
        """
        with contextlib.ExitStack() as files:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=files.enter_context(log.open("ab")) if log is not None else None,
                cwd=folder or config.project_root(),
                env=environment,
                text=True,
                pass_fds=pass_fds,
                process_group=0 if own_group else None,
            )
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def output(self) -> IO[str]:
        """Its standard output, if that is a pipe."""
        if self._process.stdout is None:
            raise ValueError("its standard output goes elsewhere")
        return self._process.stdout

    @property
    def death(self) -> str:
        """How the process ended; waits for that."""
        code = self.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory that the process has had; 0 where the kernel does not say."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def send(self, message: Message) -> None:
        """Send a JSON line; if the process has died, do nothing, as the end of its messages tells that."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()

    def messages(self) -> Iterator[Message]:
        """Yield its JSON lines until it closes its standard output."""
        for line in self.output:
            with contextlib.suppress(ValueError):  # A process that is killed leaves half a line.
                yield json.loads(line)

    def listen(self, take: Callable[[Message | None], object]) -> None:
        """Call ``take`` with each of its messages, and with None at their end, in a thread."""

        def read() -> None:
            with self.output:
                for message in self.messages():
                    take(message)
            take(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def interrupt(self) -> None:
        """Stop the running stage."""
        self._process.send_signal(signal.SIGINT)

    def terminate_group(self) -> None:
        """Tell the process, and those that it started, to end."""
        os.killpg(self.pid, signal.SIGTERM)

    def kill_unawaited(self) -> None:
        """End the process at once."""
        self._process.kill()

    def kill(self) -> None:
        """End the process at once, even a stopped one, and wait for it."""
        self._process.kill()
        self.close()

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, negative for a signal."""
        return self._process.wait()

    def close_input(self) -> None:
        """Close its standard input: a process of this project ends then."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # The process has died before it read a request.
                self._process.stdin.close()

    def close(self, seconds: float = lifetime.GRACE_SECONDS) -> None:
        """End the process by closing its standard input, and wait for it; kill it after some seconds."""
        self.close_input()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join(READER_SECONDS)  # A grandchild that was forked can hold the pipe open for longer.
        elif self._process.stdout is not None:
            self._process.stdout.close()

    def terminate(self, seconds: float) -> None:
        """End the process by SIGTERM, and wait for it; kill it after some seconds."""
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()


def stage_command(*arguments: str) -> list[str]:
    """Return the command of a stage of `python -m tasks`."""
    return [sys.executable, "-m", "tasks", *arguments]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: "int | IO[str]" = subprocess.PIPE,
    pass_fds: Collection[int] = (),
    own_group: bool = True,
) -> Iterator[Child]:
    """Start a process in the project's folder, and wait for its end when the block ends.

    Args:
        command: with its program.
        environment: in addition to that of each stage.
        stdout: where its standard output goes.
        pass_fds: descriptors that it inherits, under the same numbers.
        own_group: Ctrl-C does not reach it.

    Raises:
        StratagemError: the error that it left in the file STRATAGEM_ERROR.
    """
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder:
        problem = Path(folder) / "error"
        everything = {**stage_environment(None), **environment, "STRATAGEM_ERROR": str(problem)}
        child = Child(command, everything, stdout=stdout, pass_fds=pass_fds, own_group=own_group)
        try:
            yield child
        finally:
            child.wait()
            child.close()
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
    with started(stage_command(*arguments), environment or {}, pass_fds=pass_fds, own_group=False) as child:
        try:
            with child.output as output:
                out = output.read()
            code = child.wait()
        except BaseException:
            child.kill_unawaited()
            raise
    if code == 128 + signal.SIGPIPE:
        raise BrokenPipeError
    if code:
        raise StratagemError(f"the process of `{arguments[0]}` ended with exit code {code}")
    return out


@contextlib.contextmanager
def serving(*arguments: str, environment: Mapping[str, str]) -> Iterator[Child]:
    """Run a stage that serves until the block ends; its standard output can be read in the block.

    SIGTERM ends it, after it has answered what it was asked. Ctrl-C reaches this process only.

    Args:
        arguments: the stage and its own arguments.
        environment: in addition to that of each stage.

    Raises:
        StratagemError: the stage's own error, when the block ends.
    """
    with started(stage_command(*arguments), environment) as child, contextlib.closing(child.output):
        try:
            yield child
        finally:
            child.terminate(END_SECONDS)


def run_command(arguments: Sequence[str], folder: Path) -> str:
    """Run `stratagem` with the code in a folder, there, to its end; return its standard output.

    It ends as if by Ctrl-C when this process is interrupted or dies.

    Raises:
        UserError: it refused what it was asked for.
        StratagemError: it failed. Its own message has gone to standard error.
    """
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    guarded = stage_command("guard", sys.executable, "-c", COMMAND, *arguments)
    child = Child(guarded, {**os.environ, "PYTHONPATH": path}, folder=folder)
    try:
        with child.output as output:
            out = output.read()
    finally:
        child.close_input()
        code = child.wait()
    if code:
        said = f"`stratagem {arguments[0]}` with the code of that commit ended with exit code {code}"
        raise (UserError if code == UserError.exit_code else StratagemError)(f"{said}, see above")
    return out

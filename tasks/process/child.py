"""Starts every process of a command: a stage of `python -m tasks`, DVC, a member of a cluster, `stratagem` elsewhere.

Each child ends when this process dies, because its standard input then closes. This process raises a child's errors
again, with the same classes.
"""

import contextlib
import getpass
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter

from tasks import config
from tasks.system import errors, lifetime, network, temporary
from tasks.system.errors import ProcessDied, StratagemError, UserError

if TYPE_CHECKING:
    from tasks.process.stages import Output, Stage

END_SECONDS = 40.0
"""The time that a server has to end before this process kills it."""
READER_SECONDS = 1.0
COMMAND = "from flows.cli.main import main; main()"
# With fewer threads than devices that wait for each other, JAX aborts the process after 40 s.
MIN_JAX_THREADS = 32

Message = dict[str, Any]


class Child(subprocess.Popen[str]):
    """A process on this machine, which may read and write JSON lines."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        """Start the process.

        Args:
            command: the program and its arguments.
            environment: its complete environment.
            options: options of ``subprocess.Popen``. By default the child works in the project's folder, writes to a
                pipe, and has its own process group: Ctrl-C reaches only this process, which forwards it once.
        """
        defaults = {"cwd": config.project_root(), "stdout": subprocess.PIPE, "process_group": 0}
        super().__init__(command, stdin=subprocess.PIPE, env=environment, text=True, **{**defaults, **options})
        self._reader: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.poll() is None

    @property
    def output(self) -> IO[str]:
        """Its standard output, if that is a pipe."""
        if self.stdout is None:
            raise ValueError("its standard output goes elsewhere")
        return self.stdout

    @property
    def death(self) -> str:
        """How the process ended; wait until it has."""
        code = self.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @property
    def peak_memory_bytes(self) -> int:
        """The peak memory of the process; 0 if the kernel does not report it."""
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    def send(self, message: Message) -> None:
        """Send a JSON line; do nothing if the process has died, which the end of its messages shows."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(json.dumps(message) + "\n")
                self.stdin.flush()

    def messages(self) -> Iterator[Message]:
        """Yield its JSON lines until it closes its standard output."""
        for line in self.output:
            with contextlib.suppress(ValueError):  # A process that is killed leaves half a line.
                yield json.loads(line)

    def listen(self, take: Callable[[Message | None], object]) -> None:
        """In a thread, call ``take`` with each of its messages, and with None at their end."""

        def read() -> None:
            with self.output:
                for message in self.messages():
                    take(message)
            take(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """End the process at once, even a stopped one, and wait for it."""
        super().kill()
        self.close()

    def close_input(self) -> None:
        """Close its standard input, which ends a process of this project."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # The process has died before it read a request.
                self.stdin.close()

    def close(self, seconds: float | None = lifetime.GRACE_SECONDS) -> None:
        """Close its standard input and wait until the process ends; kill it after ``seconds``, if given."""
        self.close_input()
        self._end_within(seconds)
        if self._reader is not None:
            self._reader.join(READER_SECONDS)  # A grandchild that was forked can hold the pipe open for longer.
        elif self.stdout is not None:
            self.stdout.close()

    def terminate_group(self) -> None:
        """Send SIGTERM to the process and its children, and wait for it; kill it if it takes too long."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        self._end_within(END_SECONDS)

    def _end_within(self, seconds: float | None) -> None:
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            super().kill()
            self.wait()


def keep_private() -> None:
    """Hide this process' files from other users, and move passwords out of the addresses in its environment; name its
    user if it has no name, and bypass proxies for servers on this machine.

    `chmod g+ws mlruns` shares mlruns/ with a team: its group may then read and write.
    """
    shared = False
    with contextlib.suppress(UserError, OSError):
        mode = (config.project_root() / "mlruns").stat().st_mode
        shared = bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)
    os.umask(0o007 if shared else 0o077)
    network.separate_credentials(os.environ)
    network.keep_proxies_out(os.environ)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # DVC needs a name, which a user in a container may not have.
        os.environ["LOGNAME"] = f"user{os.getuid()}"


def show_tracebacks() -> None:
    """Make processes that start from now on show their tracebacks."""
    os.environ["STRATAGEM_DEBUG"] = "1"


def stage_environment(settings: config.Settings | None) -> dict[str, str]:
    """Return the environment of a process that runs stages with these settings."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "JAX_PLATFORMS": "cpu",  # TensorFlow imports JAX, which would take the GPU's memory from TensorFlow.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default MLflow's client tries for minutes if a server hangs.
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        # A retry after a lost reply would create a second run for the same training. tracking/ checks first.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_LOGGING_LEVEL": os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING"),
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "DO_NOT_TRACK": "1",
        "TMPDIR": str(temporary.folder()),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # Stages do not need these, least of all a key; the stage process starts before they are set.
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        environment.pop(name, None)
    environment.pop("STRATAGEM_ERROR", None)  # The file for the error of this process.
    environment.pop("TF_CONFIG", None)  # The launcher defines the members of a cluster.
    environment.pop("PYTHONWARNINGS", None)  # As errors, Keras' own warnings would end each training.
    if settings is not None:
        environment |= settings.strategy.environment
        if settings.strategy.backend == "jax":
            environment |= _jax_environment(settings)
    return environment


def _jax_environment(settings: config.Settings) -> dict[str, str]:
    """Return the variables that make Keras run on JAX, which can create CPU devices only when a process starts."""
    wanted = settings.strategy.wanted_devices
    named = wanted if isinstance(wanted, list) else []
    on_cpu = [int(name.removeprefix("cpu:")) for name in named if name.startswith("cpu:")]
    count = wanted if isinstance(wanted, int) else max(on_cpu, default=-1) + 1
    environment = {
        "KERAS_BACKEND": "jax",
        # The accelerators of this machine, unless the user wants none.
        "JAX_PLATFORMS": "cpu" if on_cpu and len(on_cpu) == len(named) else os.environ.get("JAX_PLATFORMS", ""),
        "NPROC": str(max(MIN_JAX_THREADS, 4 * count)),
    }
    flags = [f"--xla_force_host_platform_device_count={count}"] if count else []
    if settings.train.deterministic:
        flags.append("--xla_gpu_deterministic_ops=true")
    if flags:
        environment["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    if settings.train.dtype_policy == "float64":
        environment["JAX_ENABLE_X64"] = "1"
    return environment


def stage_command(*arguments: str) -> list[str]:
    """Return the command of a stage of `python -m tasks`."""
    return [sys.executable, "-m", "tasks", *arguments]


def guarded(command: Sequence[str]) -> list[str]:
    """Return a command that ends, with all its children, when its standard input closes."""
    return [sys.executable, "-m", "tasks.system.lifetime", *command]


def call(
    row: "Stage[..., Output]",
    given: Message,
    tell: Callable[[Message], object] = lambda message: None,
    key: str | None = None,
) -> "Output":
    """Run a row of the table of stages in a separate process, and return its result.

    Args:
        row: the row.
        given: its arguments, by name: records and JSON values.
        tell: called with each message before the answer.
        key: the key of a server, which the process gets as STRATAGEM_KEY.

    Raises:
        StratagemError: the call failed.
        ProcessDied: its process died.
        BrokenPipeError: the reader of its output has closed the pipe.
    """
    # It inherits the descriptors that the caller made inheritable.
    group = 0 if row.ends_itself else None
    environment = stage_environment(None) | ({"STRATAGEM_KEY": key} if key is not None else {})
    child = Child(stage_command("call"), environment, process_group=group, close_fds=False)
    try:
        child.send({"id": 0, "stage": row.name, "arguments": to_json(given)})
        answer = None
        for answer in child.messages():
            if "id" not in answer:
                tell(answer)
    except BaseException:
        if row.ends_itself:
            child.terminate_group()
        child.kill()
        raise
    child.close()
    if answer is None or "id" not in answer:
        raise ProcessDied(f"the process of `{row.name}` ended with {child.death}")
    if "error" not in answer:
        found: Output = TypeAdapter(row.output).validate_python(answer["record"])
        return found
    if answer.get("cause") == BrokenPipeError.__name__:
        raise BrokenPipeError
    raise errors.from_json(answer)


def to_json(arguments: Message) -> Message:
    """Return the arguments of a row as JSON values."""
    return {name: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for name, v in arguments.items()}


def run_command(arguments: Sequence[str], folder: Path) -> str:
    """Run `stratagem` in a folder, with the code there, and return its standard output.

    It ends as after Ctrl-C when this process is interrupted or dies.

    Raises:
        UserError: the command refused its arguments.
        StratagemError: the command failed. Its message went to standard error.
    """
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = guarded([sys.executable, "-c", COMMAND, *arguments])
    child = Child(command, {**os.environ, "PYTHONPATH": path}, cwd=folder)
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

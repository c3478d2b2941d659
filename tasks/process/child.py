"""The environment and the commands of `python -m tasks`; calls of a single stage, and of `stratagem` in another folder.

A child's errors are raised again in this process, with the same classes.
"""

import contextlib
import getpass
import io
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter

from tasks import config
from tasks.system import errors, network, temporary
from tasks.system.child import Child, Message
from tasks.system.errors import ProcessDied, StratagemError, UserError

if TYPE_CHECKING:
    from tasks.process.stages import Output, Stage

COMMAND = "from flows.cli.main import main; main()"
# With fewer threads than devices that wait for each other, JAX aborts the process after 40 s.
MIN_JAX_THREADS = 32


class StandardError(io.TextIOWrapper):
    """Standard error that stays silent once nobody reads it: with `2>&1 | head`, a print would end the training."""

    def __init__(self, descriptor: int = 2) -> None:
        binary = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        super().__init__(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            super().flush()


def set_up_process() -> None:
    """Make this process's files private, move passwords out of the addresses in its environment, bypass proxies for
    servers on this machine, name its user if it has no name, and let it continue if nobody reads its standard error.

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
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardError()


def stage_environment(settings: config.Settings | None) -> dict[str, str]:
    """Return the environment of a process that runs stages with these settings."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "JAX_PLATFORMS": "cpu",  # TensorFlow imports JAX, which would take the GPU's memory from TensorFlow.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default, MLflow's client retries for minutes if a server hangs.
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
    # Stages do not need these, and one is a key; the stage process starts before they are set.
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        environment.pop(name, None)
    environment.pop("STRATAGEM_ERROR", None)  # The file for this process's own error.
    environment.pop("TF_CONFIG", None)  # The launcher defines the members of a cluster.
    environment.pop("PYTHONWARNINGS", None)  # If warnings are errors, those of Keras end each training.
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
    """Return a command that ends with all its children when its standard input closes."""
    return [sys.executable, "-m", "tasks.system.lifetime", *command]


def call(row: "Stage[..., Output]", given: Message) -> "Output":
    """Run a row of the table of stages in a separate process, and return its result.

    Args:
        row: the row.
        given: its arguments, by name: records and JSON values; and ``tell``, if the function has this argument, which
            is called here with each message before the answer.

    Raises:
        StratagemError: the call failed.
        ProcessDied: its process died.
        BrokenPipeError: the reader of its output has closed the pipe.
    """
    group = 0 if row.ends_itself else None
    tell = given.pop("tell", None)
    # With close_fds=False, it inherits the descriptors that the caller made inheritable.
    child = Child(
        stage_command("call"), stage_environment(None), cwd=config.project_root(), process_group=group, close_fds=False
    )
    try:
        child.send({"id": 0, "stage": row.name, "arguments": to_json(given)})
        answer = None
        for answer in child.messages():
            if "id" not in answer and tell is not None:
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

    If this process is interrupted or dies, the command ends as after Ctrl-C.

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

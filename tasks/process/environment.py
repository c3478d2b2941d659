"""The environment of a child process, complete before it imports a framework."""

import contextlib
import getpass
import os
import stat
import sys
from pathlib import Path

from tasks import config
from tasks.system import network, temporary
from tasks.system.errors import UserError

# With fewer threads than devices that wait for each other, JAX aborts the process after 40 s.
MIN_JAX_THREADS = 32


def keep_private() -> None:
    """Let no other user read what this process writes, and take the passwords out of the addresses in its environment;
    let this process' user have a name, and let no proxy stand before the servers on this machine.

    A team that shares mlruns/ says so with `chmod g+ws mlruns`: then the group may read and write.
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
    except (KeyError, OSError):  # A container's users need no name, and DVC wants one.
        os.environ["LOGNAME"] = f"user{os.getuid()}"


def show_tracebacks() -> None:
    """Let the processes that are started from now on show tracebacks of their own."""
    os.environ["STRATAGEM_DEBUG"] = "1"


def stage_environment(settings: config.Settings | None) -> dict[str, str]:
    """Return the environment of a process that runs stages with these settings."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "JAX_PLATFORMS": "cpu",  # TensorFlow imports JAX, which would take the GPU's memory from TensorFlow.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default MLflow's client tries for minutes where a server hangs.
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        # It would send a request again of which the reply was lost: two runs of one training. tracking/ looks first.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_LOGGING_LEVEL": os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING"),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "DO_NOT_TRACK": "1",
        "TMPDIR": str(temporary.folder()),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # Set only after the stage process was started, and no stage's business: a key least of all.
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"):
        environment.pop(name, None)
    environment.pop("STRATAGEM_ERROR", None)  # The file for the error of this process.
    environment.pop("TF_CONFIG", None)  # A launcher says who is a member of a cluster.
    environment.pop("PYTHONWARNINGS", None)  # As errors, Keras' own warnings would end each training.
    if settings is not None:
        environment |= settings.strategy.environment
        if settings.strategy.backend == "jax":
            environment |= _jax_environment(settings)
    return environment


def _jax_environment(settings: config.Settings) -> dict[str, str]:
    """Return what makes Keras run on JAX; CPU devices can be made only when a process starts."""
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

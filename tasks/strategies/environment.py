"""The command and the environment of our processes: Keras' backend, JAX's devices, MLflow's client, TMPDIR and PATH."""

import os
import sys
from pathlib import Path

from tasks import config
from tasks.system import temporary

# With fewer threads than devices that wait for each other, JAX aborts the process after 40 s.
MIN_JAX_THREADS = 32


def stage_command(*arguments: str) -> list[str]:
    """Return the command `python -m tasks ARGUMENTS`."""
    return [sys.executable, "-m", "tasks", *arguments]


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
        # A retry after a lost reply would create a second run for the same training: tracking/ first looks for the run.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_LOGGING_LEVEL": os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING"),
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "DO_NOT_TRACK": "1",
        "TMPDIR": str(temporary.folder()),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # Stages do not need these, and two are passwords; the command sets them after the stage process has started.
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

"""What a process may use: this machine's cores, GPUs and ports, and a TPU; and how it imports what takes seconds. No
framework is asked."""

import contextlib
import gc
import os
import platform
import random
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.system import units

if TYPE_CHECKING:
    import psutil

PACKAGES = ("tensorflow", "keras", "jax", "numpy")
"""Whose versions a training's bits depend on."""
MACHINE = ("system", "processor", "cores", "gpus")
"""What of ``surroundings`` is of the machine; the rest is installed on it."""
# Where a container's limit stands, and what it uses: of version 2 of control groups, and of version 1.
MEMORY_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
# The times at which two programs see one process begin differ by a rounding.
SAME_SECONDS = 1.0
OWN_PORTS = range(10_000, 20_000)
TPU_VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")
"""Where a cloud says which TPU is meant, the first that is set."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Let no garbage be collected while the block imports, and let later collections pass over what is there then.

    Python looks through all that was imported again and again, and finds nothing: 1.4 of the 6.9 s of processor time
    that the imports of a stage process took, and 1.3 of the 5.0 s of Prefect's API (medians of seven).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def core_numbers() -> set[int]:
    """Return which processor cores this process may use, counted from 0."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(core_numbers())


def free_memory() -> int:
    """Return how many bytes of memory are free: of this machine's, or of what a container's limit leaves."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max` is not a limit.
            free = min(free, int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii")))
    return free


def visible_gpus() -> list[str]:
    """Return the GPUs that a process started now would see, as CUDA_VISIBLE_DEVICES spells them."""
    count, named = len(_gpu_names()), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not count:
        return [str(index) for index in range(count)]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def gpus_in_words(gpus: Sequence[object]) -> str:
    """Return how many these are, such as ``1 GPU``."""
    return units.count(len(gpus), "GPU")


def surroundings() -> dict[str, str]:
    """Return what the bits of a training depend on beside code, data and settings: versions and hardware by name."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found |= {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        # How a sum is divided among threads decides how it is rounded.
        "cores": str(usable_cores()),
        "gpus": ", ".join(_gpu_names()),
    }
    return {what: text for what, text in found.items() if text}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, text = line.partition(":")
            if name.strip() == "model name":
                return text.strip()
    return platform.processor()


def _gpu_names() -> list[str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetName(device)) for device in devices]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # No driver.
        return []
    return names


def find_tpu(name: str | None) -> str:
    """Return a TPU as ``TPUClusterResolver`` takes it: ``grpc://ADDRESS``, a name in Google Cloud, or ``local``.

    Args:
        name: as the settings give it; None is what the cloud's variables name, or the one of this machine.
    """
    found = name or next((os.environ[variable] for variable in TPU_VARIABLES if os.environ.get(variable)), "local")
    # Colab's variable has no scheme, Kubernetes' may be without one too: a name has no colon.
    return f"grpc://{found}" if ":" in found and not found.startswith("grpc://") else found


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody uses now.

    They lie below those that Linux by default gives to outgoing connections, so that none of these takes one before its
    server starts.
    """
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", random.SystemRandom().choice(OWN_PORTS)))
                sockets.append(one)
            except OSError:  # Somebody uses it.
                one.close()
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def find_process(pid: int, began: float) -> "psutil.Process | None":
    """Return the process with this id, if it is the one that began then."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if pid and abs(process.create_time() - began) < SAME_SECONDS and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def can_write(folder: str) -> bool:
    """Return whether a folder can be written, or made; a user without a home has a path that still begins with ~."""
    while not os.path.exists(folder) and os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return not folder.startswith("~") and os.access(folder, os.W_OK | os.X_OK)

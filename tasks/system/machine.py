"""The resources of a process, found without a framework: cores, memory, GPUs and ports; garbage collection
during imports; processes by their id."""

import contextlib
import gc
import os
import platform
import random
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

PACKAGES = ("tensorflow", "keras", "jax", "numpy")
"""The packages whose versions affect the bits of a training."""
MACHINE = ("system", "processor", "cores", "gpus")
"""The keys of ``surroundings`` that describe the machine; the others name installed software."""
# The files with a container's memory limit and its use: version 2 of control groups, then version 1.
MEMORY_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
OWN_PORTS = range(10_000, 20_000)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while the block imports, and exclude the imported objects from later collections.

    Otherwise Python searches them again and again without finding garbage: this took 1.4 of the 6.9 s of processor time
    for the imports of a stage process, and 1.3 of the 5.0 s for Prefect's API (medians of seven).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def core_numbers() -> set[int]:
    """Return the numbers of the processor cores that this process may use, counted from 0."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(core_numbers())


def free_memory() -> int:
    """Return how many bytes of memory are free on this machine, or within a container's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max` is not a limit.
            free = min(free, int(Path(limit).read_text("ascii")) - int(Path(used).read_text("ascii")))
    return free


def visible_gpus() -> list[str]:
    """Return the GPUs that a new process would see, as CUDA_VISIBLE_DEVICES spells them."""
    count, named = len(_gpu_names()), os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not count:
        return [str(index) for index in range(count)]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def surroundings() -> dict[str, str]:
    """Return what affects the bits of a training besides code, data and settings: versions and hardware, by name."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found |= {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        # The division of a sum among threads affects its rounding.
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


def free_ports(count: int) -> list[int]:
    """Return unused ports of 127.0.0.1, below those that Linux assigns to outgoing connections by default: otherwise a
    connection could take a port before its server starts."""
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        while len(ports) < count:
            port = random.SystemRandom().choice(OWN_PORTS)
            with contextlib.suppress(OSError):  # The port is in use.
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def find_process(pid: int, began: float) -> "psutil.Process | None":
    """Return the process with this id, None if it did not begin at this time or has ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        # Programs round the start time of a process differently.
        if pid and abs(process.create_time() - began) < 1.0 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def can_write(folder: str) -> bool:
    """Return whether a folder is writable or can be created. A path that still begins with ~ is of a user without a
    home."""
    while not os.path.exists(folder) and os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return not folder.startswith("~") and os.access(folder, os.W_OK | os.X_OK)

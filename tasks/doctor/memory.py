"""The memory that a run may use."""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from tasks.doctor._here import GIB, Found, Here, size
from tasks.records import Level

# A run on the digits takes 1.9 GiB with its server, of which 0.9 GiB is TensorFlow.
LEAST_BYTES, USUAL_BYTES = 1 * GIB, 3 * GIB
# Where a container's limit stands, and what it uses: of version 2 of control groups, and of version 1.
LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
# A limit in bytes of addresses: TensorFlow maps far more than it uses.
ADDRESSES = 16 * GIB


def look(here: Here) -> Iterator[Found]:
    """Yield how much is free, and limits that end a run."""
    memory = psutil.virtual_memory()
    free, where = memory.available, f"of {size(memory.total)}"
    for limit, used in LIMITS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # `max` is no limit.
            continue
        if left < free:
            free, where = left, "that this container may use"
    text = f"{size(free)} free {where}"
    if free < USUAL_BYTES:
        level: Level = "error" if free < LEAST_BYTES else "warning"
        why = "a run does not fit" if level == "error" else "a run may not fit"
        yield Found(
            level, f"{text}: {why}", "end other programs (ps aux --sort -rss | head), or give the container more"
        )
    else:
        yield Found("ok", text)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < ADDRESSES:
        yield Found("error", f"a process may map {size(soft)} alone, and TensorFlow maps more", "ulimit -v unlimited")

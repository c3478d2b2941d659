"""The memory that a run may use."""

import resource
from collections.abc import Iterator

import psutil

from tasks.operations.doctor import GIB, Here, Remark, size
from tasks.records import Level
from tasks.system import machine

# A run on the digits takes 1.9 GiB with its server, of which 0.9 GiB is TensorFlow.
LEAST_BYTES, USUAL_BYTES = 1 * GIB, 3 * GIB
# A limit in bytes of addresses: TensorFlow maps far more than it uses.
ADDRESSES = 16 * GIB


def look(here: Here) -> Iterator[Remark]:
    """Yield how much is free, and limits that end a run."""
    free = machine.free_memory()
    memory = psutil.virtual_memory()
    where = f"of {size(memory.total)}" if free >= memory.available else "that this container may use"
    text = f"{size(free)} free {where}"
    if free < USUAL_BYTES:
        level: Level = "error" if free < LEAST_BYTES else "warning"
        why = "a run does not fit" if level == "error" else "a run may not fit"
        yield Remark(
            level, f"{text}: {why}", "end other programs (ps aux --sort -rss | head), or give the container more"
        )
    else:
        yield Remark("ok", text)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < ADDRESSES:
        yield Remark("error", f"a process may map {size(soft)} alone, and TensorFlow maps more", "ulimit -v unlimited")

"""Several processes that run one program on JAX: how they connect and communicate, and which part of a batch each
process reads."""

import json
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tasks import config
from tasks.strategies import tasks_of
from tasks.system import upstream
from tasks.system.errors import UserError

WAIT_SECONDS = 86_400
"""How long a process waits for the other members, which someone else may still have to start."""
LATER_SECONDS = 10
"""How long after this project's own time-out JAX ends all processes because of a silent one: JAX does not report
which process was silent."""

PART_BYTES = 2**26


def join(section: config.OnJax) -> tuple[int, int]:
    """Join the cluster that TF_CONFIG describes; return this process's number and the number of processes.

    With ``section.workers`` 1 this does nothing. Otherwise JAX must not have used a device yet. The first process runs
    JAX's coordinator, which listens only on 127.0.0.1 if that is its address, else on all interfaces, without a
    password.

    Raises:
        UserError: the processes differ in their number of devices.
    """
    if section.workers == 1:
        return 0, 1
    values = json.loads(os.environ["TF_CONFIG"])
    tasks = tasks_of(values["cluster"])
    addresses = [values["cluster"][job][index] for job, index in tasks]
    number = tasks.index((values["task"]["type"], values["task"]["index"]))
    if not jax.distributed.is_initialized():
        # Concurrent sums over processes would have to start in the same order on each process.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # It would take SIGTERM, which is ours.
        upstream.let_gloo_listen_at(addresses[number].rpartition(":")[0].strip("[]"))
        host, _, port = addresses[0].rpartition(":")
        jax.distributed.initialize(
            addresses[0],
            len(addresses),
            number,
            cluster_detection_method="deactivate",
            coordinator_bind_address=addresses[0] if host == "127.0.0.1" else f"[::]:{port}",
            initialization_timeout=WAIT_SECONDS,
            heartbeat_timeout_seconds=int(section.heartbeat_timeout_seconds) + LATER_SECONDS,
        )
        check_devices(section.gpus_per_worker)
        # Gloo gives processes 30 s to connect for their first sum, and any time for later sums of the same devices.
        # At this point all are ready; later the chief may be busy with a checkpoint or a slow tracking server.
        sum_over_workers([0])
    return number, len(addresses)


def check_devices(wanted: int | None) -> None:
    """Raise ``UserError`` unless all processes have the same number of devices, and the wanted number."""
    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts)) > 1 or wanted not in (None, counts[0]):
        raise UserError(
            f"strategy.devices = {wanted or 'null'}: the workers have {', '.join(map(str, counts))} devices "
            f"({jax.devices()[0].platform}), but all must have the same number. Set one that every worker has"
        )


def sum_over_workers(values: Any) -> Any:
    """Return the elementwise sum of an int64 array over all processes."""
    own = np.asarray(values, np.int64)
    # As bytes: without train.dtype_policy=float64 JAX has no integers of 64 bits.
    every = np.asarray(multihost_utils.process_allgather(np.frombuffer(own.tobytes(), np.uint8)))
    return np.frombuffer(every.tobytes(), np.int64).reshape(-1, *own.shape).sum(axis=0)


def broadcast(payload: bytes) -> bytes:
    """Return the first process's bytes on every process."""
    first = jax.process_index() == 0
    num_bytes = int(sum_over_workers([len(payload) if first else 0])[0])
    own = np.frombuffer(payload, np.uint8) if first else np.zeros(num_bytes, np.uint8)
    # In parts, because each device holds one: a model that several devices share may be larger than a device's memory.
    parts = (own[start : start + PART_BYTES] for start in range(0, num_bytes, PART_BYTES))
    return b"".join(np.asarray(multihost_utils.broadcast_one_to_all(part)).astype(np.uint8).tobytes() for part in parts)


def share_of_batch(mesh: jax.sharding.Mesh, process: int) -> tuple[int, int]:
    """Return the part of a batch that a process reads, and the number of parts: the examples of its devices.

    The mesh's first axis splits a batch; the others may place the same examples on several processes. A process that
    needs non-contiguous examples reads the whole batch.
    """
    rows = mesh.devices.reshape(len(mesh.devices), -1)
    own = [place for place, row in enumerate(rows) if any(device.process_index == process for device in row)]
    first, count = own[0], len(own)
    if own != list(range(first, first + count)) or first % count or len(rows) % count:
        return 0, 1
    return first // count, len(rows) // count


def place(array: Any, sharding: Any, size: int, share: tuple[int, int]) -> Any:
    """Return the global array of ``size`` examples from this process's part of it, or from the whole array."""
    part, num_parts = share
    first = 0 if len(array) == size else size * part // num_parts

    def rows(index: tuple[slice, ...]) -> Any:
        start, stop, _ = index[0].indices(size)
        return array[start - first : stop - first]

    return jax.make_array_from_callback((size, *array.shape[1:]), sharding, rows)

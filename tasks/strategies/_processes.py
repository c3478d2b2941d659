"""Several processes that are one program on JAX: how they meet, what they tell each other, and which part of a batch
each of them reads."""

import json
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tasks import config
from tasks.system import upstream
from tasks.system.errors import UserError

WAIT_SECONDS = 86_400
"""How long is waited for the other members, which someone else may have yet to start."""
LATER_SECONDS = 10
"""How much later than this project's own time-out JAX ends all processes for one that is silent: it does not say which
one that was."""


def join(section: config.OnJax) -> tuple[int, int]:
    """Become one of the processes of the cluster that TF_CONFIG describes; return its number, and how many there are.

    Where ``section.workers`` is 1 nothing is done. Otherwise JAX must not have used a device yet. The first process has
    JAX' coordinator, at its own address alone where that is this machine's 127.0.0.1, else on all interfaces. It asks
    for no password.

    Raises:
        UserError: there is no TF_CONFIG, or the processes have not as many devices each.
    """
    if section.workers == 1:
        return 0, 1
    text = os.environ.get("TF_CONFIG")
    if not text:
        raise UserError(
            f"strategy.workers = {section.workers}: this process is not a member of a cluster. `stratagem run` starts "
            "them; or give strategy.workers=1"
        )
    values = json.loads(text)
    jobs = [(job, index) for job in ("chief", "worker") for index in range(len(values["cluster"].get(job, ())))]
    addresses = [values["cluster"][job][index] for job, index in jobs]
    number = jobs.index((values["task"]["type"], values["task"]["index"]))
    if not jax.distributed.is_initialized():
        # Two sums over processes that are under way at once would have to begin in the same order on each of them.
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
        # Gloo gives processes 30 s to find each other for a first sum, any time for another one of the same devices.
        # Here they have just met; later the chief may restore a checkpoint, or tell a slow server of the run.
        sum_over_workers([0])
    return number, len(addresses)


def check_devices(wanted: int | None) -> None:
    """Raise ``UserError`` unless each process has as many devices as the others, and as it wants."""
    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    if len(set(counts)) > 1 or wanted not in (None, counts[0]):
        raise UserError(
            f"strategy.devices = {wanted or 'null'}: the workers have {', '.join(map(str, counts))} devices "
            f"({jax.devices()[0].platform}), and each must have as many. Give the number that each of them has"
        )


def sum_over_workers(values: Any) -> Any:
    """Return the sum over all processes of each number of an array int64."""
    own = np.asarray(values, np.int64)
    # As bytes: without train.dtype_policy=float64 JAX has no integers of 64 bits.
    every = np.asarray(multihost_utils.process_allgather(np.frombuffer(own.tobytes(), np.uint8)))
    return np.frombuffer(every.tobytes(), np.int64).reshape(-1, *own.shape).sum(axis=0)


def broadcast(payload: bytes) -> bytes:
    """Return the first process's bytes, on each of them."""
    first = jax.process_index() == 0
    num_bytes = int(sum_over_workers([len(payload) if first else 0])[0])
    own = np.frombuffer(payload, np.uint8) if first else np.zeros(num_bytes, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(own)).astype(np.uint8).tobytes()


def share_of_batch(mesh: jax.sharding.Mesh, axis: str, process: int) -> tuple[int, int]:
    """Return which part of a batch a process reads, and of how many: the examples that its devices have.

    A mesh may lay the same examples on several processes; where a process would need examples that do not follow each
    other it reads all of them.

    Args:
        mesh: of all devices.
        axis: cuts a batch.
        process: its number.
    """
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)
    own = [place for place, row in enumerate(rows) if any(device.process_index == process for device in row)]
    first, count = own[0], len(own)
    if own != list(range(first, first + count)) or first % count or len(rows) % count:
        return 0, 1
    return first // count, len(rows) // count


def place(array: Any, sharding: Any, size: int, share: tuple[int, int]) -> Any:
    """Return this process's part of an array of ``size`` examples, or all of it, as the array of all processes."""
    part, num_parts = share
    first = 0 if len(array) == size else size * part // num_parts

    def rows(index: tuple[slice, ...]) -> Any:
        start, stop, _ = index[0].indices(size)
        return array[start - first : stop - first]

    return jax.make_array_from_callback((size, *array.shape[1:]), sharding, rows)

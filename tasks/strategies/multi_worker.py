"""Synchronous copies in several processes on one or several machines (tf.distribute.MultiWorkerMirroredStrategy)."""

from typing import Any

import numpy as np
import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy, _copies, local_copies, tasks_of
from tasks.system import upstream


def build(section: config.MultiWorker) -> Strategy:
    """Return the strategy of the cluster that TF_CONFIG describes; it waits until all members have joined.

    Each worker has a replica on each visible GPU, or one on its CPU. TensorFlow must not have used a device yet.

    Raises:
        tf.errors.OpError: a member did not join.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = tasks_of(resolver.cluster_spec().as_dict())  # A chief is an ordinary worker, and the first one.
    if tasks:
        upstream.set_heartbeat_timeout(tasks, section.heartbeat_timeout_seconds)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation[section.communication.upper()]
    )
    workers = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    local = tuple(workers.extended.worker_devices)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def add(values: Any) -> Any:
        first = tf.distribute.get_replica_context().replica_id_in_sync_group % len(local) == 0
        return _copies.all_reduce(tf.where(first, values, tf.zeros_like(values)))

    def sum_over_workers(values: Any) -> Any:
        values = np.asarray(values, np.int64)
        summed = workers.run(add, args=(tf.constant(values.ravel()),))
        return workers.experimental_local_results(summed)[0].numpy().reshape(values.shape)

    def broadcast(payload: bytes) -> bytes:
        # Collectives only sum numbers: the chief's bytes plus zeros from all other workers are the chief's bytes.
        num_bytes = int(sum_over_workers([len(payload) if worker == 0 else 0])[0])
        padded = payload.ljust(-(-num_bytes // 8) * 8, b"\0") if worker == 0 else bytes(-(-num_bytes // 8) * 8)
        received: bytes = sum_over_workers(np.frombuffer(padded, np.int64)).tobytes()
        return received[:num_bytes]

    worker = tasks.index((resolver.task_type, resolver.task_id)) if tasks else 0
    return _copies.strategy(
        section.kind,
        workers,
        devices=_devices_of_all_tasks(tasks, local),
        locate=lambda variable: locate(variable, tasks),
        sum_over_workers=sum_over_workers,
        broadcast=broadcast,
        collectives=_collectives(section, tf.DeviceSpec.from_string(local[0]).device_type),
        worker=worker,
        num_workers=max(1, len(tasks)),
    )


def locate(variable: Any, tasks: list[tuple[str, int]]) -> tuple[tuple[str, ...], str, int]:
    """Locate a Keras variable: on this process's devices, or, if it is mirrored, on the same devices of each task.

    A variable created outside the scope belongs to this process alone.
    """
    local, sharding, num_bytes = local_copies(variable)
    if not hasattr(variable.value, "values"):
        return local, sharding, num_bytes
    devices = _devices_of_all_tasks(tasks, local)
    return devices, "mirrored" if len(devices) > 1 else "whole", num_bytes


def _devices_of_all_tasks(tasks: list[tuple[str, int]], devices: tuple[str, ...]) -> tuple[str, ...]:
    """Return the devices of all tasks, each with the same devices as this process; without a cluster only its own."""
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return tuple(spec.replace(job=job, task=i).to_string() for job, i in tasks for spec in specs) or devices


def _collectives(section: config.MultiWorker, device_type: str) -> str:
    """Return the method that sums the gradients: TensorFlow chooses NCCL by default, which only works between GPUs."""
    nccl = device_type == "GPU" and section.communication != "ring"
    return f"CollectiveAllReduce, {'NCCL' if nccl else 'RING over gRPC'}"

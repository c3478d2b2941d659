"""Synchronous copies on the devices of one machine (tf.distribute.MirroredStrategy), and what all strategies of copies
on TensorFlow share."""

from typing import Any

import tensorflow as tf

from tasks import config, upstream
from tasks.errors import UserError
from tasks.strategies import Strategy


def build(section: config.Mirrored) -> Strategy:
    """Return the strategy of the replicas on ``section.devices``: GPUs where there are any, logical CPUs otherwise.

    Raises:
        UserError: devices that are not there, or NCCL without a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    wanted = section.devices
    if isinstance(wanted, list):
        missing = [name for name in wanted if int(name.partition(":")[2]) >= len(gpus)]
        if missing or len(set(wanted)) < len(wanted):
            raise UserError(
                f"strategy.devices = {wanted}: this machine has {len(gpus)} GPUs, and each can be named once. "
                "Give a number of replicas, or null for all GPUs"
            )
        gpus = [gpus[int(name.partition(":")[2])] for name in wanted]
        wanted = len(gpus)
    if gpus and (wanted or 0) > len(gpus):
        raise UserError(
            f"strategy.devices = {wanted}: this machine has {len(gpus)} GPUs. "
            f"Give strategy.devices={len(gpus)}, or null for all of them"
        )
    if gpus and wanted is not None:
        # TensorFlow takes the memory of all that it sees, and numbers them anew from here on.
        tf.config.set_visible_devices(gpus[:wanted], "GPU")
    if not gpus and section.cross_device_ops == "nccl":
        raise UserError(
            "strategy.cross_device_ops = 'nccl': NCCL sums between GPUs, and this machine has none. Give auto, "
            "hierarchical_copy or reduction_to_one_device"
        )
    if not gpus and wanted is not None:
        _split_cpu(wanted)
    names = [device.name for device in tf.config.list_logical_devices("GPU" if gpus else "CPU")]
    num_replicas = len(names[:wanted])
    if section.cross_device_ops == "hierarchical_copy" and num_replicas > 1 and num_replicas % 2:
        # TensorFlow sums two halves of equal size: of three replicas it would leave one out, and say nothing.
        raise UserError(
            f"strategy.cross_device_ops = 'hierarchical_copy': it sums over an even number of replicas, and there are "
            f"{num_replicas}. Give auto or reduction_to_one_device, or strategy.devices={num_replicas - 1}"
        )
    ops = {
        "auto": lambda: None,
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }[section.cross_device_ops]()
    mirrored = tf.distribute.MirroredStrategy(names[:wanted], cross_device_ops=ops)
    return strategy(section.kind, mirrored, collectives=upstream.reduction_of(mirrored))


def strategy(kind: str, copies: Any, **more: Any) -> Strategy:
    """Return the strategy of a ``tf.distribute.Strategy`` whose replicas do each step together."""
    local = tuple(copies.extended.worker_devices)

    def distribute(dataset: Any) -> Any:
        # The pieces are cut for the replicas already: rebatching a dataset without a batch op would unbatch it first.
        return copies.distribute_datasets_from_function(lambda context: dataset)

    values = {
        "num_replicas": copies.num_replicas_in_sync,
        "devices": local,
        "scope": copies.scope,
        "distribute": distribute,
        "run": copies.run,
        "local_replica": lambda: tf.distribute.get_replica_context().replica_id_in_sync_group % len(local),
        "local_results": copies.experimental_local_results,
        "all_reduce": all_reduce,
        "distributed": True,
    }
    return Strategy(kind, **(values | more))


def all_reduce(tensors: Any) -> Any:
    """Inside a step: return the sum of a list of tensors over all replicas, on each of them."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def _split_cpu(num_devices: int) -> None:
    """Show the one CPU as several logical ones; TensorFlow allows it until it has first used a device."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError:
        present = len(tf.config.list_logical_devices("CPU"))
        if present < num_devices:
            raise UserError(
                f"strategy.devices = {num_devices}: TensorFlow already runs here with {present} logical CPUs. "
                "Train in a process of its own (`stratagem run` does)"
            ) from None

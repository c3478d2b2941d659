"""Synchronous copies on the devices of one machine (tf.distribute.MirroredStrategy)."""

from typing import Any

import tensorflow as tf

from tasks import config
from tasks.errors import UserError
from tasks.strategies import Strategy


def build(section: config.Mirrored) -> Strategy:
    """Return the strategy of ``section.devices`` replicas: on GPUs where there are any, on logical CPUs otherwise."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus and (section.devices or 0) > len(gpus):
        raise UserError(
            f"strategy.devices = {section.devices}: this machine has {len(gpus)} GPUs. "
            f"Give strategy.devices={len(gpus)}, or null for all of them"
        )
    if not gpus and section.devices is not None:
        _split_cpu(section.devices)
    names = [device.name for device in tf.config.list_logical_devices("GPU" if gpus else "CPU")]
    mirrored = tf.distribute.MirroredStrategy(names[: section.devices])

    def distribute(dataset: Any) -> Any:
        # The pieces are cut for the replicas already: rebatching a dataset without a batch op would unbatch it first.
        return mirrored.distribute_datasets_from_function(lambda context: dataset)

    devices = tuple(mirrored.extended.worker_devices)
    return Strategy("mirrored", mirrored.num_replicas_in_sync, devices, mirrored.scope, distribute)


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

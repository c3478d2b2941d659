"""Synchronous copies on the devices of one machine (tf.distribute.MirroredStrategy)."""

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy, _copies
from tasks.system import units, upstream
from tasks.system.errors import UserError


def build(section: config.Mirrored) -> Strategy:
    """Return the strategy with replicas on ``section.devices``: on GPUs if the machine has any, else on logical CPUs.

    Raises:
        UserError: a device does not exist, or NCCL is chosen without a GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    wanted = section.devices
    if isinstance(wanted, list):
        missing = [name for name in wanted if int(name.partition(":")[2]) >= len(gpus)]
        if missing or len(set(wanted)) < len(wanted):
            raise UserError(
                f"strategy.devices = {wanted}: this machine has {units.count(len(gpus), 'GPU')}, and a device may be "
                "named only once. Set a number of replicas, or null for all GPUs"
            )
        gpus = [gpus[int(name.partition(":")[2])] for name in wanted]
        wanted = len(gpus)
    if gpus and (wanted or 0) > len(gpus):
        raise UserError(
            f"strategy.devices = {wanted}: this machine has {units.count(len(gpus), 'GPU')}. "
            f"Set strategy.devices={len(gpus)}, or null for all of them"
        )
    if gpus and wanted is not None:
        # TensorFlow allocates memory on all visible GPUs, and renumbers them from here on.
        tf.config.set_visible_devices(gpus[:wanted], "GPU")
    if not gpus and section.cross_device_ops == "nccl":
        raise UserError(
            "strategy.cross_device_ops = 'nccl': NCCL needs GPUs, and this machine has none. Set auto, "
            "hierarchical_copy or reduction_to_one_device"
        )
    if not gpus and wanted is not None:
        _split_cpu(wanted)
    names = [device.name for device in tf.config.list_logical_devices("GPU" if gpus else "CPU")]
    num_replicas = len(names[:wanted])
    if section.cross_device_ops == "hierarchical_copy" and num_replicas > 1 and num_replicas % 2:
        # TensorFlow sums two halves of equal size: it would silently ignore one of three replicas.
        raise UserError(
            f"strategy.cross_device_ops = 'hierarchical_copy': it sums over an even number of replicas, but there are "
            f"{num_replicas}. Set auto or reduction_to_one_device, or strategy.devices={num_replicas - 1}"
        )
    ops = {
        "auto": lambda: None,
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }[section.cross_device_ops]()
    copies = tf.distribute.MirroredStrategy(names[:wanted], cross_device_ops=ops)
    return _copies.strategy(section.kind, copies, collectives=upstream.reduction_of(copies))


def _split_cpu(num_devices: int) -> None:
    """Split the CPU into several logical devices; TensorFlow allows this only before it first uses a device."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError:
        present = len(tf.config.list_logical_devices("CPU"))
        if present < num_devices:
            raise UserError(
                f"strategy.devices = {num_devices}: TensorFlow already runs here with {present} logical CPUs. "
                "Train in a separate process (`stratagem run` does)"
            ) from None

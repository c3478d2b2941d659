"""No distribution: everything on one CPU or one GPU."""

from contextlib import nullcontext

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy
from tasks.system import units
from tasks.system.errors import UserError


def build(section: config.OneDevice) -> Strategy:
    """Return the strategy of one replica on ``section.device``, or on the first GPU, or on the CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    wanted, _, index = (section.device or ("gpu" if gpus else "cpu")).partition(":")
    number = int(index or 0)
    if wanted == "gpu" and number >= len(gpus):
        raise UserError(
            f"strategy.device = '{section.device}': this machine has {units.count(len(gpus), 'GPU')} that "
            "TensorFlow can use. Set strategy.device=cpu, or null to choose automatically"
        )
    # TensorFlow uses the first visible GPU, else the CPU, so visibility selects the device.
    tf.config.set_visible_devices([gpus[number]] if wanted == "gpu" else [], "GPU")
    device = tf.config.list_logical_devices("GPU" if wanted == "gpu" else "CPU")[0].name
    return Strategy("one_device", 1, (device,), scope=nullcontext)

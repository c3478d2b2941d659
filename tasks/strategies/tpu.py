"""Synchronous copies on the cores of a TPU (tf.distribute.TPUStrategy).

No test machine of this project has a TPU: the tests cover only the refusal without a TPU; the rest follows
https://www.tensorflow.org/guide/tpu.
"""

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy, _copies
from tasks.system.errors import UserError
from tasks.system.machine import find_tpu


def build(section: config.Tpu) -> Strategy:
    """Connect to the TPU, initialise it, which clears its memory, and return the strategy of all its cores.

    Raises:
        UserError: TensorFlow cannot reach the TPU, or finds none at the address.
    """
    name = find_tpu(section.tpu)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(name)
    except (tf.errors.OpError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"strategy.tpu = {section.tpu!r}: TensorFlow cannot use the TPU '{name}' "
            f"({' '.join(str(error).split())[:300]}). On a TPU VM the package tensorflow-tpu brings its driver, which "
            "the package tensorflow lacks"
        ) from error
    if not tf.config.list_logical_devices("TPU"):
        raise UserError(f"strategy.tpu = {section.tpu!r}: TensorFlow found no TPU at '{name}': set another address")
    return _copies.strategy(
        section.kind, tf.distribute.TPUStrategy(resolver), collectives="CrossReplicaSum between the cores"
    )

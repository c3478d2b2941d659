"""Synchronous copies on the cores of a TPU (tf.distribute.TPUStrategy).

No test machine of this project has a TPU: the tests cover only TensorFlow's error without one; the rest follows
https://www.tensorflow.org/guide/tpu.
"""

import socket
from urllib.parse import urlsplit

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy, _copies
from tasks.system.errors import UserError, cut, one_line, shown


def build(section: config.Tpu) -> Strategy:
    """Connect to the TPU, initialise it, which clears its memory, and return the strategy of all its cores.

    Raises:
        UserError: TensorFlow does not find the TPU.
    """
    try:
        place = urlsplit(section.tpu or "")
        # Where nothing answers, TensorFlow waits without an error: it was ended after 40 minutes.
        if place.scheme == "grpc":
            socket.create_connection((place.hostname, place.port or 8470), timeout=10).close()
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(section.tpu)
    except (tf.errors.OpError, RuntimeError, ValueError, OSError, OverflowError) as error:
        raise UserError(
            f"strategy.tpu = {shown(section.tpu)}: TensorFlow cannot use a TPU ({cut(one_line(error), 300)}). Set "
            "strategy.tpu=local on a TPU VM with the package tensorflow-tpu, strategy.tpu=grpc://ADDRESS:8470, or "
            "strategy.kind=mirrored"
        ) from error
    return _copies.strategy(
        section.kind, tf.distribute.TPUStrategy(resolver), collectives="CrossReplicaSum between the cores"
    )

"""Synchronous copies on the cores of a TPU (tf.distribute.TPUStrategy).

No machine of this project's tests has a TPU. What is tested is the refusal where there is none; the rest follows
https://www.tensorflow.org/guide/tpu.
"""

import os

from tasks import config
from tasks.errors import UserError
from tasks.strategies import Strategy

VARIABLES = ("TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "COLAB_TPU_ADDR")
"""Where a cloud says which TPU is meant, the first that is set."""


def find(section: config.Tpu) -> str:
    """Return the TPU as ``TPUClusterResolver`` takes it: ``grpc://ADDRESS``, a name in Google Cloud, or ``local``."""
    name = section.tpu or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "local")
    # Colab's variable has no scheme, Kubernetes' may be without one too: a name has no colon.
    return f"grpc://{name}" if ":" in name and not name.startswith("grpc://") else name


def build(section: config.Tpu) -> Strategy:
    """Return the strategy of all cores of the TPU; it connects to it and initialises it, which clears its memory.

    Raises:
        UserError: TensorFlow cannot reach the TPU, or finds none there.
    """
    # Here, because `find` is asked by a process that imports no framework.
    import tensorflow as tf

    from tasks.strategies import mirrored

    name = find(section)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(name)
    except (tf.errors.OpError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"strategy.tpu = {section.tpu!r}: TensorFlow cannot use the TPU '{name}' "
            f"({' '.join(str(error).split())[:300]}). On a TPU VM the package tensorflow-tpu brings its driver, which "
            "the package tensorflow lacks"
        ) from error
    if not tf.config.list_logical_devices("TPU"):
        raise UserError(f"strategy.tpu = {section.tpu!r}: TensorFlow found no TPU at '{name}': give another")
    return mirrored.strategy(
        section.kind, tf.distribute.TPUStrategy(resolver), collectives="CrossReplicaSum between the cores"
    )

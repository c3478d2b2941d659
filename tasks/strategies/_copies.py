"""Common code of TensorFlow's synchronous strategies: each replica has all variables; all run each step together."""

from typing import Any

import tensorflow as tf

from tasks.strategies import Strategy


def strategy(kind: str, copies: Any, **more: Any) -> Strategy:
    """Return the strategy of a ``tf.distribute.Strategy`` whose replicas run each step together."""
    local = tuple(copies.extended.worker_devices)

    def distribute(dataset: Any) -> Any:
        # The batches are already split for the replicas: rebatching a dataset without a batch op would unbatch it.
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

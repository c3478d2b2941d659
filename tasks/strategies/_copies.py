"""What all strategies of copies on TensorFlow share: each replica has all variables, and all do each step together."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tasks.strategies import Strategy
from tasks.system import upstream


def of_copies(make: Callable[[Any], Any]) -> Callable[[Any], Strategy]:
    """Return the ``build`` of a strategy, of what makes its ``tf.distribute.Strategy`` from its section."""

    @functools.wraps(make)
    def build(section: Any) -> Strategy:
        copies = make(section)
        return strategy(section.kind, copies, collectives=upstream.reduction_of(copies))

    return build


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

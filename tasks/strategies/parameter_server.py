"""Workers that train asynchronously on variables that servers hold (tf.distribute.ParameterServerStrategy)."""

import logging
import os

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy
from tasks.system import machine
from tasks.system.errors import UserError


def build(section: config.ParameterServer) -> Strategy:
    """Return the strategy of the chief of the cluster that TF_CONFIG describes; it waits until all members answer.

    A step's batch goes to one worker, so there is one replica, whatever the number of workers.

    Raises:
        UserError: TF_CONFIG has no workers, no parameter servers, or is another task's; or several GPUs a worker.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    members = resolver.cluster_spec().as_dict()
    if not (members.get("worker") and members.get("ps")) or resolver.task_type != "chief":
        raise UserError(
            f"strategy.kind = '{section.kind}': TF_CONFIG must describe a cluster of a chief, workers and ps, and this "
            f"process as its chief, and it is {os.environ.get('TF_CONFIG')!r}. Give strategy.launcher=local, which "
            "makes it"
        )
    # It tells of each lost worker in ten lines, twice. The process that starts the workers needs one line for it, and
    # an error is raised.
    tf.get_logger().setLevel(logging.CRITICAL)
    # No partitioner: a Keras variable cannot hold a ShardedVariable.
    servers = tf.distribute.ParameterServerStrategy(resolver)
    if servers.num_replicas_in_sync > 1:
        raise UserError(
            f"strategy.kind = '{section.kind}': each worker sees {servers.num_replicas_in_sync} GPUs, and a step's "
            "batch goes to one. Start a worker a GPU, each with its own CUDA_VISIBLE_DEVICES"
        )
    (device_type,) = {device.rpartition("/device:")[2] for device in servers.extended.worker_devices}
    names = [device.name for device in tf.config.list_logical_devices()]
    return Strategy(
        kind="parameter_server",
        num_replicas=1,
        devices=tuple(name for name in names if name.startswith("/job:worker/") and name.endswith(device_type)),
        scope=servers.scope,
        run=servers.run,
        collectives="none: those of a step change the variables by themselves",
        distributed=True,
        coordinator=tf.distribute.coordinator.ClusterCoordinator(servers),
    )


def run_server() -> None:
    """Be the worker or the parameter server that TF_CONFIG says, until this process is ended."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    members = resolver.cluster_spec()
    # A step waits for variables in threads of this pool: with as many threads as cores, two workers' steps can wait
    # for each other for ever (TensorFlow's guide to parameter servers).
    threads = max(machine.usable_cores(), members.num_tasks("worker") + 1)
    server = tf.distribute.Server(
        members,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )
    server.join()

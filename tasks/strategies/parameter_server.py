"""Asynchronous workers on variables that parameter servers hold (tf.distribute.ParameterServerStrategy)."""

import logging

import tensorflow as tf

from tasks import config
from tasks.strategies import Strategy
from tasks.system import machine
from tasks.system.errors import UserError


def build(section: config.ParameterServer) -> Strategy:
    """Return the chief's strategy for the cluster that TF_CONFIG describes; it waits until all members answer.

    A step's batch goes to a single worker, so there is one replica for any number of workers.

    Raises:
        UserError: a worker has several GPUs.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    # TensorFlow logs each lost worker in ten lines, twice. The process that starts the workers reports it in one line,
    # and errors are raised anyway.
    tf.get_logger().setLevel(logging.CRITICAL)
    # No partitioner: a Keras variable cannot hold a ShardedVariable.
    servers = tf.distribute.ParameterServerStrategy(resolver)
    if servers.num_replicas_in_sync > 1:
        raise UserError(
            f"strategy.kind = '{section.kind}': each worker sees {servers.num_replicas_in_sync} GPUs, and a step's "
            "batch goes to one. Start one worker per GPU, each with its own CUDA_VISIBLE_DEVICES"
        )
    (device_type,) = {device.rpartition("/device:")[2] for device in servers.extended.worker_devices}
    names = [device.name for device in tf.config.list_logical_devices()]
    return Strategy(
        kind="parameter_server",
        num_replicas=1,
        devices=tuple(name for name in names if name.startswith("/job:worker/") and name.endswith(device_type)),
        scope=servers.scope,
        run=servers.run,
        collectives="none: each step applies its own",
        distributed=True,
        coordinator=tf.distribute.coordinator.ClusterCoordinator(servers),
    )


def run_server() -> None:
    """Run the worker or parameter server of this process's task in TF_CONFIG until the process is ended."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    members = resolver.cluster_spec()
    # A step waits for variables in this pool's threads: with only as many threads as cores, the steps of two workers
    # can deadlock (TensorFlow's guide to parameter servers).
    threads = max(machine.usable_cores(), members.num_tasks("worker") + 1)
    server = tf.distribute.Server(
        members,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )
    server.join()

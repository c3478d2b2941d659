"""Synchronous copies on the devices of one or several processes (keras.distribution.DataParallel), and the code that
both strategies on JAX share."""

import math
from typing import Any

import jax
import keras
import numpy as np

from tasks import config
from tasks.strategies import Strategy, _processes
from tasks.system import upstream
from tasks.system.errors import UserError

# XLA's transport for sums, by device type.
COLLECTIVES = {"cpu": "shared memory", "gpu": "NCCL", "tpu": "interconnect"}


class EveryExample:
    """Splits a batch over the batch axis of the mesh. If the batch size is not divisible, each device gets the whole
    batch: a short last batch is computed as on one device, and every example counts once."""

    def get_data_layout(self, data_shape: tuple[int, ...]) -> Any:
        distribution: Any = self
        axes: list[str | None] = [None] * len(data_shape)
        if data_shape[0] % distribution.num_model_replicas == 0:
            axes[0] = distribution.batch_dim_name
        return keras.distribution.TensorLayout(axes, distribution.device_mesh)


class _DataParallel(EveryExample, keras.distribution.DataParallel):
    pass


def build(section: config.DataParallel) -> Strategy:
    """Return the strategy with a replica on each of ``section.devices`` of every worker; it waits for all workers.

    Raises:
        UserError: a device does not exist.
    """
    upstream.leave_tensorflow_alone()
    place = _processes.join(section)
    devices = find_devices(section)
    mesh = keras.distribution.DeviceMesh([len(devices)], ["batch"], devices)
    return strategy(section.kind, _DataParallel(mesh, auto_shard_dataset=False), place)


def strategy(kind: str, distribution: Any, place: tuple[int, int], **more: Any) -> Strategy:
    """Return the strategy of a ``keras.distribution.Distribution``.

    Args:
        kind: the strategy's kind.
        distribution: the distribution over all devices.
        place: the number of this process, and the number of processes.
        more: further fields of the strategy.
    """
    devices = tuple(str(device) for device in distribution.device_mesh.devices.flat)
    mesh = distribution.device_mesh.backend_mesh
    worker, num_workers = place
    if num_workers > 1:
        share = _processes.share_of_batch(mesh, worker)
        more |= {
            "worker": worker,
            "num_workers": num_workers,
            "is_one_program": True,
            "share": share,
            "sum_over_workers": _processes.sum_over_workers,
            "broadcast": _processes.broadcast,
        }

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def replicate(array: Any) -> Any:
        if num_workers == 1 or isinstance(array, jax.Array):
            return jax.device_put(array, everywhere)
        return jax.make_array_from_callback(np.shape(array), everywhere, lambda index: np.asarray(array)[index])

    def layout_of(shape: tuple[int, ...]) -> Any:
        return distribution.get_data_layout(shape).backend_layout

    def lay_out(batch: Any) -> Any:
        return jax.tree.map(lambda one: jax.lax.with_sharding_constraint(one, layout_of(one.shape)), batch)

    def place_one(array: Any, size: int) -> Any:
        layout = layout_of((size, *array.shape[1:]))
        if num_workers > 1:
            return _processes.place(array, layout, size, share)
        return jax.device_put(array, layout)

    return Strategy(
        kind=kind,
        num_replicas=distribution.num_model_replicas,
        devices=devices,
        scope=distribution.scope,
        place_batch=lambda batch, size: keras.tree.map_structure(lambda one: place_one(one, size), batch),
        replicate=replicate,
        lay_out=lay_out,
        locate=locate,
        collectives="none" if len(devices) == 1 else f"XLA all-reduce ({_collectives(devices, num_workers)})",
        backend="jax",
        **more,
    )


def _collectives(devices: tuple[str, ...], num_workers: int) -> str:
    platform = devices[0].partition(":")[0]
    return "Gloo over TCP" if platform == "cpu" and num_workers > 1 else COLLECTIVES[platform]


def find_devices(section: config.OnJax, asked: str = "") -> list[str]:
    """Return names of devices such as ``gpu:0``: the requested number, the requested names, or all devices; with
    several workers, all devices of all workers. A message begins with ``asked``, by default the number of devices.

    Raises:
        UserError: JAX has fewer devices, or does not have a requested one.
    """
    wanted = section.wanted_devices
    present: list[str] = keras.distribution.list_devices()
    if section.workers > 1:
        _processes.check_devices(section.gpus_per_worker)
        return present
    if isinstance(wanted, int):
        if wanted > len(present):
            raise UserError(
                f"{asked or f'strategy.devices = {wanted}'}: JAX has {len(present)} here ({', '.join(present)}). Use "
                f"at most {len(present)}; CPU devices are created when a process starts"
            )
        return present[:wanted]
    if wanted is None:
        return present
    if any(name not in present for name in wanted) or len(set(wanted)) < len(wanted):
        raise UserError(
            f"strategy.devices = {wanted}: JAX has {', '.join(present)} here, and a device may be named only once. "
            "Use some of these, a number, or null for all of them"
        )
    return wanted


def locate(variable: Any) -> tuple[tuple[str, ...], str, int]:
    """Return a Keras variable's devices, its sharding such as ``(None, model)``, and its bytes on one device."""
    array = variable.value
    # Not `addressable_shards`: it has only this process's shards, and fails for an array that JAX 0.10 has just placed
    # on the single device of each process.
    devices = tuple(f"{one.platform}:{one.id}" for one in array.sharding.devices_indices_map(array.shape))
    if len(devices) == 1:
        sharding = "whole"
    elif array.sharding.is_fully_replicated:
        sharding = "replicated"
    else:
        axes = [*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec))]
        sharding = f"({', '.join(map(str, axes))})"
    return devices, sharding, math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize

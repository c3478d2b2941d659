"""Synchronous copies on the devices of one machine (keras.distribution.DataParallel), and what both strategies on JAX
share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tasks import config, upstream
from tasks.errors import UserError
from tasks.strategies import Strategy

# How XLA moves what it sums, by the type of device.
COLLECTIVES = {"cpu": "shared memory", "gpu": "NCCL", "tpu": "interconnect"}


class EveryExample:
    """Cuts a batch over the batch axis of the mesh, and gives each device all of a batch that does not divide: a short
    last batch is computed as one device would, and every example counts once."""

    def get_data_layout(self, data_shape: tuple[int, ...]) -> Any:
        distribution: Any = self
        axes: list[str | None] = [None] * len(data_shape)
        if data_shape[0] % distribution.num_model_replicas == 0:
            axes[0] = distribution.batch_dim_name
        return keras.distribution.TensorLayout(axes, distribution.device_mesh)


class _DataParallel(EveryExample, keras.distribution.DataParallel):
    pass


def build(section: config.DataParallel) -> Strategy:
    """Return the strategy of one replica on each of ``section.devices``.

    Raises:
        UserError: Keras runs on TensorFlow, or a device does not exist.
    """
    require_jax(section.kind)
    devices = find_devices(section.devices)
    mesh = keras.distribution.DeviceMesh([len(devices)], [section.axis_name], devices)
    return strategy(section.kind, _DataParallel(mesh))


def strategy(kind: str, distribution: Any, **more: Any) -> Strategy:
    """Return the strategy of a ``keras.distribution.Distribution``."""
    devices = tuple(str(device) for device in distribution.device_mesh.devices.flat)
    return Strategy(
        kind=kind,
        num_replicas=distribution.num_model_replicas,
        devices=devices,
        scope=lambda: _scope(distribution),
        place_batch=lambda x: keras.tree.map_structure(
            lambda one: keras.distribution.distribute_tensor(one, distribution.get_data_layout(one.shape)), x
        ),
        locate=locate,
        collectives="none" if len(devices) == 1 else f"XLA all-reduce ({COLLECTIVES[devices[0].partition(':')[0]]})",
        backend="jax",
        **more,
    )


def require_jax(kind: str) -> None:
    """Raise ``UserError`` unless Keras runs on JAX in this process; from then on it leaves TensorFlow alone."""
    if keras.backend.backend() != "jax":
        raise UserError(
            f"strategy.kind = '{kind}': keras.distribution does nothing on the {keras.backend.backend()} backend, and "
            "Keras was imported with it. Set KERAS_BACKEND=jax before (`stratagem run` does)"
        )
    upstream.leave_tensorflow_alone()


def find_devices(wanted: int | list[str] | None) -> list[str]:
    """Return names of devices such as ``gpu:0``: as many as asked for, those that are named, or all local ones.

    Raises:
        UserError: JAX has fewer, or not those.
    """
    present: list[str] = keras.distribution.list_devices()
    if isinstance(wanted, int):
        if wanted > len(present):
            raise UserError(
                f"strategy.devices = {wanted}: JAX has {len(present)} here ({', '.join(present)}). Give "
                f"strategy.devices={len(present)}, or null for all of them; CPU devices are made when a process starts"
            )
        return present[:wanted]
    if wanted is None:
        return present
    if any(name not in present for name in wanted) or len(set(wanted)) < len(wanted):
        raise UserError(
            f"strategy.devices = {wanted}: JAX has {', '.join(present)} here, and each can be named once. "
            "Give some of these, a number, or null for all of them"
        )
    return wanted


@contextmanager
def _scope(distribution: Any) -> Iterator[None]:
    """Make a distribution current: Keras reads it when variables are made, and in ``fit`` for each batch and layer."""
    with upstream.layout_of_each_batch(), distribution.scope():
        yield


def locate(variable: Any) -> tuple[tuple[str, ...], str, int]:
    """Return a Keras variable's devices, its sharding such as ``(None, model)``, and the bytes of it on one device."""
    array = variable.value
    shards = array.addressable_shards
    devices = tuple(f"{shard.device.platform}:{shard.device.id}" for shard in shards)
    if len(devices) == 1:
        sharding = "whole"
    elif array.sharding.is_fully_replicated:
        sharding = "replicated"
    else:
        axes = [*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec))]
        sharding = f"({', '.join(map(str, axes))})"
    return devices, sharding, shards[0].data.nbytes

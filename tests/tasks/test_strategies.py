import contextlib
import math
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tasks import config, strategies
from tasks.strategies import _processes
from tasks.system.errors import UserError
from tasks.system.machine import free_ports
from tasks.training.setup import find_global_batch_size
from tests.tasks.clusters import place_of

GPUS = tf.config.list_physical_devices("GPU")


def test_one_device():
    strategy = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    assert (strategy.kind, strategy.num_replicas) == ("one_device", 1)
    assert strategy.devices == (tf.config.list_logical_devices("CPU")[0].name,)
    assert strategy.describe() == "one_device, 1 replica on /device:CPU:0"
    with strategy.scope():
        assert tf.Variable(1.0).device.endswith("CPU:0")
    dataset = tf.data.Dataset.range(3)
    assert strategy.distribute(dataset) is dataset
    assert strategy.run(lambda a, b: a - b, (5, 3)) == 2
    assert strategy.all_reduce([1, 2]) == [1, 2]
    assert strategy.broadcast(b"x") == b"x"
    assert (strategy.is_chief, strategy.distributed, strategy.collectives) == (True, False, "none")


def test_a_worker_has_its_share_of_the_replicas():
    devices = tuple(f"/job:worker/replica:0/task:{i // 2}/device:GPU:{i % 2}" for i in range(4))
    strategy = strategies.Strategy("multi_worker", 4, devices, scope=contextlib.nullcontext, worker=1, num_workers=2)
    assert (strategy.num_local_replicas, strategy.is_chief) == (2, False)
    assert strategy.describe() == f"multi_worker, 4 replicas in 2 workers on {', '.join(devices)}"


# Each: a mesh's shape, whose first axis cuts a batch, how many processes have its devices, which part of a batch each
# process reads, and of how many.
SHARES = [
    ((4,), 2, [(0, 2), (1, 2)]),
    ((4,), 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ((1, 2), 2, [(0, 1), (0, 1)]),  # The model lies on both, and so does each example.
    ((2, 2), 2, [(0, 2), (1, 2)]),
    ((2, 4), 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ((3, 2), 2, [(0, 1), (0, 1)]),  # Each has a batch's third and half of the next.
]


@pytest.mark.parametrize(("shape", "num_processes", "shares"), SHARES)
def test_a_process_on_jax_reads_the_examples_that_its_devices_have(shape, num_processes, shares):
    count = math.prod(shape)
    devices = np.array([SimpleNamespace(process_index=i * num_processes // count) for i in range(count)])
    mesh = SimpleNamespace(devices=devices.reshape(shape))
    assert [_processes.share_of_batch(mesh, one) for one in range(num_processes)] == shares


def test_a_placement_tells_where_each_variable_lies():
    strategy = strategies.build(config.OneDevice(kind="one_device", device="cpu"))
    images = keras.Input((3,))
    model = keras.Model(images, keras.layers.Dropout(0.5)(keras.layers.Dense(2, name="dense")(images)))
    model.compile(keras.optimizers.SGD(momentum=0.9, name="sgd"))
    model.optimizer.build(model.trainable_variables)
    placement = strategy.placement_of(model)
    assert (placement.strategy, placement.backend, placement.num_replicas) == ("one_device", "tensorflow", 1)
    assert placement.devices == strategy.devices
    sizes = {
        variable.path: (variable.shape, variable.dtype, variable.bytes_per_device) for variable in placement.variables
    }
    assert sizes["dense/kernel"] == ((3, 2), "float32", 24)
    assert sizes["sgd/dense_kernel_momentum"] == ((3, 2), "float32", 24)
    assert sizes["sgd/iteration"] == ((), "int64", 8)
    assert any("seed_generator" in path for path in sizes), "Dropout's seeds lie somewhere too"
    for variable in placement.variables:
        assert (variable.sharding, len(variable.devices)) == ("whole", 1)
        assert variable.devices[0].endswith("CPU:0"), variable.path


@pytest.fixture
def machine_with_gpus(monkeypatch):
    """The hardware's edge: no machine of the tests has two GPUs, so this is what TensorFlow says of one that has."""

    def make(number):
        gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(number)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpus)
        return gpus

    return make


ONE, MIRRORED = partial(config.OneDevice, kind="one_device"), partial(config.Mirrored, kind="mirrored")
AT_MOST_ONCE = r"strategy.devices = \['gpu:.*this machine has 2 GPUs, and a device may be named only once"


@pytest.mark.parametrize(
    ("count", "section", "said"),
    [
        (0, ONE(device="gpu"), "strategy.device = 'gpu': this machine has 0 GPUs"),
        (0, ONE(device="gpu:3"), "strategy.device = 'gpu:3': .* strategy.device=cpu"),
        (2, ONE(device="gpu:2"), "strategy.device = 'gpu:2': this machine has 2 GPUs"),
        (2, MIRRORED(devices=3), "strategy.devices = 3: this machine has 2 GPUs. Set strategy.devices=2"),
        *((2, MIRRORED(devices=named), AT_MOST_ONCE) for named in (["gpu:0", "gpu:2"], ["gpu:2"], ["gpu:1", "gpu:1"])),
    ],
)
def test_a_gpu_that_is_not_there_or_named_twice_is_refused(machine_with_gpus, count, section, said):
    machine_with_gpus(count)
    with pytest.raises(UserError, match=said) as error:
        strategies.build(section)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("devices", "visible", "replicas"),
    [(["gpu:3", "gpu:1"], [3, 1], 2), (["gpu:2"], [2], 1), (3, [0, 1, 2], 3), (None, [0, 1, 2, 3], 4)],
)
def test_replicas_lie_on_the_gpus_that_are_asked_for_and_the_others_are_left_alone(
    machine_with_gpus, monkeypatch, devices, visible, replicas
):
    class Asked(Exception):
        pass

    def ask(names, cross_device_ops):
        raise Asked(names, type(cross_device_ops))

    shown = list(machine_with_gpus(4))
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda chosen, kind: shown.__setitem__(slice(None), chosen))
    # TensorFlow numbers the visible ones anew.
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind: [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(len(shown))],
    )
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", ask)
    with pytest.raises(Asked) as asked:
        strategies.build(config.Mirrored(kind="mirrored", devices=devices, cross_device_ops="reduction_to_one_device"))
    assert [int(gpu.name.rpartition(":")[2]) for gpu in shown] == visible
    assert asked.value.args == (
        [f"/device:GPU:{i}" for i in range(replicas)],
        tf.distribute.ReductionToOneDevice,
    )


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
def test_nccl_without_gpus_is_refused():
    with pytest.raises(UserError, match=r"strategy.cross_device_ops = 'nccl': .* this machine has none. Set auto,"):
        strategies.build(config.Mirrored(kind="mirrored", devices=2, cross_device_ops="nccl"))


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
def test_a_sum_that_would_leave_a_replica_out_is_refused(monkeypatch):
    tf.constant(0)  # From here on the CPU cannot be split any more: these are what there is.
    logical = [SimpleNamespace(name=f"/device:CPU:{index}") for index in range(3)]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: logical)
    with pytest.raises(UserError, match=r"'hierarchical_copy': .* there are 3. Set auto or .* strategy.devices=2"):
        strategies.build(config.Mirrored(kind="mirrored", devices=3, cross_device_ops="hierarchical_copy"))


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
def test_replicas_come_too_late_for_a_process_that_already_uses_its_cpu():
    tf.constant(0)
    with pytest.raises(UserError, match=r"strategy.devices = 64: TensorFlow already runs here with 1 logical CPUs"):
        strategies.build(config.Mirrored(kind="mirrored", devices=64))


# The chief begins the run and restores a checkpoint before the first sum, for which the others are there already.
LATE = """
import os, sys, time
from tasks import config, strategies
section = config.DataParallel(kind="data_parallel", workers=2)
strategy = strategies.build(section)
if strategy.is_chief:
    time.sleep(40)
print(strategy.sum_over_workers([1, 2 + strategy.worker]).tolist(), flush=True)
os._exit(0)
"""


@pytest.mark.exhaustive
def test_a_process_on_jax_may_come_late_to_the_first_sum(project):
    """Gloo gives processes that are to sum for the first time 30 s to find each other."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", LATE],
            env=os.environ | environment | {"TF_CONFIG": place_of("worker", index, worker=addresses)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        told = [member.communicate(timeout=1200) for member in members]
    finally:
        for member in members:
            member.kill()
    assert [member.returncode for member in members] == [0, 0], told
    assert [out.splitlines()[-1] for out, _ in told] == ["[2, 5]"] * 2


@pytest.mark.parametrize(
    ("size", "num_replicas", "said"),
    [
        (100, 3, r"train.global_batch_size = 100 is not divisible by 3 replicas: 100 = 3 \* 33 \+ 1. Set 99 or 102,"),
        (2, 3, r"2 = 3 \* 0 \+ 2. Set 3, or train.per_replica_batch_size instead"),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_the_arithmetic(size, num_replicas, said):
    with pytest.raises(UserError, match=said) as error:
        find_global_batch_size(config.load(None, [f"train.global_batch_size={size}"]).train, num_replicas)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (None, "ValueError: Please provide a"),
        ("local", "NotFoundError"),
        ("grpc://127.0.0.1:1", "ConnectionRefusedError"),
    ],
)
def test_without_a_tpu_one_message_says_so(monkeypatch, name, told):
    monkeypatch.delenv("TPU_NAME", raising=False)
    with pytest.raises(UserError, match=f"^strategy.tpu = {name!r}: TensorFlow cannot use a TPU \\({told}"):
        strategies.build(config.Tpu(kind="tpu", tpu=name))

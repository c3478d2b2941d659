import json
import sys

import pytest
import tensorflow as tf

from tasks import config, strategies
from tasks.errors import UserError
from tasks.train import find_global_batch_size

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


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
@pytest.mark.parametrize(
    ("section", "said"),
    [
        (config.OneDevice(kind="one_device", device="gpu"), "strategy.device = 'gpu': this machine has 0 GPUs"),
        (
            config.OneDevice(kind="one_device", device="gpu:3"),
            "strategy.device = 'gpu:3': .* strategy.device=cpu",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(section, said):
    with pytest.raises(UserError, match=said) as error:
        strategies.build(section)
    assert error.value.exit_code == 2


def test_more_gpus_than_there_are_are_refused(monkeypatch):
    # The hardware's edge: no machine of the tests has two GPUs.
    two = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: two)
    with pytest.raises(UserError, match=r"strategy.devices = 3: this machine has 2 GPUs. Give strategy.devices=2"):
        strategies.build(config.Mirrored(kind="mirrored", devices=3))
    with pytest.raises(UserError, match=r"strategy.device = 'gpu:2': this machine has 2 GPUs"):
        strategies.build(config.OneDevice(kind="one_device", device="gpu:2"))


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "gpu:", "GPU", "/device:CPU:0"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(UserError, match=f"strategy.device = '{device}'"):
        config.load(None, {"strategy.device": device})


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
def test_replicas_come_too_late_for_a_process_that_already_uses_its_cpu():
    tf.constant(0)
    with pytest.raises(UserError, match=r"strategy.devices = 64: TensorFlow already runs here with 1 logical CPUs"):
        strategies.build(config.Mirrored(kind="mirrored", devices=64))


MIRRORED = """
import json
import tensorflow as tf
from tasks import config, strategies
section = config.Mirrored(kind="mirrored", devices=3)
strategy = strategies.build(section)
with strategy.scope():
    variable = tf.Variable(1.0)
dataset = tf.data.Dataset.from_tensor_slices([10, 11, 12, 20, 21, 22]).batch(1)
iterator = iter(strategy.distribute(dataset))
elements = [[part.numpy().tolist() for part in next(iterator).values] for _ in range(2)]
fewer = strategies.build(config.Mirrored(kind="mirrored", devices=2))
print(json.dumps({
    "num_replicas": strategy.num_replicas,
    "devices": strategy.devices,
    "describe": strategy.describe(),
    "copies": [copy.device for copy in variable.values],
    "elements": elements,
    "again": strategies.build(section).describe(),
    "fewer": fewer.describe(),
}))
"""


@pytest.mark.skipif(bool(GPUS), reason="this machine has GPUs")
def test_mirrored_on_logical_cpus(project, run):
    done = run([sys.executable, "-c", MIRRORED])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(3)]
    assert found["num_replicas"] == 3
    assert found["devices"] == found["copies"] == devices, "each replica has a device and a copy of its own"
    assert found["describe"] == found["again"] == f"mirrored, 3 replicas on {', '.join(devices)}"
    assert found["fewer"] == f"mirrored, 2 replicas on {', '.join(devices[:2])}"
    assert found["elements"] == [[[10], [11], [12]], [[20], [21], [22]]], "each replica gets its own, in order"


@pytest.mark.parametrize(
    ("overrides", "num_replicas", "expected"),
    [
        (["train.per_replica_batch_size=32"], 4, 128),
        (["train.global_batch_size=128"], 4, 128),
        (["train.global_batch_size=128"], 1, 128),
    ],
)
def test_the_global_batch_is_that_of_all_replicas(overrides, num_replicas, expected):
    assert find_global_batch_size(config.load(None, overrides).train, num_replicas) == expected


@pytest.mark.parametrize(
    ("size", "num_replicas", "said"),
    [
        (100, 3, r"train.global_batch_size = 100 does not divide by 3 replicas: 100 = 3 \* 33 \+ 1. Give 99 or 102,"),
        (2, 3, r"2 = 3 \* 0 \+ 2. Give 3 or 3,"),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_the_arithmetic(size, num_replicas, said):
    with pytest.raises(UserError, match=said) as error:
        find_global_batch_size(config.load(None, [f"train.global_batch_size={size}"]).train, num_replicas)
    assert error.value.exit_code == 2

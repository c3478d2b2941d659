"""There is no TPU here: what can be tested is where one is looked for, and the refusal where there is none."""

import socket

import pytest

from tasks import config, strategies
from tasks.strategies.engines import tpu
from tasks.system import machine
from tasks.system.errors import UserError

PLACES = ["strategy.tpu", *machine.TPU_VARIABLES, *tpu.DEVICE_FILES]


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch, tmp_path):
    """No variable that names a TPU, and device files that a test can make."""
    for name in machine.TPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tpu, "DEVICE_FILES", tuple(str(tmp_path) + pattern for pattern in tpu.DEVICE_FILES))


def section(name=None):
    return config.Tpu(kind="tpu", tpu=name)


def test_without_a_tpu_it_says_what_was_looked_for():
    with pytest.raises(UserError, match="this machine has no TPU") as error:
        tpu.check(section())
    assert error.value.exit_code == 2
    for place in PLACES:
        assert place in str(error.value)


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        (None, {}, "local"),
        ("local", {"TPU_NAME": "other"}, "local"),
        (None, {"TPU_NAME": "my-tpu"}, "my-tpu"),
        (None, {"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "grpc://10.0.0.2:8470"),
        (None, {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470"},
         "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470"),
        ("10.0.0.9:8470", {"TPU_NAME": ""}, "grpc://10.0.0.9:8470"),
    ],
)  # fmt: skip
def test_which_tpu_is_meant(monkeypatch, given, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.find_tpu(given) == expected


@pytest.mark.parametrize("file", ["dev/accel0", "dev/vfio/0"])
def test_a_chip_of_this_machine_is_seen(tmp_path, file):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / "dev" / "accel").mkdir()  # Other accelerators' folder.
    with pytest.raises(UserError):
        tpu.check(section())
    (tmp_path / file).touch()
    tpu.check(section())


def test_an_address_must_answer(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        tpu.check(section(address))
        monkeypatch.setenv("COLAB_TPU_ADDR", address.removeprefix("grpc://"))
        tpu.check(section())
    with pytest.raises(UserError, match=f"nothing answers at {address}"):
        tpu.check(section())
    for wrong in ("grpc://127.0.0.1:port", "grpc://127.0.0.1:99999999", "grpc://"):
        with pytest.raises(UserError, match="nothing answers"):
            tpu.check(section(wrong))


@pytest.mark.skipif(bool(tpu.glob("/dev/accel[0-9]*")), reason="this machine has a TPU")
def test_tensorflow_without_a_tpu_is_refused_too():
    with pytest.raises(UserError, match=r"strategy.tpu = 'local': TensorFlow cannot use the TPU 'local'") as error:
        strategies.build(section("local"))
    assert error.value.exit_code == 2

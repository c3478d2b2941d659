"""Check within a second, and before importing a framework, whether there is a TPU to train on."""

from glob import glob

from tasks import config
from tasks.system import network
from tasks.system.errors import UserError
from tasks.system.machine import TPU_VARIABLES, find_tpu

DEVICE_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""A TPU VM has one device file per chip; the TPU generation determines which pattern."""
ANSWER_SECONDS = 1.0


def check(section: config.Tpu) -> None:
    """Refuse a training on a TPU if there is none.

    A TPU of this machine is recognized by its device files, a TPU with an address by whether something answers at it.
    TPUs with only a name, and everything else, are checked later with TensorFlow by ``strategies.tpu.build``.

    Raises:
        UserError: no TPU was found; the message lists what was checked.
    """
    name = find_tpu(section.tpu)
    if name == "local" and not any(map(glob, DEVICE_FILES)):
        raise UserError(
            f"strategy.kind = 'tpu': this machine has no TPU. Looked for strategy.tpu, {', '.join(TPU_VARIABLES)} and "
            f"{', '.join(DEVICE_FILES)}. Train on a TPU VM, set strategy.tpu=grpc://ADDRESS:8470, or "
            "strategy.kind=mirrored"
        )
    if name.startswith("grpc://"):
        host, _, port = name.split(",")[0].removeprefix("grpc://").partition(":")
        if network.connection_error(host, port or "8470", ANSWER_SECONDS) is not None:
            raise UserError(
                f"strategy.kind = 'tpu': nothing answers at {name}. Set strategy.tpu=grpc://ADDRESS:8470 of a "
                "running TPU"
            )

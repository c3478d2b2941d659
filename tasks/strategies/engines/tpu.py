"""Whether there is a TPU to train on, said within two seconds and before a framework is imported."""

import functools
import importlib.util
import os
from glob import glob

from tasks import config
from tasks.system import network
from tasks.system.errors import UserError
from tasks.system.machine import TPU_VARIABLES, find_tpu

DEVICE_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""A TPU VM has one a chip; which of the two depends on the generation."""
ANSWER_SECONDS = 1.0
METADATA_SERVER = "metadata.google.internal"


def check(section: config.Tpu) -> None:
    """Refuse a training on a TPU where there is none.

    A TPU of this machine is seen by its device files, one that has an address by whether anything answers there, one
    that has only a name by whether this machine can ask Google Cloud for it. TensorFlow, which would wait for minutes,
    is asked later, by ``strategies.tpu.build``.

    Raises:
        UserError: says what was looked for.
    """
    name = find_tpu(section.tpu)
    files = [file for pattern in DEVICE_FILES for file in glob(pattern)]
    if name == "local":
        if not files:
            raise UserError(
                f"strategy.kind = 'tpu': there is no TPU here. Looked for {_seen(section)}. Train on a TPU VM, "
                "give strategy.tpu=grpc://ADDRESS:8470, or take strategy.kind=mirrored"
            )
    elif name.startswith("grpc://"):
        if not _answers(*_place_of(name.split(",")[0].removeprefix("grpc://"), "8470")):
            raise UserError(
                f"strategy.kind = 'tpu': nothing answers at {name}, which is the TPU by {_seen(section)}. Give "
                "strategy.tpu=grpc://ADDRESS:8470 of one that runs"
            )
    elif not (importlib.util.find_spec("googleapiclient") and importlib.util.find_spec("oauth2client")):
        raise UserError(
            f"strategy.kind = 'tpu': '{name}' is a name, by {_seen(section)}, and to look it up TensorFlow needs "
            "the package cloud-tpu-client: install it, or give strategy.tpu=grpc://ADDRESS:8470"
        )
    elif not _answers(*_place_of(os.environ.get("GCE_METADATA_HOST", METADATA_SERVER), "80")):
        raise UserError(
            f"strategy.kind = 'tpu': '{name}' is a name, by {_seen(section)}, and this machine cannot ask Google "
            f"Cloud for it: {METADATA_SERVER} does not answer. Give strategy.tpu=grpc://ADDRESS:8470, or train on a "
            "machine in Google Cloud"
        )


def _seen(section: config.Tpu) -> str:
    """Return every place and what is there."""
    places = {"strategy.tpu": section.tpu or "null"}
    places |= {name: os.environ.get(name) or "not set" for name in TPU_VARIABLES}
    places |= {pattern: ", ".join(glob(pattern)) or "no such file" for pattern in DEVICE_FILES}
    return ", ".join(f"{place} ({what})" for place, what in places.items())


def _place_of(address: str, port: str) -> tuple[str, str]:
    """Return the host and the port of ``host:port``, or of ``host`` alone."""
    host, _, given = address.partition(":")
    return host, given or port


def _answers(host: str, port: str) -> bool:
    """Return whether a connection is accepted within ``ANSWER_SECONDS``."""
    ask = functools.partial(network.connection_error, host, port, ANSWER_SECONDS)
    return network.with_timeout(ANSWER_SECONDS, ask, TimeoutError()) is None

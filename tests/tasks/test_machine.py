import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from tasks.system import machine


@pytest.mark.parametrize(
    ("named", "count", "seen"),
    [
        (None, 2, ["0", "1"]),
        ("1,0", 2, ["1", "0"]),
        ("", 2, []),
        ("-1", 2, []),
        ("0", 0, []),
        ("GPU-ab", 8, ["GPU-ab"]),
    ],
)
def test_the_visible_gpus_are_those_of_the_driver_that_the_user_leaves(gpus, monkeypatch, named, count, seen):
    gpus(count, named)
    assert machine.visible_gpus() == seen

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlInit=no_driver))
    assert machine.visible_gpus() == []


def test_a_free_port_is_none_that_an_outgoing_connection_may_take():
    ports = machine.free_ports(20)
    assert len(set(ports)) == 20
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert lowest < machine.OWN_PORTS.stop or all(port in machine.OWN_PORTS for port in ports)

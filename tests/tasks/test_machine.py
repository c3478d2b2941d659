import sys
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

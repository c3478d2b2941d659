"""What is not public of a dependency is used with versions that were tried."""

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tensorflow as tf

from tasks.system import upstream


@pytest.mark.parametrize("package", upstream.TRIED)
def test_the_versions_are_those_that_were_tried(package):
    tried = upstream.TRIED[package]
    assert f"{version(package)}.".startswith(f"{tried}."), f"try every function of upstream.py, then raise {tried}"


def resident_bytes(which):
    (kilobytes,) = re.findall(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def test_a_file_is_not_read_as_a_whole(tmp_path):
    path, size = str(tmp_path / "holes"), 64_000_000
    Path(path).touch()
    os.truncate(path, size)

    @tf.function(autograph=False)
    def row(number):
        return upstream.bytes_of_file(path, size)[128:][number]

    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The kernel forgets what there was at most.
    assert row(tf.constant(3)) == 0
    assert resident_bytes("VmHWM") - before < size / 4

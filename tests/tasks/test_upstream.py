"""What is not public of a dependency is used in tasks/system/upstream.py alone, with versions that were tried."""

import ast
import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import tensorflow as tf

from tasks.system import upstream

# Modules that a dependency does not promise, in whatever way they are named.
PRIVATE = re.compile(
    r"keras\.src|tensorflow\.(core|python|compiler)|tensorflow_datasets\.core|jaxlib|mlflow\.utils|(\w+\.)+_[a-z]"
)


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


def test_what_is_not_public_is_used_in_one_room():
    """Names after an underscore, of other things than ``self``, and modules that a dependency does not promise."""
    public = {"_exit", "_replace", "_fields"}  # In spite of the underscore.
    found = []
    for path in sorted(file for folder in ("tasks", "flows") for file in Path(folder).rglob("*.py")):
        if path.name == "upstream.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                name = ast.unparse(node)
                if node.attr not in public and ast.unparse(node.value) not in ("self", "cls"):
                    found.append(f"{path}:{node.lineno} {name}")
            elif isinstance(node, ast.ImportFrom | ast.Import):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [f"{module}{one.name}" for one in node.names]
                found += [
                    f"{path}:{node.lineno} {name}"
                    for name in names
                    if PRIVATE.match(name) and not name.startswith(("tasks.", "flows."))
                ]
    assert found == []

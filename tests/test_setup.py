"""The Makefile, the lock, and the project's copy that all other tests stand on."""

import hashlib
import itertools
import os
import platform
import re
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
TARGETS = [
    "setup", "run", "test", "test-slow", "test-exhaustive", "lint", "bench", "ui", "clean", "lock",
    "picture", "docs", "audit", "sbom", "help",
]  # fmt: skip


def test_make_alone_lists_every_target(project, run):
    result = run(["make"])
    assert result.returncode == 0
    listed = re.findall(r"^  make (\S+) +\S", result.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS)
    assert all(len(line) <= 120 for line in result.stdout.splitlines())


def test_the_workflows_call_what_there_is():
    called = [text for path in (ROOT / ".github" / "workflows").iterdir() for text in path.read_text().splitlines()]
    targets = [found[1] for line in called if (found := re.search(r"- run: make (\S+)", line))]
    assert sorted(targets) == ["audit", "sbom", "setup", "test-exhaustive"]
    assert set(targets) <= set(TARGETS)


@pytest.mark.usefixtures("own_code")
def test_what_is_installed_is_not_installed_again(project, run):
    stamp = project / ".venv" / ".installed"
    assert "--require-hashes" in run(["make", "--dry-run", "setup"]).stdout
    stamp.parent.mkdir()
    stamp.touch()
    for target in ("setup", "run", "test"):
        assert "install" not in run(["make", "--dry-run", target]).stdout
    later = time.time() + 10
    for changed in ("requirements.lock", "pyproject.toml"):
        before = (project / changed).stat().st_mtime
        os.utime(project / changed, (later, later))
        assert "--require-hashes" in run(["make", "--dry-run", "run"]).stdout, f"{changed} is newer than the stamp"
        os.utime(project / changed, (before, before))


@pytest.mark.slow
def test_an_install_that_fails_leaves_no_stamp_and_pip_counts_the_packages(project, run):
    stamp = project / ".venv" / ".installed"
    (project / "requirements.lock").write_text(f"./gone.whl --hash=sha256:{'0' * 64}\n")
    result = run(["make", "setup", f"PYTHON={sys.executable}"])
    assert result.returncode == 2
    assert "gone.whl" in result.stderr
    assert not stamp.exists()

    wheels = project / "wheels"
    wheels.mkdir()
    pins = [f"nothing{i}==1.0 --hash=sha256:{_write_wheel(wheels, f'nothing{i}')}" for i in range(20)]
    (project / "requirements.lock").write_text("\n".join([*pins, f"gone==1.0 --hash=sha256:{'0' * 64}", ""]))
    # Without uv, as most machines are; in the .venv that is there.
    result = run(["make", "setup", f"PYTHON={sys.executable}", "UV=", f"PIP_FIND_LINKS={wheels}", "PIP_NO_INDEX=1"])
    assert "\n  20 of 21 packages are here\n" in result.stdout
    assert "Collecting" not in result.stdout
    assert result.returncode == 2, "pip's failure is make's"
    assert "gone==1.0" in result.stderr
    assert not stamp.exists()


def _write_wheel(folder, name):
    """Write a wheel of a package with nothing in it; return its sha256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_python_that_is_not_there_is_refused(project, run):
    result = run(["make", "setup", "PYTHON=python9.9"])
    assert result.returncode == 2
    assert "python9.9 is not there: install Python 3.11, 3.12 or 3.13" in result.stderr
    assert not (project / ".venv").exists()


@pytest.mark.usefixtures("own_code")
def test_clean_removes_what_runs_leave_and_nothing_else(project, run):
    before = {path for path in project.rglob("*") if not {".git", "__pycache__", "code.json"} & set(path.parts)}
    (project / ".venv").mkdir()
    left = [
        "mlruns/mlflow.db", "mlruns/runs/1/run.json", "mlruns/code.json", "metrics/test.json", "data/some/raw/a",
        "data/some/prepared/b", "tasks/__pycache__/config.pyc", ".mypy_cache/x", ".dvc/cache/files/md5/00/1",
    ]  # fmt: skip
    kept = ["data/some/dvc.yaml", ".venv/x"]
    for name in left + kept:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    assert run(["make", "clean"]).returncode == 0
    assert [name for name in left if (project / name).exists()] == []
    assert [name for name in kept if not (project / name).exists()] == []
    assert [path for path in before if not path.exists()] == []
    assert (project / "mlruns").is_dir()


def test_clean_leaves_the_folder_of_a_service_that_runs(project, run):
    (project / "mlruns" / "up").mkdir()
    with FileLock(project / "mlruns" / "up" / "lock"):
        refused = run(["make", "clean", f"PYTHON={sys.executable}"])
    assert refused.returncode == 2
    assert "end it first, with .venv/bin/stratagem down" in refused.stderr
    assert (project / "mlruns" / "up" / "lock").exists()
    assert run(["make", "clean", f"PYTHON={sys.executable}"]).returncode == 0
    assert not (project / "mlruns" / "up").exists()


@pytest.mark.parametrize(
    "requirement",
    [*PYPROJECT["dependencies"], *itertools.chain.from_iterable(PYPROJECT["optional-dependencies"].values())],
    ids=lambda text: text,
)
def test_the_lock_holds_every_requirement(requirement):
    wanted = Requirement(requirement)
    name = re.escape(wanted.name).replace("_", "[_-]")
    pins = re.findall(rf"^{name}==([^\s;]+)", LOCK, re.MULTILINE | re.IGNORECASE)
    assert pins, "run `make lock`"
    assert all(wanted.specifier.contains(pin) for pin in pins)


def test_the_lock_names_no_machine_and_no_index():
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host|(?<![\w.])/\w", LOCK)
    for line in LOCK.splitlines():
        assert re.match(r"#|    |[A-Za-z0-9]", line)
    pins = re.findall(r"^[A-Za-z0-9][\w.-]*==.* \\$", LOCK, re.MULTILINE)
    assert len(pins) == len(re.findall(r"==[^\n]*\\\n +--hash=sha256:[0-9a-f]{64}", LOCK)), "each has a hash"


def test_child_processes_import_the_copy(project, tmp_path, run):
    code = "import tasks, flows; print(tasks.__file__, flows.__file__)"
    result = run(["python", "-c", code], cwd=tmp_path)
    assert result.stdout.split() == [f"{project}/tasks/__init__.py", f"{project}/flows/__init__.py"], result.stderr


def test_every_package_is_for_this_python():
    """uv installs one whose Requires-Python ends below this Python, and pip refuses the whole lock then."""
    wanted = {one.name: one.metadata.get("Requires-Python") for one in metadata.distributions()}
    now = platform.python_version()
    assert [name for name, versions in wanted.items() if versions and now not in SpecifierSet(versions)] == []

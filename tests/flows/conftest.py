"""Projects whose data are prepared, what each process imports, and commands that are ended in their middle."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import hosts as benchmark_hosts
from tests.waiting import wait

# A file `sitecustomize.py` in PYTHONPATH is imported by every Python before anything else.
RECORD_IMPORTS = """
import importlib.machinery, os, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("tensorflow", "keras", "jax", "mlflow", "prefect", "numpy"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def record_and_execute(module):
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(f"{os.getpid()} {name}\\n")
            execute(module)

        spec.loader.exec_module = record_and_execute
        return spec

sys.meta_path.insert(0, Recorder())
"""


@dataclass
class Command:
    """A command that runs, with what it has printed so far."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    family: list[psutil.Process] = field(default_factory=list)

    def wait_until(self, awaited: str | Callable[[], object], of: Path | None = None) -> None:
        """Wait until standard error (or ``of``) holds a text, or a condition holds; note its child processes then."""

        def happened() -> object:
            found = awaited in (of or self.err).read_text() if isinstance(awaited, str) else awaited()
            assert found or self.process.poll() is None, self.err.read_text()
            return found

        wait(str(awaited), happened)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def survivors(self, timeout_seconds: float = 120) -> list[str]:
        """Return the command lines of the children that are still there after a while."""
        _, alive = psutil.wait_procs(self.family, timeout_seconds)
        return [" ".join(child.cmdline()) for child in alive if child.is_running()]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    """Start a command in a session of its own; at the module's end it and all its children are ended."""
    # A test run in a shell's background ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started: list[Command] = []
    folder = tmp_path_factory.mktemp("started")

    def start(*args: str, cwd: Path | None = None, **environment: str) -> Command:
        out, err = (folder / f"{len(started)}.{name}" for name in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                args,
                cwd=cwd,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        started.append(Command(process, out, err))
        return started[-1]

    yield start
    signal.signal(signal.SIGINT, before)
    for command in reversed(started):
        if command.process.poll() is None:
            command.family += psutil.Process(command.process.pid).children(recursive=True)
            command.process.send_signal(signal.SIGTERM)
            try:
                command.process.wait(60)
            except subprocess.TimeoutExpired:
                command.process.kill()
                command.process.wait()
        for child in command.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture
def hosts() -> Iterator[Callable[..., benchmark_hosts.Hosts]]:
    """Hosts with a network between them, which end with the test: ``hosts(2, loss=0.02).command(0, "ls")``."""
    if reason := benchmark_hosts.missing():
        pytest.skip(reason)
    with contextlib.ExitStack() as opened:
        yield lambda count, **wire: opened.enter_context(benchmark_hosts.made(count, **wire))


@pytest.fixture(scope="session")
def prepared_template(project_template: Path, made_once: Callable[..., Path]) -> Path:
    """The project with its data prepared by the real stages, all committed."""

    def make(template: Path) -> None:
        shutil.copytree(project_template, template, symlinks=True, dirs_exist_ok=True)
        deployments = template / "prefect.yaml"
        hour = (datetime.now(UTC).hour + 12) % 24  # At 3 o'clock, nightly takes the only worker from the test.
        deployments.write_text(deployments.read_text().replace('"0 3 * * *"', f'"0 {hour} * * *"'))
        environment = os.environ | {"PYTHONPATH": str(template)}
        done = subprocess.run(
            ["stratagem", "data", "prepare"], cwd=template, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        commit = ["commit", "--quiet", "--all", "--allow-empty", "-m", "prepared"]
        subprocess.run([*git, *commit], cwd=template, check=True)

    return made_once("prepared", make)


@pytest.fixture
def prepared_project(
    prepared_template: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of the project with prepared data and an empty MLflow store: the current folder, and what child processes
    import."""
    folder = tmp_path / "prepared"
    shutil.copytree(prepared_template, folder, symlinks=True)
    shutil.copy(empty_store, folder / "mlruns")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@dataclass
class Imports:
    """Records which process imports which framework, of the processes that have ``environment``."""

    environment: dict[str, str]
    record: Path

    def of(self, name: str) -> list[int]:
        """Return the ids of the processes that imported it."""
        lines = [line.split() for line in self.record.read_text().splitlines()]
        return [int(pid) for pid, module in lines if module == name]


@pytest.fixture(scope="session")
def record_imports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Imports]:
    """Return a new record of imports for commands in a project: ``record_imports(project)``."""

    def record_imports(project: Path) -> Imports:
        folder = tmp_path_factory.mktemp("recorder")
        (folder / "sitecustomize.py").write_text(RECORD_IMPORTS)
        (folder / "imports.txt").touch()
        path = f"{folder}{os.pathsep}{project}"
        return Imports({"PYTHONPATH": path, "IMPORTS": str(folder / "imports.txt")}, folder / "imports.txt")

    return record_imports


@dataclass
class Finished:
    """A run that `stratagem run --json` finished, and which process imported what."""

    project: Path
    flow_process: int
    out: str
    err: str
    imports: Imports

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture(scope="session")
def finished(
    prepared_template: Path, record_imports: Callable[[Path], Imports], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """One run of two epochs on data that are prepared."""
    project = tmp_path_factory.mktemp("finished") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    imports = record_imports(project)
    process = subprocess.Popen(
        ["stratagem", "run", "--json", "--set", "train.epochs=2"],
        cwd=project,
        env=os.environ | imports.environment | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return Finished(project, process.pid, out, err, imports)


@pytest.fixture
def in_finished(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """The same, with its project as the current folder."""
    monkeypatch.chdir(finished.project)
    monkeypatch.setenv("PYTHONPATH", str(finished.project))
    return finished

"""Commands with processes of their own, which are watched, ended one by one, and counted."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes.trainings import SAME

# A model that trains in no time, on real data, for long enough to be disturbed.
SETTINGS = """
input: {augmentation: {crop_padding: 0}}
model: {name: mlp, options: {units: [16]}}
schedule: {kind: constant, learning_rate: 0.01}
train: {epochs: 12}
checkpoint: {every_epochs: 1}
tracking: {system_metrics: false}
"""


@dataclass
class Command:
    """A `stratagem` command that runs."""

    process: subprocess.Popen[str]
    project: Path
    out: Path
    err: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def members(self, entry: str) -> list[psutil.Process]:
        """Return its child processes `python -m tasks <entry>`, in the order of their start; none once it has ended."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= {child.pid: child for child in children}
        found = {child.pid: child for child in children if _runs(child, entry)}
        return [found[pid] for pid in sorted(found) if not _is_fork(found[pid], found)]

    def wait_until(self, condition: Callable[[], object], timeout_seconds: float = 900) -> None:
        """Wait until a condition holds while the command runs."""
        end = time.monotonic() + timeout_seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.err.read_text()}"
            assert time.monotonic() < end, f"it never came: {self.err.read_text()}"
            time.sleep(0.01)

    def open_servers(self) -> list[str]:
        """Return the addresses of its cluster's members at which this process, which is none of them, is let in."""
        found = []
        for member in self.members("serve"):
            for addresses in json.loads(member.environ()["TF_CONFIG"])["cluster"].values():
                for address in addresses:
                    host, _, port = address.rpartition(":")
                    with contextlib.suppress(ConnectionRefusedError):
                        socket.create_connection((host, int(port)), 10).close()
                        found.append(address)
        return found

    def reached_by(self) -> tuple[set[str], set[str]]:
        """Return at which addresses of this machine its processes listen, and the interfaces that its cluster's members
        have."""
        mine = {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        listening = [one for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        interfaces = set()
        for member in (one for entry in ("serve", "assist", "tf_server") for one in self.members(entry)):
            lines = Path(f"/proc/{member.pid}/net/dev").read_text().splitlines()
            interfaces |= {line.partition(":")[0].strip() for line in lines if ":" in line}
        return {one.laddr.ip for one in listening if one.pid in mine}, interfaces

    def checkpoints(self) -> list[int]:
        """Return the steps of the newest run that are saved."""
        runs = sorted((self.project / "mlruns" / "runs").glob("*"), key=lambda run: run.stat().st_mtime)
        return sorted(int(path.name) for path in runs[-1].glob("checkpoints/*") if path.name.isdigit()) if runs else []

    def end(self, timeout_seconds: float = 900) -> int:
        """Wait for the command's end and return its exit code."""
        return self.process.wait(timeout_seconds)

    @property
    def result(self) -> dict[str, Any]:
        """The record that it printed."""
        return json.loads(self.out.read_text())

    def survivors(self) -> list[str]:
        """Return the child processes that are still there a while after the command's end."""
        _, alive = psutil.wait_procs(list(self.seen.values()), 120)
        return [str(child) for child in alive if child.is_running()]


def _runs(process: psutil.Process, entry: str) -> bool:
    try:
        return process.cmdline()[-2:] == ["tasks", entry]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _is_fork(process: psutil.Process, of: Collection[int]) -> bool:
    """Whether it is a child of a stage process that does not run its own program yet."""
    try:
        return process.ppid() in of
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def mlflow_runs(cluster_project: Path) -> Callable[[], list[dict[str, str]]]:
    """Return a function that returns the tags and the status of every MLflow run in the project."""

    def mlflow_runs() -> list[dict[str, str]]:
        with closing(sqlite3.connect(cluster_project / "mlruns" / "mlflow.db")) as database:
            runs = database.execute("SELECT run_uuid, status FROM runs").fetchall()
            tags = database.execute("SELECT run_uuid, key, value FROM tags").fetchall()
        return [{"status": status} | {key: value for run, key, value in tags if run == of} for of, status in runs]

    return mlflow_runs


@pytest.fixture
def cluster_project(digits: object, project: Path, empty_store: Path) -> Path:
    """A project with the digits prepared, an empty MLflow store, and cluster.yaml, a recipe of a short training."""
    shutil.copy(empty_store, project / "mlruns")
    (project / "cluster.yaml").write_text(SETTINGS)
    return project


@pytest.fixture
def stratagem(cluster_project: Path) -> Iterator[Callable[..., Command]]:
    """Start a command in the project: ``stratagem("train", "train.epochs=3", TF_CONFIG=...)``; it prints JSON."""
    # A test run in a shell's background ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started: list[Command] = []

    def stratagem(command: str, *overrides: str, options: tuple[str, ...] = (), **environment: str) -> Command:
        out, err = (cluster_project.parent / f"{len(started)}.{name}" for name in ("out", "err"))
        recipe = ["cluster.yaml"] if command in ("run", "train") else []
        chosen = [part for override in overrides for part in ("--set", override)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [shutil.which("stratagem") or "", command, *recipe, "--json", *chosen, *options],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )
        started.append(Command(process, cluster_project, out, err))
        return started[-1]

    yield stratagem
    signal.signal(signal.SIGINT, before)
    for command in started:
        if command.process.poll() is None:
            command.members("serve")
            command.process.send_signal(signal.SIGKILL)
            command.process.wait()
        for child in command.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


whole_digests: dict[tuple[str, ...], str] = {}


@pytest.fixture
def whole(stratagem, cluster_project):
    """Return the weights_digest of a training that nothing disturbs, with a run folder of its own that is gone then."""

    def whole(*overrides):
        # When checkpoints are written must not change a bit.
        overrides = tuple(override for override in overrides if not override.startswith("checkpoint."))
        if overrides not in whole_digests:
            command = stratagem(
                "train",
                *SAME,
                *overrides,
                "checkpoint.every_steps=null",
                "tracking.experiment=whole",
                options=("--fresh",),
            )
            assert command.end() == 0, command.err.read_text()
            whole_digests[overrides] = command.result["weights_digest"]
            shutil.rmtree(cluster_project / "mlruns" / "runs" / command.result["run_id"])
        return whole_digests[overrides]

    return whole

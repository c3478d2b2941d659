"""Notices of drifted data and of a dead worker, of real commands, arrive."""

import contextlib
import shutil
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from flows.operate import notifications
from tasks.system.machine import free_ports
from tests.flows.receiver import Receiver

pytestmark = pytest.mark.slow


def _write(path: Path, shift: float) -> None:
    """Write a table of 400 rows, two of whose columns tell the label."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 400)
    rows = [
        f"{a + label + shift:.3f},{b - label:.3f},{label}"
        for a, b, label in zip(*rng.normal(size=(2, 400)), labels, strict=True)
    ]
    path.write_text("\n".join(["length,width,kind", *rows]) + "\n")


@pytest.mark.exhaustive
def test_drift_lost_workers_and_a_failure_are_told(project, empty_store, start, run, monkeypatch):
    shutil.copy(empty_store, project / "mlruns")
    receiver = Receiver(free_ports(1)[0])
    receiver.start()
    monkeypatch.setenv(
        notifications.VARIABLE, f"json://me:{receiver.password}@127.0.0.1:{receiver.port}/told?cto=60&rto=60"
    )
    _write(project / "flowers.csv", 0.0)
    added = run(["stratagem", "data", "add", "flowers.csv", "--target", "kind"])
    assert added.returncode == 0, added.stderr
    _write(project / "flowers.csv", 3.0)
    settings = ["dataset.name=flowers", "strategy.kind=multi_worker", "strategy.workers=2", "strategy.max_restarts=1"]
    settings += ["train.epochs=40", "train.early_stopping=null", "checkpoint.every_epochs=1", "register.minimum=null"]
    words = ["stratagem", "run", *(word for one in settings for word in ("--set", one))]
    command = start(*words)

    def checkpoints() -> int:
        return len(list(project.glob("mlruns/runs/*/checkpoints/*/state.json")))

    for number_of_starts in (0, 1):
        while checkpoints() == 0 or command.err.read_text().count("resuming at step") < number_of_starts:
            assert command.process.poll() is None, command.err.read_text()
            time.sleep(0.05)
        command.family = psutil.Process(command.process.pid).children(recursive=True)
        (victim,) = [one for one in command.family if _is_worker(one)]
        victim.kill()
    assert command.process.wait(900) == 1, command.err.read_text()
    try:
        drift, restart, failure = receiver.titles()
        assert drift == "stratagem: the data of flowers have changed"
        assert "mixed-multi_worker-" in restart
        assert restart.endswith(": its workers restarted")
        assert "worker 1 died (SIGKILL)" in receiver.told[1]["message"]
        assert failure.endswith(" failed")
        assert "strategy.max_restarts = 1 allows no further start" in receiver.told[2]["message"]
        # The same data once more, by a run that goes on: its drift is told already.
        again = run(words)
        assert again.returncode == 0, again.stderr
        assert receiver.titles()[:3] == [drift, restart, failure]
        (gate,) = receiver.titles()[3:]
        assert gate.endswith("is the champion")
    finally:
        receiver.close()


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[-2:] == ["tasks", "assist"]
    return False

"""What is still there when commands have ended, and after one that was killed: results, and nothing else."""

import re
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# What runs are for, and what makes the next start faster. All else in the project's folder was there before.
KEPT = re.compile(
    r"mlruns/(runs/[0-9a-f]{32}/.+|mlflow\.db|\.(mlflow\.db|registry)\.lock|code\.json|artifacts/.+|\.id)"
    r"|\.dvc/(config\.local|tmp/.+|cache/.+)|data/digits/(dvc\.lock|raw/.+|prepared/.+)"
    r"|((flows|tasks)/(.+/)?)?__pycache__/.+"
)
HALF_WRITTEN = re.compile(r".*\.partial.*|.*/\.(scratch|prepared|cache|left)\..*|.*\.tmp")
ONE = ("strategy.kind=one_device", "strategy.device=cpu", "checkpoint.every_steps=4", "train.loop=custom")


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def processes_of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LEFT_BY") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # It has just ended, or is another user's.
            continue
    return found


def test_commands_leave_their_results_and_nothing_else(stratagem, cluster_project, tmp_path):
    temporary, mark = tmp_path / "temporary", uuid.uuid4().hex
    temporary.mkdir()
    (temporary / "stratagem-notes").mkdir()
    (temporary / "stratagem-notes" / "a.txt").write_text("the user's own")
    of_the_user = {"stratagem-notes/a.txt"}
    (cluster_project / "mlruns" / "mlflow.db").unlink()  # The first command makes it.
    before = files_of(cluster_project)

    def start(command, *overrides, options=()):
        return stratagem(command, *overrides, options=options, TMPDIR=str(temporary), LEFT_BY=mark)

    def left_behind() -> dict[str, set[str] | list[psutil.Process]]:
        added = files_of(cluster_project) - before
        return {
            "temporary files": files_of(temporary) - of_the_user,
            "temporary folders": {path.name for path in temporary.iterdir()} - {"stratagem-notes"},
            "in the project": {path for path in added if not KEPT.fullmatch(path) or HALF_WRITTEN.fullmatch(path)},
            "logs": {str(path) for path in cluster_project.glob("mlruns/logs")},
            "processes": processes_of(mark),
        }

    nothing = {
        "temporary files": set(), "temporary folders": set(), "in the project": set(), "logs": set(), "processes": [],
    }  # fmt: skip
    plain = start("run", *ONE, "train.epochs=1")
    assert plain.end() == 0, plain.err.read_text()
    assert left_behind() == nothing, "after a run"

    cluster = start("train", "strategy.kind=multi_worker", "train.epochs=1")
    assert cluster.end() == 0, cluster.err.read_text()
    assert left_behind() == nothing, "after a cluster"

    killed = start("run", *ONE, "train.epochs=300")
    killed.wait_until(lambda: len(killed.checkpoints()) > 1)
    killed.process.send_signal(signal.SIGKILL)
    assert killed.end() == -signal.SIGKILL
    end = time.monotonic() + 120
    while processes_of(mark) and time.monotonic() < end:  # They end by themselves.
        time.sleep(0.1)
    assert left_behind()["processes"] == []

    fresh = start("run", *ONE, "train.epochs=1", "train.seed=2", options=("--fresh",))
    assert fresh.end() == 0, fresh.err.read_text()
    assert left_behind() == nothing, "after a start that followed a kill"
    assert (temporary / "stratagem-notes" / "a.txt").read_text() == "the user's own"

"""What the tests of faults train, and how they look at what became of it."""

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil

from tasks.training.checkpoints import Checkpoints

STEPS_IN_EPOCH = 21
EPOCHS = 12
STEPS = EPOCHS * STEPS_IN_EPOCH

# Dropout, whose seeds have to be restored, and checkpoints in the middle of epochs.
SAME = (
    "train.deterministic=true",
    f"train.epochs={EPOCHS}",
    "train.per_replica_batch_size=null",
    "train.global_batch_size=64",
    "model.options={units: [16], dropout: 0.5}",
    "checkpoint.every_steps=4",
)
ONE = ("strategy.kind=one_device", "strategy.device=cpu")
LAYOUTS = {
    "one_device fit": ONE,
    "mirrored custom": ("strategy.kind=mirrored", "strategy.devices=2", "train.loop=custom"),
    "multi_worker custom": ("strategy.kind=multi_worker", "train.loop=custom"),
}
KILL = -signal.SIGKILL


def newest(command) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max(command.checkpoints(), default=0)


def stop_and_wait(command, process) -> None:
    """Stop a process, which takes it a moment to do on a busy machine."""
    process.suspend()
    command.wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def epochs_in_mlflow(project: Path) -> int:
    """How many points of train/loss the one run in the project's store has, without those of `whole`."""
    query = (
        "SELECT count(*) FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING (experiment_id) "
        "WHERE key = 'train/loss' AND experiments.name != 'whole'"
    )
    with closing(sqlite3.connect(project / "mlruns" / "mlflow.db")) as database:
        (found,) = database.execute(query).fetchone()
    return found


def status_of_folder(project: Path, run_id: str) -> str:
    return json.loads((project / "mlruns" / "runs" / run_id / "status.json").read_text())["status"]


def check_whole(command, digest: str, resumed: bool = True, epochs: int = EPOCHS) -> None:
    """The command came to the end of the training that nothing disturbed."""
    err = command.err.read_text()
    assert command.end() == 0, err
    result = command.result
    assert result["weights_digest"] == digest
    assert result["steps"] == epochs * STEPS_IN_EPOCH
    assert [len(values) for values in result["history"].values()] == [epochs] * len(result["history"])
    assert (f"resuming run {result['run_id']}, which is unfinished; --fresh starts a new one" in err) is resumed
    with Checkpoints(command.project / result["checkpoints"], read_only=True) as saved:
        arrays, _ = saved.restore(result["steps"])
    assert arrays["optimizer/0000"] == result["steps"], "each step was done once"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

import contextlib
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import stages, training

SAID = [
    (
        [["train/loss", 0.5, 1, 1200], ["train/accuracy", 0.98765, 1, 1200]],
        "step 1,200: train/loss 0.5, train/accuracy 0.9877",
    ),
    ([["system/cpu_utilization_percentage", 50.0, 1, 3]], None),
    ([], None),
    ({"train/loss": 1}, None),
]


@pytest.mark.parametrize(("points", "said"), SAID)
def test_an_epoch_is_one_line_and_other_numbers_are_none(points, said):
    assert stages.describe(json.dumps(points).encode()) == said


def test_a_task_logs_what_came_within_it_to_the_last_epoch(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").touch()
    Path(".dvc").mkdir()
    monkeypatch.setattr(stages, "get_run_logger", lambda: logging.getLogger("test"))
    run = SimpleNamespace(folder=".")
    with Path("metrics.jsonl").open("a", buffering=1) as file:
        # Of the flow run that this one goes on from; half a line counts when it is whole.
        file.write('[["train/loss", 3.0, 1, 1]]\n[["train/lo')
        with stages.epochs_logged(run, look_seconds=0.01):
            file.write('ss", 2.0, 1, 2]]\n')
            end = time.monotonic() + 60
            while not caplog.messages and time.monotonic() < end:
                time.sleep(0.01)
            assert caplog.messages == ["step 2: train/loss 2"], "while it is trained"
        with stages.epochs_logged(run, look_seconds=60):
            file.write('[["train/loss", 1.0, 1, 3]]\n')
    assert caplog.messages == ["step 2: train/loss 2", "step 3: train/loss 1"]


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(tmp_path):
    first = training.Clock(2.0)
    with contextlib.suppress(KeyboardInterrupt), first.kept(tmp_path / "seconds.json"), first.measure("train"):
        time.sleep(0.1)
        raise KeyboardInterrupt
    resumed = training.Clock()
    for stage in ("data", "train"):
        with resumed.measure(stage):
            time.sleep(0.1)
    with resumed.kept(tmp_path / "seconds.json"):
        seconds = resumed.read()
    assert seconds["train"] >= 0.2
    assert sum(seconds.values()) == pytest.approx(2 * seconds["total"], abs=0.01), "the parts add up to the total"
    assert seconds["total"] >= 2.3
    assert seconds["start-up"] == 2
    assert json.loads((tmp_path / "seconds.json").read_text())["train"] == seconds["train"]

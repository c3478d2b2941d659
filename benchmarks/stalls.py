"""How long a checkpoint holds up the training that writes it, and Keras' BackupAndRestore its own. Prints the seconds
of each as one JSON line.

`python -m benchmarks.stalls ours|keras EVERY_STEPS '{"train.epochs": 3}'`, in the environment of a stage process. Both
train the same model on the same batches.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import keras

from benchmarks.training import trained
from tasks import config, strategies
from tasks.operations import dvc_data


def ours(every_steps: int, overrides: dict[str, object]) -> list[float]:
    """Train by the project's own stage; return the seconds of each ``Checkpoints.save``."""
    from tasks import train

    seconds: list[float] = []

    class Timed(train.Checkpoints):
        def save(self, *args: Any) -> None:
            began = time.perf_counter()
            super().save(*args)
            seconds.append(time.perf_counter() - began)

    values = {**overrides, "checkpoint.every_steps": every_steps, "checkpoint.every_epochs": None}
    with mock.patch.object(train, "Checkpoints", Timed), trained(values):
        pass
    return seconds


def backup_and_restore(every_steps: int, overrides: dict[str, object]) -> list[float]:
    """Train with Keras' ``fit``; return the seconds of each backup, which is written within a step's end."""
    from tasks.training import setup

    settings = config.load(overrides=overrides)
    prepared = dvc_data.load_prepared(settings.dataset.name)
    training = setup.fresh(settings, prepared, strategies.build(settings.strategy))
    seconds: list[float] = []

    class Timed(keras.callbacks.BackupAndRestore):
        def _save_model(self, *args: Any, **options: Any) -> None:
            began = time.perf_counter()
            super()._save_model(*args, **options)
            seconds.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        backup = Timed(str(Path(folder, "backup")), save_freq=every_steps)
        training.model.fit(training.batches.dataset, epochs=settings.train.epochs, callbacks=[backup], verbose=0)
    return seconds


if __name__ == "__main__":
    measure = {"ours": ours, "keras": backup_and_restore}[sys.argv[1]]
    print(json.dumps(measure(int(sys.argv[2]), json.loads(sys.argv[3]))))

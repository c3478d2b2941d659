"""The requests that a stage process serves."""

import errno
import hashlib
import re
import signal
import time

import pytest

from tasks import config
from tasks.process import client, stages
from tasks.process.serve import unexpected
from tasks.system.errors import Interrupted, StratagemError, UserError
from tasks.tracking.store import open_store

# A user's own models. What they print must not mix with the answers.
MODELS = """
import os
import keras

def noisy(input_shape, num_classes):
    print("noise from Python", flush=True)
    os.write(1, b"noise from C\\n")
    os.system("echo noise from a child")
    images = keras.Input(input_shape)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))

def broken(input_shape, num_classes):
    raise RuntimeError("first line\\nthe cause")
"""
QUICK = {"train.epochs": 1, "tracking.system_metrics": False, "model.options": {}}


@pytest.mark.slow
def test_a_stage_process_serves_requests_and_survives_their_errors(project, tiny, capfd):
    (project / "own_models.py").write_text(MODELS)
    noisy = config.load(None, {**QUICK, "dataset.name": "tiny", "model.name": "own_models:noisy"})
    broken = config.load(None, {**QUICK, "dataset.name": "tiny", "model.name": "own_models:broken"})
    try:
        process = client.start_processes(noisy)
        with pytest.raises(StratagemError, match="write_report failed: KeyError: 'nosuch'") as caught:
            stages.write_report(noisy, nosuch=1)
        assert caught.value.exit_code == 1
        with pytest.raises(UserError, match="unknown run 'nosuch'"):
            stages.resume_run(noisy, prepared=tiny, run_id="nosuch")
        running = stages.start_run(noisy, prepared=tiny)
        with pytest.raises(
            UserError, match=r"'own_models:broken' .*RuntimeError: first line the cause, own_models.py line"
        ):
            client.train(broken, tiny, running)
        trained = client.train(noisy, tiny, running)
        assert trained.epochs == 1
        assert client.start_processes(noisy) is process, "all of it by one process"
    finally:
        client.stop_processes()
    kept = project / running.folder / "records" / "uncommitted.diff"
    assert "\n+def noisy(input_shape, num_classes):\n" in kept.read_text(), "the model is in no commit"
    assert not list((project / "mlruns" / "artifacts").rglob("*uncommitted*"))
    tags = open_store().get_run(running.run_id).data.tags
    assert tags["uncommitted_digest"] == hashlib.sha256(kept.read_bytes()).hexdigest()
    shown = capfd.readouterr()
    assert shown.out == ""
    for noise in ("noise from Python", "noise from C", "noise from a child"):
        assert noise in shown.err
    assert "Traceback" not in shown.err


def test_an_interrupt_before_anything_began_leaves_no_run(project, tiny, interrupted_when):
    settings = config.load(None, {**QUICK, "dataset.name": "tiny"})
    try:
        process = client.start_processes(settings)
        asked = time.monotonic()
        # It imports TensorFlow for seconds before it can answer.
        with interrupted_when(lambda: time.monotonic() > asked + 1), pytest.raises(Interrupted):
            stages.start_run(settings, prepared=tiny)
        # Killed where it still imports, on a slow machine, when its patience is over.
        assert process.first.wait(60) in (-signal.SIGINT, -signal.SIGKILL)
    finally:
        client.stop_processes()
    assert {path.name for path in (project / "mlruns").iterdir()} == {".gitkeep", "code.json"}, "as before"


@pytest.mark.parametrize(
    ("stage", "answer"),
    [
        ("end_run", "{'record': None}"),
        ("end_trial", "{'record': None}"),
        ("start_trial", "start_trial was interrupted"),
    ],
)
def test_a_signal_stops_a_stage_but_does_not_leave_a_run_without_an_end(run, stage, answer):
    code = f"""
import signal, sys, types
from dataclasses import replace
from tasks.process import serve, stages
sys.modules["own"] = types.SimpleNamespace(end=lambda: signal.raise_signal(signal.SIGINT))
answers = types.SimpleNamespace(write=print)
print(serve._answer(replace(stages.{stage}, function="own:end", output=object), {{}}, True, answers))
"""
    result = run(["python", "-c", code])
    assert answer in result.stdout, result.stderr


class ResourceExhaustedError(Exception):
    """What TensorFlow calls its own."""


@pytest.mark.parametrize(
    "error",
    [MemoryError(), ResourceExhaustedError("OOM when allocating"), RuntimeError("RESOURCE_EXHAUSTED: Out of mem")],
)
def test_a_stage_without_memory_says_what_to_do(error):
    told = unexpected("train", error)
    assert told.exit_code == 1
    assert str(told).startswith(
        f"train ran out of memory ({type(error).__name__}): set a smaller train.global_batch_size"
    )


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "mlruns/x"), "mlruns/x"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "mlruns/x"), "mlruns/x"),
        (
            RuntimeError("(sqlite3.OperationalError) database or disk is full [SQL: INSERT]"),
            ".+, or the temporary folder,",
        ),
        (ValueError("the file cannot be closed"), "mlruns/y"),
    ],
    ids=str,
)
def test_a_stage_whose_disk_is_full_says_the_same_as_everywhere(project, error, place):
    if place == "mlruns/y":  # A library's own error for it.
        error.__cause__ = OSError(errno.ENOSPC, "No space left on device", place)
    told = unexpected("train", error)
    assert told.exit_code == 1
    assert re.match(rf"{place} cannot be written \(.+\)\. Make room, and run the same command again$", str(told))


@pytest.mark.in_ci(0)
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "imported"), [("tensorflow", "False"), ("jax", "True")])
def test_a_stage_process_imports_nothing_for_others_alone(run, backend, imported):
    code = """
import sys
from tasks.system.imports import import_quietly
import_quietly("tasks.train")
assert not {"sklearn", "matplotlib"} & sys.modules.keys()
print("jax" in sys.modules)
import jax.numpy
print(jax.numpy.arange(3).sum())
"""
    result = run(["python", "-c", code], env={"KERAS_BACKEND": backend})
    assert result.stdout.split() == [imported, "3"], result.stderr

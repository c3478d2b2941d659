"""`python -m tasks`: the requests that a stage process serves, and what DVC calls."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tasks import config, errors, processes
from tasks.errors import Interrupted, StratagemError, UserError
from tasks.process.environment import stage_environment
from tasks.records import Run, TrainingResult

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
        process = processes.start(noisy)
        with pytest.raises(StratagemError, match="nosuch failed: KeyError") as caught:
            processes.run("nosuch", Run, noisy)
        assert caught.value.exit_code == 1
        with pytest.raises(UserError, match="unknown run 'nosuch'"):
            processes.run("resume", Run, noisy, prepared=tiny, run_id="nosuch")
        running = processes.run("start", Run, noisy, prepared=tiny)
        with pytest.raises(StratagemError, match=r"train failed: RuntimeError: the cause \(the whole story: --debug\)"):
            processes.run("train", TrainingResult, broken, prepared=tiny, run=running)
        trained = processes.run("train", TrainingResult, noisy, prepared=tiny, run=running)
        assert trained.epochs == 1
        assert processes.start(noisy) is process, "all of it by one process"
    finally:
        processes.stop()
    shown = capfd.readouterr()
    assert shown.out == ""
    for noise in ("noise from Python", "noise from C", "noise from a child"):
        assert noise in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.slow
def test_a_stage_that_is_interrupted_answers_and_the_process_serves_on(project, tiny, interrupted_when):
    settings = config.load(None, {**QUICK, "dataset.name": "tiny", "train.epochs": 100_000})
    try:
        process = processes.start(settings)
        running = processes.run("start", Run, settings, prepared=tiny)
        checkpoints = project / running.folder / "checkpoints"
        with (
            interrupted_when(lambda: list(checkpoints.glob("[0-9]*"))),
            pytest.raises(Interrupted, match="the training was stopped at step") as caught,
        ):
            processes.run("train", TrainingResult, settings, prepared=tiny, run=running)
        assert f"at step {max(int(path.name) for path in checkpoints.glob('[0-9]*'))}, which" in str(caught.value)
        assert caught.value.exit_code == 130
        assert processes.run("finish", Run, settings, run=running, status="KILLED").run_id == running.run_id
        assert processes.start(settings) is process
    finally:
        processes.stop()


def test_an_interrupt_before_anything_began_leaves_no_run(project, tiny, interrupted_when):
    settings = config.load(None, {**QUICK, "dataset.name": "tiny"})
    try:
        process = processes.start(settings)
        asked = time.monotonic()
        # It imports TensorFlow for seconds before it can answer.
        with interrupted_when(lambda: time.monotonic() > asked + 1), pytest.raises(Interrupted):
            processes.run("start", Run, settings, prepared=tiny)
        assert process.first._process.wait(60) == -signal.SIGINT
    finally:
        processes.stop()
    assert [path.name for path in (project / "mlruns").iterdir()] == [".gitkeep"]


@pytest.mark.slow
def test_a_stage_process_ends_in_its_middle_when_its_input_closes(project, tiny):
    settings = config.load(None, {**QUICK, "dataset.name": "tiny", "train.epochs": 100_000})
    try:
        running = processes.run("start", Run, settings, prepared=tiny)
    finally:
        processes.stop()
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=stage_environment(settings),
        text=True,
    )
    with process:
        values = {"prepared": tiny.model_dump(mode="json"), "run": running.model_dump(mode="json")}
        request = {"id": 1, "stage": "train", "arguments": {"settings": settings.to_json(), **values}}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        checkpoints = project / running.folder / "checkpoints"
        end = time.monotonic() + 300
        while not list(checkpoints.glob("[0-9]*")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.stdin.close()
        assert process.wait(120) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare"], "python -m tasks prepare: give the name of a folder in data/"),
        (["prepare", "nosuch"], "there is no dataset folder data/nosuch"),
        (["train", "--set", "train.epochs=0"], "train.epochs = 0"),
        (["train", "nosuch"], "unknown recipe 'nosuch'"),
    ],
    ids=["no name", "no folder", "no epochs", "no recipe"],
)
def test_a_users_mistake_is_one_message(project, run, tmp_path, arguments, message):
    command = [sys.executable, "-m", "tasks", *arguments]
    result = run(command)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    # Under DVC the message goes into a file, and from there to whoever started DVC and holds standard input open.
    told = tmp_path / "error.json"
    environment = os.environ | {"STRATAGEM_ERROR": str(told)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stage:
        assert stage.wait(60) == 2
        assert stage.stderr.read() == ""
    assert message in str(errors.from_json(json.loads(told.read_text())))
    assert json.loads(told.read_text())["kind"] == "UserError"


def test_an_unknown_stage_is_refused(project, run):
    result = run([sys.executable, "-m", "tasks", "trian"])
    assert result.returncode == 2
    assert "invalid choice: 'trian'" in result.stderr


class ResourceExhaustedError(Exception):
    """What TensorFlow calls its own."""


@pytest.mark.parametrize(
    "error",
    [MemoryError(), ResourceExhaustedError("OOM when allocating"), RuntimeError("RESOURCE_EXHAUSTED: Out of mem")],
)
def test_a_stage_without_memory_says_what_to_do(error):
    from tasks.__main__ import _unexpected

    told = _unexpected("train", error)
    assert told.exit_code == 1
    assert str(told).startswith(
        f"train ran out of memory ({type(error).__name__}): give a smaller train.global_batch_size"
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
    from tasks.__main__ import _unexpected

    if place == "mlruns/y":  # A library's own error for it.
        error.__cause__ = OSError(errno.ENOSPC, "No space left on device", place)
    told = _unexpected("train", error)
    assert told.exit_code == 1
    assert re.match(rf"{place} cannot be written \(.+\)\. Make room, and give the same command again$", str(told))


@pytest.mark.parametrize(("backend", "imported"), [("tensorflow", "False"), ("jax", "True")])
def test_a_stage_process_imports_jax_for_itself_alone(run, backend, imported):
    code = """
import sys
from tasks.__main__ import _import_quietly
_import_quietly("tasks.train")
print("jax" in sys.modules)
import jax.numpy
print(jax.numpy.arange(3).sum())
"""
    result = run(["python", "-c", code], env={"KERAS_BACKEND": backend})
    assert result.stdout.split() == [imported, "3"], result.stderr


@pytest.mark.slow
def test_a_dataset_that_is_refused_is_one_message_without_tensorflows_own_lines(project, run):
    refused = run([sys.executable, "-m", "tasks", "check", "--set", "dataset.name=wine_quality"])
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: dataset.name = 'wine_quality' is not image classification")

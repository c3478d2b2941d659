"""`stratagem models export` as it is typed, of runs that `stratagem run` and `stratagem train` made."""

import json
import re
import shutil
import signal
import sys

import pytest

# What a stranger has: TensorFlow, the files, and no Keras.
STRANGER = """
import sys
import numpy as np
import tensorflow as tf
images, labels = (np.load(f"data/digits/prepared/test_{kind}.npy") for kind in ("images", "labels"))
model = tf.saved_model.load(sys.argv[1])
print((model.serve(images).numpy().argmax(1) == labels).mean())
"""
# A format that writes half of its files, and takes its time.
SLOW = """
import time
from tasks.serving.formats import Format

def write(model, keras_file, folder):
    (folder / "half").write_text("half")
    time.sleep(600)

FORMAT = Format(write, load=None)
"""


def only_message(done, exit_code):
    """Return the one message that a command ended with."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return message


@pytest.mark.exhaustive
def test_a_run_and_its_registered_model_are_the_same_export(in_finished, run, tmp_path):
    summary = in_finished.summary
    name, number = summary["model_version"].split("/")
    (in_finished.project / "below").mkdir(exist_ok=True)
    folder = in_finished.project / "below" / "out"
    # From a folder below the project's, and from there.
    done = run(["stratagem", "models", "export", summary["run_id"], "--format", "savedmodel", "--to", "out", "--json"],
               cwd=in_finished.project / "below", env={"PYTHONPATH": str(in_finished.project)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    first = json.loads(line)
    assert first == {**json.loads((folder / "export.json").read_text()), "folder": str(folder)}
    assert first["checkpoint"] == summary["checkpoint"]
    assert first["weights_digest"] == summary["weights_digest"]
    assert (first["data_version"], first["git_commit"]) == (summary["data_version"], summary["git_commit"])
    assert first["num_examples"] == 360
    right = run([sys.executable, "-c", STRANGER, str(folder)])
    assert float(right.stdout.splitlines()[-1]) == pytest.approx(summary["metrics"]["test/accuracy"]), right.stderr
    for named in (f"models:/{name}/{number}", f"models:/{name}@challenger"):
        again = run(["stratagem", "models", "export", named, "--format", "savedmodel", "--to", "below/out", "--json"])
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout) == first
        assert "already exists: nothing was written" in " ".join(again.stderr.split())
    shown = run(["stratagem", "models", "export", "latest", "--format", "keras"], env={"COLUMNS": "80"})
    assert shown.returncode == 0, shown.stderr
    assert "360 test examples, at most 0 from Keras" in shown.stdout
    step = summary["checkpoint"].rpartition("/")[2]
    assert (
        shown.stdout.splitlines()[-1] == f"{in_finished.project}/mlruns/runs/{summary['run_id']}/exports/keras-{step}"
    )
    assert [line for line in shown.stdout.splitlines()[:-1] if len(line) > 80] == []


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_cannot_be_exported_is_one_message(in_finished, run):
    summary = in_finished.summary
    name = summary["model_version"].split("/")[0]
    for words, message in {
        ("latest", "--format", "h5"): "unknown export format 'h5'. Allowed: keras, ",
        ("0" * 32, "--format", "keras"): f"unknown run '{'0' * 32}': the newest runs: {summary['run_id']}",
        ("latest", "--format", "keras", "--checkpoint", "7"): "unknown --checkpoint '7'. Allowed: best, latest",
        (
            "models:/none@champion",
            "--format",
            "keras",
        ): f"unknown model 'models:/none@champion': .* has: models:/{name}/1",
        (f"models:/{name}/7", "--format", "keras"): f"unknown model 'models:/{name}/7': .* has: models:/{name}/1",
        (
            f"models:/{name}",
            "--format",
            "keras",
        ): f"'models:/{name}' is not the address of a model: write models:/NAME@ALIAS",
        (f"models:/{name}/1", "--format", "keras", "--checkpoint", "best"): "is a single model: leave --checkpoint out",
        ("latest", "--format", "keras", "--to", "params.yaml"): "params.yaml already exists and is not an export",
    }.items():
        assert re.search(message, only_message(run(["stratagem", "models", "export", *words]), 2)), words


@pytest.mark.slow
def test_a_registered_model_that_is_not_here_any_more_is_one_message(in_finished, run, tmp_path):
    summary, copy = in_finished.summary, tmp_path / "copy"
    shutil.copytree(in_finished.project, copy, symlinks=True)
    here = {"cwd": copy, "env": {"PYTHONPATH": str(copy)}}
    folder = copy / "mlruns" / "runs" / summary["run_id"]
    command = [
        "stratagem",
        "export",
        f"models:/{summary['model_version'].split('/')[0]}@challenger",
        "--format",
        "keras",
    ]
    for file in (folder / "models").glob("*.keras"):
        file.write_bytes(file.read_bytes() + b"more")
    assert f"is a model of run {summary['run_id']} that the run's folder no longer contains" in only_message(
        run(command, **here), 2
    )
    shutil.rmtree(folder)
    assert f"belongs to run {summary['run_id']}, which is not in mlruns/" in only_message(run(command, **here), 2)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_that_was_trained_on_jax_is_exported_on_tensorflow(prepared_project, run):
    on_jax = ["--set", "strategy.kind=data_parallel", "--set", "strategy.devices=2", "--set", "train.epochs=1"]
    trained = run(["stratagem", "train", *on_jax, "--json"])
    assert trained.returncode == 0, trained.stderr
    training = json.loads(trained.stdout)
    done = run(
        ["stratagem", "models", "export", "latest", "--format", "savedmodel", "--json"], env={"KERAS_BACKEND": "jax"}
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["run_id"], made["weights_digest"]) == (training["run_id"], training["weights_digest"])
    assert made["max_difference"] <= 1e-4
    evaluated = run(["stratagem", "evaluate", "--json"])
    assert evaluated.returncode == 0, evaluated.stderr
    right = run([sys.executable, "-c", STRANGER, made["folder"]])
    accuracy = json.loads(evaluated.stdout)["metrics"]["test/accuracy"]
    assert float(right.stdout.splitlines()[-1]) == pytest.approx(accuracy), right.stderr


@pytest.mark.exhaustive
def test_an_export_that_is_interrupted_leaves_nothing(prepared_project, run, start):
    trained = run(["stratagem", "train", "--set", "train.epochs=1"])
    assert trained.returncode == 0, trained.stderr
    (prepared_project / "tasks" / "serving" / "formats" / "slow.py").write_text(SLOW)
    target = prepared_project / "new" / "out"
    command = start(
        "stratagem", "models", "export", "latest", "--format", "slow", "--to", str(target), cwd=prepared_project
    )
    command.wait_until(lambda: list(target.parent.glob(".export.*/out/half")))
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(300) == 130
    assert command.survivors() == []
    assert not target.parent.exists()

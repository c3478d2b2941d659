"""`stratagem predict` as it is typed, of what `stratagem run` registered."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_iris

from tasks import records
from tasks.evaluation import predictions
from tasks.records import EvaluationResult

pytestmark = pytest.mark.slow

# The most memory of what a command used, in MiB.
PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


def test_the_raw_inputs_of_the_test_split_have_the_predictions_of_the_evaluation(
    in_finished, run, tmp_path, record_imports
):
    summary, project = in_finished.summary, in_finished.project
    images = np.load(project / "data/digits/prepared/test_images.npy")
    (tmp_path / "raw").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0]).save(tmp_path / "raw" / f"{number:03}.{('png', 'bmp')[number % 2]}")
    (tmp_path / "raw" / "100a.png").write_bytes(b"none")
    imports = record_imports(project)
    out = tmp_path / "out.jsonl"
    command = ["stratagem", "predict", tmp_path / "raw", "--output", out, "--probabilities"]
    done = run(command, env=imports.environment | {"COLUMNS": "80"})
    assert done.returncode == 1, done.stderr
    assert done.stderr == "error: 1 of 361 examples have no prediction: the column `error` says why\n"
    assert [line for line in done.stdout.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["source"].rpartition("/")[2] for row in rows if row["error"]] == ["100a.png"]
    evaluated = records.load(
        EvaluationResult, project / "mlruns/runs" / summary["run_id"] / "records" / "evaluation.json"
    )
    given = predictions.load(project / evaluated.outputs, evaluated.outputs_sha256)
    shares = np.exp(given.outputs.astype(float))
    shares /= shares.sum(1, keepdims=True)
    told = np.array([[row[f"probability:{name}"] for name in range(10)] for row in rows if not row["error"]])
    np.testing.assert_allclose(told, shares, rtol=1e-4, atol=1e-7)
    assert [row["prediction"] for row in rows if not row["error"]] == [str(one) for one in shares.argmax(1)]
    # One process with the framework and MLflow, which knows the champion; nothing of Prefect, which takes seconds.
    assert imports.of("tensorflow") == imports.of("mlflow") != []
    assert len(imports.of("tensorflow")) == 1
    assert imports.of("prefect") == []


def test_the_answer_comes_whatever_python_buffers(in_finished, run):
    images = in_finished.project / "data/digits/prepared/test_images.npy"
    assert "PYTHONUNBUFFERED" not in os.environ
    done = run(["stratagem", "predict", images, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_examples"] == 360


def test_what_is_refused_is_one_message_before_anything_is_computed(in_finished, run, tmp_path):
    there = tmp_path / "there.csv"
    there.write_text("mine")
    for words, message in {
        ("nothing.png",): "'nothing.png': no such file or folder",
        ("params.yaml", "--model", "models:/none@champion"): "unknown model 'models:/none@champion'",
        ("params.yaml", "--output", str(there)): "exists already: choose another file, or add --force",
        ("params.yaml", "--output", str(tmp_path)): "is a folder: choose a file",
        ("params.yaml", "--output", "none/out.csv"): "the folder none does not exist: create it first",
        ("params.yaml", "--output", "out.xls"): "unknown file extension. Allowed: .jsonl",
        ("params.yaml", "--format", "xml"): "unknown --format 'xml'. Allowed: csv, html, jsonl, parquet",
        ("params.yaml", "--format", "parquet"): "--format parquet needs a file: use --output",
        ("params.yaml", "--format", "csv", "--json"): "both print to standard output",
        ("params.yaml", "--encoding", "x"): "--encoding x: no such encoding",
    }.items():
        done = run(["stratagem", "predict", *words])
        assert done.returncode == 2, (words, done.stderr)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert there.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.csv"]


def test_it_streams_from_a_pipe_to_a_pipe_and_ends_with_its_reader(in_finished):
    names = [str(path) for path in sorted((in_finished.project / "mlruns").rglob("*.png"))]
    command = ["stratagem", "predict", "-", "--format", "jsonl", "--batch-size", "1"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as process:
        for name in names * 100:
            process.stdin.write(f"{name}\n")
        process.stdin.flush()
        # The first answers come while the input is still open.
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        process.stdin.close()
        assert process.wait(300) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
    assert [row["error"] for row in first] == [None] * 3


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)], ids=["Ctrl-C", "SIGTERM"]
)
def test_what_is_interrupted_leaves_nothing(in_finished, start, tmp_path, number):
    read, write = os.pipe()
    with os.fdopen(write, "wb") as pipe:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        out = tmp_path / "out.csv"
        process = subprocess.Popen(
            ["stratagem", "predict", "-", "--output", out], stdin=read, stderr=subprocess.PIPE, start_new_session=True
        )
        os.close(read)
        signal.signal(signal.SIGINT, before)
        pipe.write(b"none.png\n")
        pipe.flush()
        while not list(tmp_path.glob(".out.csv.*")):
            assert process.poll() is None
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=300)
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    assert err.decode().strip().splitlines()[-1:] == ["interrupted"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_the_memory_does_not_grow_with_the_rows(prepared_project, run, tmp_path):
    load_iris(as_frame=True).frame.to_csv("iris.csv", index=False)
    for command in (["data", "add", "iris.csv", "--target", "target"], ["train", "--set", "dataset.name=iris"]):
        done = run(["stratagem", *command, *(["--set", "train.epochs=1"] if command[0] == "train" else [])])
        assert done.returncode == 0, done.stderr
    rows, peaks, out = Path("iris.csv").read_text().splitlines(keepends=True), [], tmp_path / "out.csv"
    for times in (100, 3000):
        Path("many.csv").write_text("".join([rows[0], *rows[1:] * times]))
        command = ["stratagem", "predict", "many.csv", "--model", "latest", "--output", out, "--force"]
        peaks.append(int(run([sys.executable, "-c", PEAK, *command]).stdout))
    with out.open() as file:
        assert sum(1 for _ in file) == 1 + 150 * 3000
    assert peaks[1] < peaks[0] + 60, peaks

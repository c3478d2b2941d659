"""`stratagem plan`: what a training would do on many machines."""

import json

import pytest

GIVEN = ("--step-seconds", "180ms", "--parameters", "25M", "--set", "train.per_replica_batch_size=32")
GIVEN += ("--set", "train.global_batch_size=null")
REFUSED = [
    (("--bandwidth", "25G"), "--bandwidth = '25G': use bits per second, such as 25Gbps or 100Mbit/s"),
    (("--workers", "7", "--set", "train.global_batch_size=64"), "train.global_batch_size = 64 is not divisible by 7"),
]


@pytest.mark.exhaustive
def test_what_is_given_needs_neither_data_nor_a_framework(project, run):
    cluster = ("--workers", "64", "--bandwidth", "25Gbps", "--latency", "50us", "--communication", "nccl")
    failures = ("--mtbf", "30d", "--checkpoint", "1s", "--set", "checkpoint.every_steps=1000")
    done = run(["stratagem", "plan", *cluster, *failures, *GIVEN, "--json"])
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["step_seconds"] == pytest.approx(0.18 + 0.063 + 0.0063)
    assert found["examples_per_second"] == pytest.approx(64 * 32 / 0.2493)
    assert found["bottleneck"] == "computing"
    assert found["failures_a_day"] == pytest.approx(64 / 30)
    assert found["interval_seconds"] == pytest.approx(249.3)
    assert 0.98 < found["goodput"] <= found["best_goodput"] < 1
    told = run(["stratagem", "plan", *cluster, *failures, *GIVEN]).stdout
    lines = dict(line.split("  ", 1) for line in told.splitlines() if not line.startswith(" "))
    assert lines["examples/s"].strip() == "8,215 (6,428 to 11,378)"
    assert lines["best"].strip().startswith("a checkpoint every 4.73 min: 99.0% (98.")
    without = ("--checkpoint", "1s", "--set", "checkpoint.every_steps=1000")
    done = run(["stratagem", "plan", *cluster, *without, *GIVEN])
    assert "every 4.15 min, which takes 0.4% (0.3% to 0.6%) of the time" in " ".join(done.stdout.split()), done.stderr


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_cannot_be_read_is_refused_in_one_message(project, run, words, message):
    given = GIVEN[:2] if "--set" in words else GIVEN
    done = run(["stratagem", "plan", *given, *words])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_is_not_given_is_measured_here(prepared_project, run):
    model = ("--set", "model.name=mlp", "--set", "model.options={units: [32]}")
    done = run(["stratagem", "plan", "--workers", "2", "--mtbf", "30d", "--json", *model])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 64 * 32 + 32 + 32 * 10 + 10
    assert 0 < found["parts_seconds"]["computing"] < found["step_seconds"] < 10
    assert found["checkpoint_seconds"] > 0
    assert found["goodput"] > 0


def test_without_data_it_says_what_to_do(project, run):
    done = run(["stratagem", "plan"])
    assert done.returncode == 2
    assert "stratagem data prepare" in done.stderr
    assert len(done.stderr.splitlines()) == 1

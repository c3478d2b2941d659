"""`stratagem submit` on a real Slurm of two nodes, both on this machine: Debian's packages slurmctld and slurmd."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import records
from tasks.operations import submission
from tasks.runs import entries, outcome
from tasks.system.machine import usable_cores
from tests.flows import slurm
from tests.waiting import wait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(slurm.MISSING), reason=slurm.REASON),
]
# Against a cluster that hangs, on a busy machine.
PATIENCE_SECONDS = 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Slurm's configuration, while its daemons run."""
    with slurm.running(tmp_path_factory.mktemp("slurm")) as path:
        yield path


@pytest.fixture
def project(prepared_project: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with prepared data, from which jobs go to the cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    return prepared_project


def stratagem(*words: str) -> str:
    done = subprocess.run(["stratagem", *words], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(*words: str) -> records.Job:
    return records.Job.model_validate_json(stratagem("submit", *words, "--json"))


def wait_until(job: records.Job, *states: str) -> None:
    """Wait until Slurm says one of these of a job."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (said := state_of(job)) not in states:
        assert said in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), f"{said}: {log_of(job)}"
        assert time.monotonic() < end, f"{said}: {log_of(job)}"
        time.sleep(3)


def state_of(job: records.Job) -> str:
    (said,) = [one["state"] for one in json.loads(stratagem("jobs", "--json")) if one["job"]["id"] == job.id]
    return str(said)


def log_of(job: records.Job) -> str:
    file = Path(job.folder, "output.log")
    return file.read_text() if file.is_file() else ""


def wait_for_log(job: records.Job, text: str) -> None:
    wait(text, lambda: text in log_of(job), PATIENCE_SECONDS)


def tell_slurm(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "same bits"])
def test_a_job_that_is_told_to_stop_is_queued_again_and_ends_with_the_bits_of_a_run_at_home(project, compared):
    sets = [f"--set={one}" for one in ("strategy.kind=multi_worker", "train.epochs=20", "train.deterministic=true")]
    # As many threads as each of two workers has at home, on whose number the last digits depend.
    cores = max(1, usable_cores() // 2)
    job = submit(*sets, "--nodes", "2", "--time", "30", "--option", f"cpus-per-task={cores}")
    wait_for_log(job, " 3/20 ")
    tell_slurm("scancel", "--signal=TERM", job.id)  # As Slurm itself, before the time is up.
    wait_for_log(job, "told to stop; queued again (start 2)")
    assert "is saved. The same command continues" in log_of(job)
    # Slurm may call it FAILED for a moment, after the exit of its script and before it is in the queue.
    wait("the job in the queue", lambda: state_of(job) == "PENDING", PATIENCE_SECONDS)
    tell_slurm("scontrol", "update", f"JobId={job.id}", "StartTime=now")  # Slurm lets two minutes pass.
    wait_until(job, "COMPLETED")
    assert "resuming at step" in log_of(job)
    assert Path(job.folder, "exit_code").read_text() == "0\n"
    (run_id,) = entries.finished()
    trained = outcome.load(entries.find_run(run_id), records.TrainingResult)

    if not compared:
        return
    stratagem("train", *sets, "--set=strategy.launcher=local", "--fresh")
    (other,) = {path.name for path in Path("mlruns/runs").iterdir()} - {run_id}
    at_home = outcome.load(entries.find_run(other), records.TrainingResult)
    assert trained.weights_digest == at_home.weights_digest
    assert trained.steps == at_home.steps


@pytest.mark.exhaustive
def test_the_time_limit_comes_for_real_and_a_cancelled_job_is_not_queued_again(project):
    # Slurm sends the signal up to a minute earlier than it is told; until then a busy machine has a checkpoint.
    job = submit("--set=train.epochs=100000", "--time", "6", "--option", "signal=TERM@150")
    wait_for_log(job, "told to stop; queued again (start 2)")
    wait_until(job, "PENDING")
    tell_slurm("scontrol", "update", f"JobId={job.id}", "StartTime=now")
    wait_for_log(job, "resuming at step")
    stratagem("jobs", "cancel", "latest")
    wait_until(job, "CANCELLED")
    assert log_of(job).count("queued again") == 1


@pytest.mark.exhaustive
def test_what_slurm_refuses_is_one_message_and_leaves_nothing(project):
    done = subprocess.run(["stratagem", "submit", "--partition", "nope"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: launcher slurm: `sbatch` fails")
    assert "nvalid partition" in done.stderr
    assert list(Path("mlruns/jobs").iterdir()) == []
    # sbatch takes these, and they wait until the cluster has other nodes.
    for options in (["--set=strategy.workers=3"], [f"--option=cpus-per-task={os.cpu_count() + 1}"]):
        command = ["stratagem", "submit", "--set=strategy.kind=multi_worker", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        wait_until(submission.find_job("latest"), "PENDING")
        stratagem("jobs", "cancel", "latest")

"""The pods of a Job as processes, each in a network of its own: this machine runs no Kubernetes. Their commands, their
variables and their settings are those of the manifests."""

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tasks import records
from tasks.runs import entries, outcome

SETS = [f"--set={one}" for one in ("strategy.kind=multi_worker", "train.epochs=40", "train.deterministic=true")]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.kubernetes
@pytest.mark.hosts
def test_pods_that_are_told_to_stop_go_on_and_end_with_the_bits_of_a_run_at_home(
    prepared_project, hosts, start, tmp_path, monkeypatch
):
    # As many threads in all of them: the last digits depend on the number.
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    asked = ["--launcher", "kubernetes", "--option", "image=example.org/one", "--option", "claim=project", "--dry-run"]
    done = subprocess.run(["stratagem", "submit", *SETS, *asked], capture_output=True, text=True, check=True)
    settings, service, job = yaml.safe_load_all(done.stdout)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    names = [f"{job['metadata']['name']}-{index}.{service['metadata']['name']}" for index in range(2)]
    pods_at = hosts(2)
    lines = [f"{address} {name}" for address, name in zip(pods_at.addresses, names, strict=True)]
    (tmp_path / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    (tmp_path / "settings.yaml").write_text(settings["data"]["settings.yaml"])
    command = [one.replace("/etc/stratagem", str(tmp_path)) for one in container["command"]]

    def pods() -> list:
        hostnames = tmp_path / "hosts"  # Each pod has a name for itself and for the others, as DNS gives it.
        commands = [pods_at.command(index, *command, names=hostnames) for index in range(2)]
        return [start(*one, JOB_COMPLETION_INDEX=str(index), **environment) for index, one in enumerate(commands)]

    first = pods()
    first[0].wait_until(" 3/40 ")
    first[1].process.send_signal(signal.SIGTERM)  # As Kubernetes does where a node is drained.
    assert [pod.process.wait(1000) for pod in first] == [75, 75]
    assert "is saved. The same command continues" in first[0].err.read_text()
    second = pods()
    assert [pod.process.wait(1000) for pod in second] == [0, 0], second[0].err.read_text()
    assert "resuming at step" in second[0].err.read_text()
    (run_id,) = entries.finished()
    trained = outcome.load(entries.find_run(run_id), records.TrainingResult)

    at_home = ["stratagem", "train", *SETS, "--fresh"]
    subprocess.run(at_home, check=True, capture_output=True, timeout=1200)
    (other,) = {path.name for path in Path("mlruns/runs").iterdir()} - {run_id}
    assert outcome.load(entries.find_run(other), records.TrainingResult).weights_digest == trained.weights_digest

"""Workers over a network that is slow, loses packets and is cut: each worker on a host of its own, see
`benchmarks.hosts`. tests/flows/test_kubernetes.py has the pods of a Job on two such hosts."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts
from tasks import records
from tasks.runs import entries, outcome

EPOCHS = 6
SETS = (
    "strategy.kind=multi_worker",
    "strategy.heartbeat_timeout_seconds=12",
    "train.deterministic=true",
    f"train.epochs={EPOCHS}",
    "model.name=mlp",
    "model.options={units: [256, 256]}",
)
OPTIONS = [word for one in SETS for word in ("--set", one)]
# The last digits depend on the number of threads.
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
# Against a cluster that hangs, on a busy machine.
PATIENCE_SECONDS = 1000
pytestmark = [pytest.mark.slow, pytest.mark.hosts]


def digest(run_id: str) -> str:
    return outcome.load(entries.find_run(run_id), records.TrainingResult).weights_digest


@pytest.fixture(scope="module")
def at_home(prepared_template: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights of a training whose workers are beside each other."""
    folder = tmp_path_factory.mktemp("at_home") / "project"
    shutil.copytree(prepared_template, folder, symlinks=True)
    done = subprocess.run(
        ["stratagem", "train", "--json", *OPTIONS],
        cwd=folder,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["weights_digest"]


@pytest.fixture
def train(prepared_project: Path, start: Callable[..., object]) -> Callable[..., list]:
    """Start the chief and the other worker of a cluster, one on each host: ``train(hosts)``."""

    def train(
        hosts: Hosts, wraps: tuple[tuple[str, ...], ...] = ((), ()), more: tuple[str, ...] = (), **of_other: str
    ) -> list:
        cluster = {"worker": [f"{address}:2222" for address in hosts.addresses]}
        started = []
        for index in range(2):
            place = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            command = hosts.command(index, *wraps[index], "stratagem", "train", *OPTIONS, *more)
            started.append(start(*command, TF_CONFIG=place, **ONE_THREAD, **(of_other if index else {})))
        return started

    return train


def the_one_run() -> str:
    (run_id,) = [path.name for path in Path("mlruns/runs").iterdir()]
    return run_id


def ended_well(commands: list) -> None:
    assert [one.process.wait(PATIENCE_SECONDS) for one in commands] == [0, 0], [one.err.read_text() for one in commands]


@pytest.mark.parametrize("compared", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "same bits"])
def test_a_network_that_is_slow_narrow_loses_packets_and_is_cut_for_a_moment_changes_no_bit(
    hosts, train, request, compared
):
    made = hosts(2, latency_seconds=0.005, loss=0.01, bandwidth=50e6)
    # TCP tries again after longer and longer pauses, and on a busy machine all of that takes longer still.
    commands = train(made, more=("--set", "strategy.heartbeat_timeout_seconds=120"))
    commands[0].wait_until(" 2/")
    made.cut()
    time.sleep(4)
    assert [one.process.poll() for one in commands] == [None, None]
    made.heal()
    ended_well(commands)
    assert "resuming at step" not in commands[0].err.read_text()
    if compared:
        assert digest(the_one_run()) == request.getfixturevalue("at_home")


@pytest.mark.exhaustive
def test_a_link_that_stays_cut_ends_all_with_one_message_and_the_same_command_goes_on(hosts, train, at_home):
    made = hosts(2, latency_seconds=0.005)
    commands = train(made)
    commands[0].wait_until(" 3/")
    made.cut()
    for command in commands:
        assert command.process.wait(PATIENCE_SECONDS) == 1
        (message,) = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
        assert "the same command for each continues from the latest checkpoint" in message
        assert "Traceback" not in command.err.read_text()
    made.heal()
    again = train(made)
    ended_well(again)
    assert "resuming at step" in again[0].err.read_text()
    assert digest(the_one_run()) == at_home


@pytest.mark.exhaustive
def test_a_worker_with_other_code_is_refused_by_name(hosts, train, prepared_project, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(prepared_project, other, symlinks=True)
    with (other / "tasks" / "modeling" / "losses.py").open("a") as file:
        file.write("\n\nOTHER = 1\n")
    commands = train(hosts(2), wraps=((), ("env", f"--chdir={other}")), PYTHONPATH=str(other))
    assert [one.process.wait(PATIENCE_SECONDS) for one in commands] == [1, 2]
    error = commands[1].err.read_text()
    assert "error: worker 1 was started with code " in error, error
    assert "start every member of the cluster with the same command, the same code and packages" in error

"""parameter_server in real processes: one server and workers that train, and are lost in the middle of it."""

import json
import re
import signal
import sys

import numpy as np
import psutil
import pytest

from tasks.system.machine import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Of 1,293 examples, 32 at once; the last step of an epoch has 13.
STEPS_IN_EPOCH = 41

# A training in which nothing moves: an example that is left out or counts twice changes the loss of its epoch, in
# whatever order the workers do the steps.
STILL = (
    "strategy.kind=parameter_server",
    "train.loop=custom",
    "optimizer={kind: sgd}",
    "schedule.learning_rate=1.0e-30",
    "checkpoint.every_steps=10",
)


def cluster(training):
    """The members by their names in the cluster."""
    found = {}
    for process in [*training.members("serve"), *training.members("tf_server")]:
        task = json.loads(process.environ()["TF_CONFIG"])["task"]
        found[f"{task['type']} {task['index']}"] = process
    return found


def wait(training, condition):
    """Four processes import TensorFlow at the same time, also on a machine that is busy with other tests."""
    training.wait_until(condition, timeout_seconds=1200)


def epochs(training):
    """How many lines of the table of epochs were printed."""
    return len(re.findall(r"^ *\d+/\d+  ", training.err.read_text(), re.MULTILINE))


def check_whole(training, num_epochs, prepared):
    """Every step was done, and every epoch counted each example once: its loss is the one of the model that is left."""
    import keras

    from tasks.input.order import carve

    result = training.result
    assert (result["epochs"], result["steps"]) == (num_epochs, num_epochs * STEPS_IN_EPOCH)
    rows = carve(prepared, 0.1, 0)["train"][1]
    split = prepared.splits["train"]
    images, labels = np.load(split.features["image"])[rows], np.load(split.labels)[rows]
    logits = keras.models.load_model(result["final_model"]).predict(images, verbose=0).astype("float64")
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    values = -np.log(shares[np.arange(len(labels)), labels])
    assert values.std() / len(labels) > 1e-5 * values.mean(), "one example more or less would be seen"
    assert result["history"]["train/loss"] == pytest.approx([values.mean()] * num_epochs, rel=1e-6)
    assert result["history"]["train/accuracy"] == pytest.approx([(logits.argmax(1) == labels).mean()] * num_epochs)
    assert len(result["history"]["validation/loss"]) == num_epochs


def shares(training):
    """How many steps each worker's process did, as the log tells."""
    said = " ".join(training.err.read_text().split())
    count, numbers = re.findall(r"workers (\d+) processes did ([\d, ]+) steps", said)[-1]
    steps = [int(number.replace(",", "")) for number in numbers.split(", ")]
    assert len(steps) == int(count)
    return steps


def test_lost_workers_are_replaced_and_used_again(stratagem, digits):
    training = stratagem("train", *STILL, "train.epochs=30", "strategy.heartbeat_timeout_seconds=15")
    wait(training, lambda: epochs(training) > 1)
    assert training.reached_by() == (set(), {"lo"})
    assert training.open_servers() == []
    first = cluster(training)
    assert sorted(first) == ["chief 0", "ps 0", "worker 0", "worker 1"]

    first["worker 1"].kill()
    wait(training, lambda: "worker 1 died (SIGKILL); restarting it (1 of 3)" in training.err.read_text())
    before = epochs(training)
    wait(training, lambda: epochs(training) > before)  # The other one goes on meanwhile.

    first["worker 0"].send_signal(signal.SIGSTOP)
    wait(
        training,
        lambda: "worker 0 sent no heartbeat for 15 s; restarting it (2 of 3)" in training.err.read_text(),
    )
    wait(training, lambda: {"worker 0", "worker 1"} <= cluster(training).keys())
    second = cluster(training)
    assert (second["chief 0"], second["ps 0"]) == (first["chief 0"], first["ps 0"])
    assert {second["worker 0"].pid, second["worker 1"].pid}.isdisjoint({first["worker 0"].pid, first["worker 1"].pid})

    assert training.end(1200) == 0, training.err.read_text()
    check_whole(training, 30, digits)
    # Nobody but the new processes could do what was left.
    done = shares(training)
    assert len(done) >= 3
    assert sum(done) == 30 * STEPS_IN_EPOCH
    assert training.result["restarts"] == ["worker 1 died (SIGKILL)", "worker 0 sent no heartbeat for 15 s"]
    err = training.err.read_text()
    assert "Traceback" not in err
    assert "UNAVAILABLE" not in err
    assert "resuming at step" not in err, "a lost worker ends nothing"
    assert training.survivors() == []


@pytest.mark.parametrize(
    "lost", [("ps 0",), pytest.param(("ps 0", "chief 0"), marks=pytest.mark.exhaustive)], ids=["server", "both"]
)
def test_a_lost_server_or_coordinator_starts_everything_from_the_latest_checkpoint(stratagem, digits, lost):
    training = stratagem("train", *STILL, "train.epochs=30")
    wait(training, lambda: epochs(training) > 1)
    saved = []
    for number, name in enumerate(lost, start=1):
        before = cluster(training)
        saved.append(training.checkpoints()[-1])
        before[name].kill()
        told = f"{name} died (SIGKILL); all 4 processes restart ({number} of 3)"
        wait(training, lambda told=told: told in training.err.read_text())
        wait(training, lambda number=number: training.err.read_text().count("resuming at step") == number)
        assert not psutil.wait_procs(list(before.values()), 60)[1]
        seen = epochs(training)
        wait(training, lambda seen=seen: epochs(training) > seen + 1)
    assert training.end(1200) == 0, training.err.read_text()
    check_whole(training, 30, digits)
    resumed = [int(step) for step in re.findall(r"resuming at step (\d+)", training.err.read_text())]
    # What was being written when it died may have become whole, or not.
    steps = [step for pair in zip(saved, resumed, strict=True) for step in pair]
    assert steps[0] > STEPS_IN_EPOCH
    assert steps == sorted(steps)
    assert sum(shares(training)) == 30 * STEPS_IN_EPOCH - resumed[-1], "the last coordinator did what was left"
    assert training.result["restarts"] == [f"{name} died (SIGKILL)" for name in lost]
    assert "Traceback" not in training.err.read_text()
    assert training.survivors() == []


# Trains and evaluates with each (name, seed, settings), in one cluster as long as its settings stay the same.
TRAIN_AND_EVALUATE = """
import json, sys
from pathlib import Path
from tasks import config, records
from tasks.operations import dvc_data
from tasks.process import client, stages

prepared = dvc_data.load_prepared("digits")
found = {}
for name, overrides in json.loads(sys.argv[1]):
    settings = config.load(None, {"tracking.system_metrics": False, **overrides})
    run = stages.start_run(settings, prepared=prepared)
    training = client.train(settings, prepared, run)
    evaluation = client.evaluate(settings, prepared, training, run)
    stages.end_run(settings, run=run, status="FINISHED")
    placement = json.loads(Path(run.folder, "records", "placement.json").read_text())
    found[name] = {
        "training": training.model_dump(mode="json"), "test": evaluation.metrics, "placement": placement
    }
print(json.dumps(found))
"""


def train_and_evaluate(run, trainings):
    done = run([sys.executable, "-c", TRAIN_AND_EVALUATE, json.dumps(trainings)], timeout_seconds=3000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("chief_dies", [False, True])
def test_commands_with_a_tf_config_train_together(stratagem, mlflow_runs, chief_dies):
    ports = free_ports(3)
    addresses = dict(zip(("chief", "worker", "ps"), ([f"127.0.0.1:{port}"] for port in ports), strict=True))
    chief, *others = (
        stratagem(
            "train", *STILL, f"train.epochs={1000 if chief_dies else 2}",
            TF_CONFIG=json.dumps({"cluster": addresses, "task": {"type": job, "index": 0}}),
        )
        for job in addresses
    )  # fmt: skip
    if chief_dies:
        wait(chief, chief.checkpoints)
        chief.members("serve")
        chief.process.kill()
    assert chief.end(1200) == (-signal.SIGKILL if chief_dies else 0), chief.err.read_text()
    for other in others:
        assert other.end() == 0, other.err.read_text()
        assert "has finished, and so has the chief" in other.err.read_text()
        assert other.out.read_text() == ""
        assert "Traceback" not in other.err.read_text()
    if not chief_dies:
        assert chief.result["steps"] == 2 * STEPS_IN_EPOCH
        assert [run["status"] for run in mlflow_runs()] == ["FINISHED"], "the chief alone tracks"
    assert [command.survivors() for command in (chief, *others)] == [[], [], []]


SERVERS = {"strategy.kind": "parameter_server", "train.loop": "custom"}
ONE_DEVICE = {"strategy.kind": "one_device", "strategy.device": "cpu", "train.loop": "custom"}
SEEDS = 3


@pytest.mark.exhaustive
def test_one_worker_trains_as_one_device_does(digits, run):
    """Everything of params.yaml: Dropout, augmentation, a cosine. One worker does the steps in their order."""
    common = {"train.dtype_policy": "float64", "train.epochs": 3, "train.steps_per_execution": 4}
    alone = {"strategy.workers": 1, "strategy.ps": 2}
    found = train_and_evaluate(run, [["servers", SERVERS | alone | common], ["one", ONE_DEVICE | common]])
    servers, one = found["servers"], found["one"]
    assert servers["training"]["steps"] == one["training"]["steps"] == 3 * STEPS_IN_EPOCH
    assert servers["training"]["history"].keys() == one["training"]["history"].keys()
    for name, values in one["training"]["history"].items():
        assert servers["training"]["history"][name] == pytest.approx(values, rel=1e-9), name
    assert servers["test"] == pytest.approx(one["test"], rel=1e-9)

    assert servers["training"]["devices"] == ["/job:worker/replica:0/task:0/device:CPU:0"]
    placement = servers["placement"]
    assert (placement["strategy"], placement["num_replicas"]) == ("parameter_server", 1)
    devices = [variable["devices"] for variable in placement["variables"]]
    places = [f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]
    assert {place for (place,) in devices} == set(places), "each variable lies on one server, and both have some"


@pytest.mark.exhaustive
def test_two_workers_learn_as_well_as_one_device(digits, run):
    """Over three seeds: a mean of three clusters' differs by 0.003 (standard deviation) from another."""
    trainings = [
        [f"{name} {seed}", settings | {"train.seed": seed}]
        for name, settings in (("servers", SERVERS), ("one", ONE_DEVICE))
        for seed in range(SEEDS)
    ]
    found = train_and_evaluate(run, trainings)
    accuracies = {
        name: [found[f"{name} {seed}"]["test"]["test/accuracy"] for seed in range(SEEDS)] for name in ("servers", "one")
    }
    for name, values in accuracies.items():
        print(f"| {name} | {' | '.join(f'{value:.4f}' for value in [*values, np.mean(values)])} |")
    accuracy = {name: np.mean(values) for name, values in accuracies.items()}
    assert accuracy["one"] > 0.95
    assert accuracy["servers"] == pytest.approx(accuracy["one"], abs=0.01), "within a point"
    for seed in range(SEEDS):
        training = found[f"servers {seed}"]["training"]
        assert training["steps"] == 15 * STEPS_IN_EPOCH
        assert training["devices"] == [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]

"""Data far larger than the memory that a process may take: prepared, trained on, killed, taken up again and registered.

The limit is RLIMIT_DATA, which every process of a command inherits. It counts what a process has for itself alone
(heap, stacks, private maps), and not the pages of a file that is mapped to be read: those are the system's, which takes
them back where it needs the room. An array that is read into memory instead ends the process.
"""

import json
import os
import resource
import shutil
import signal
import sys

import numpy as np
import psutil
import pytest

from tests.processes.trainings import newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SIDE = 64
NUM_EXAMPLES = 82_000
NUM_BYTES = NUM_EXAMPLES * SIDE * SIDE * 3
PREPARING = 330_000_000
"""Bytes that each process of `data add` may have. With arrays of a few MB the largest had 236 MB, on two cores."""
TRAINING = {
    "one_device": 800_000_000,
    "data_parallel": 1_450_000_000,
    "parameter_server": 1_640_000_000,
    "multi_worker": 1_760_000_000,
}
"""Bytes that each process of `run` may have. With arrays of a few MB the largest had 707 MB; with JAX 1,299 MB in a
training alone, 1,354 MB in a run on these without a limit; 1,544 MB and 1,659 MB with the threads of TensorFlow's
servers. So about 94 MB are left, of which the arrays are ten times as many."""
MEMBERS = {"one_device": 1, "data_parallel": 1, "parameter_server": 4, "multi_worker": 2}
"""Processes that train, or serve one that does: a chief, two workers and a parameter server."""
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
os.execvp(sys.argv[2], sys.argv[2:])
"""
SETTINGS = (
    "dataset.name=many",
    "schedule.learning_rate=0.0001",
    "input.validation=500",
    "train.epochs=4",
    "train.steps_per_epoch=50",
    "train.global_batch_size=64",
    "train.per_replica_batch_size=null",
    "checkpoint.every_steps=10",
    "evaluate.global_batch_size=100",
)


@pytest.fixture
def two_cores():
    """Threads, of which there is one for each core, have memory of their own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def many(cluster_project, tmp_path):
    """Arrays of noise, lighter in one of two classes. They, and what is made of them, are gone after the test."""
    folder = tmp_path / "many"
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, NUM_EXAMPLES)
    images = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (NUM_EXAMPLES, SIDE, SIDE, 3))
    for first in range(0, NUM_EXAMPLES, 1000):
        own = slice(first, first + 1000)
        images[own] = generator.integers(0, 128, (1000, SIDE, SIDE, 3), np.uint8)
        images[own] += labels[own, np.newaxis, np.newaxis, np.newaxis].astype(np.uint8) * 100
    np.save(folder / "y.npy", labels)
    yield folder
    for place in (folder, cluster_project):
        shutil.rmtree(place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", TRAINING)
def test_data_beyond_the_memory_are_prepared_trained_on_and_registered(strategy, many, stratagem, run, two_cores):
    too_much = [sys.executable, "-c", f"import numpy as np; np.ones({NUM_BYTES}, np.uint8)"]
    assert "MemoryError" in run([sys.executable, "-c", LIMITED, str(PREPARING), *too_much]).stderr, "the limit holds"
    add = ["stratagem", "data", "add", str(many), "--json"]
    added = run([sys.executable, "-c", LIMITED, str(PREPARING), *add])
    assert added.returncode == 0, added.stderr
    splits = json.loads(added.stdout)["splits"].values()
    assert sum(split["num_examples"] for split in splits) == NUM_EXAMPLES
    # Workers of parameter servers are asynchronous: no two trainings end with the same bits, or are as good.
    own = (
        ("train.loop=custom", "register.minimum=0") if strategy == "parameter_server" else ("train.deterministic=true",)
    )

    def start(*options, num_bytes=None):
        command = stratagem("run", *SETTINGS, *own, f"strategy.kind={strategy}", options=options)
        if num_bytes is not None:
            resource.prlimit(command.process.pid, resource.RLIMIT_DATA, (num_bytes, num_bytes))
        return command

    limit = TRAINING[strategy]
    cut = start(num_bytes=limit)
    cut.wait_until(lambda: newest(cut) >= 60)
    members = [one for entry in ("serve", "assist", "tf_server") for one in cut.members(entry)]
    assert [one.rlimit(psutil.RLIMIT_DATA) for one in members] == [(limit, limit)] * MEMBERS[strategy]
    cut.process.send_signal(signal.SIGKILL)
    assert cut.end() == -signal.SIGKILL
    rest = start(num_bytes=limit)
    assert rest.end() == 0, rest.err.read_text()
    assert "resuming run " in rest.err.read_text()
    assert rest.result["steps"] == 200
    assert rest.result["model_version"] == "many-mlp/1"
    if strategy == "parameter_server":
        return

    whole = start("--fresh")
    assert whole.end() == 0, whole.err.read_text()
    for key in ("weights_digest", "metrics", "data_version", "steps"):
        assert rest.result[key] == whole.result[key]
    assert whole.result["model_version"] == "many-mlp/1", "the same model is no other version"

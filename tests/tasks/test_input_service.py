"""The tf.data service: the batches of an array, made by other processes."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from tasks import config
from tasks.input import service, sources
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import free_ports
from tests.tasks.test_input import ALL_KINDS, MIXED, Rows, load, put_together, read, read_arrays

pytestmark = pytest.mark.slow


@pytest.fixture
def serve():
    """``serve()`` starts a dispatcher with a worker, ``serve(address)`` one more worker; each gives (process, address)
    when it serves."""
    with contextlib.ExitStack() as started:

        def serve(joins=None, cwd=None):
            address = joins or f"grpc://127.0.0.1:{free_ports(1)[0]}"
            environment = {**os.environ, "STRATAGEM_INPUT_SERVICE": address, "CUDA_VISIBLE_DEVICES": ""}
            if joins:
                environment["STRATAGEM_INPUT_WORKER"] = "127.0.0.1"
            process = subprocess.Popen(
                [sys.executable, "-m", "tasks", "input_service"],
                env=environment,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            started.callback(lambda: (process.kill(), process.wait(), process.stdin.close(), process.stdout.close()))
            assert "ready" in process.stdout.readline()
            return process, address

        yield serve


def served(address, prepared, size, *overrides, **place):
    return sources.training_batches(load(f"input.service={address}", *overrides), prepared, size, **place)


def alone(prepared, size, *overrides, **place):
    return sources.training_batches(load(*overrides), prepared, size, **place)


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        for array, same in zip(one, other, strict=True):
            assert np.asarray(array).dtype == np.asarray(same).dtype
            np.testing.assert_array_equal(np.asarray(array), np.asarray(same))


def test_batches_and_their_order_are_those_without_it(digits, serve):
    """Two workers, whose batches come in any order; a later epoch, a start in its middle, parts of two workers."""
    _, address = serve()
    serve(address)
    for augmentation in ("{flip: false}", ALL_KINDS, MIXED):
        options = [f"input.augmentation={augmentation}"]
        whole = read_arrays(alone(digits, 20, *options), epoch=2)
        assert_equal(read(served(address, digits, 20, *options), epoch=2), whole)
        assert_equal(read(served(address, digits, 20, *options), epoch=2, start_step=37), whole[37:])
    for worker in (0, 1):
        place = {"worker": worker, "num_workers": 2}
        assert_equal(read(served(address, digits, 20, **place)), read_arrays(alone(digits, 20, **place)))
    of_two = served(address, digits, 20, num_replicas=2)
    assert_equal(put_together(read(of_two), 2), read_arrays(alone(digits, 20)))
    options = ["train.class_weights=balanced", "train.steps_per_epoch=100", "input.drop_remainder=true"]
    weighted = served(address, digits, 20, *options)
    weighted.epoch = 1  # From the last steps of one pass over all of the next into the one after.
    found = [tuple(one.numpy() for one in batch) for batch in weighted.dataset]
    assert_equal(found, read_arrays(alone(digits, 20, *options), epoch=1))


def test_a_worker_that_dies_takes_no_example_with_it(digits, serve):
    """Dynamic sharding loses what a worker that ends had; whatever that was is gathered here, once."""
    _, address = serve()
    joined, _ = serve(address)
    batches = served(address, digits, 3, f"input.augmentation={ALL_KINDS}")
    batches.source.patience_seconds = 3.0
    found = []
    for step, batch in enumerate(batches.dataset):
        found.append(tuple(one.numpy() for one in batch))
        if step == 20:
            joined.kill()
    assert_equal(found, read_arrays(alone(digits, 3, f"input.augmentation={ALL_KINDS}")))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_service_the_training_makes_its_own(digits, serve, caplog, end):
    process, address = serve()
    batches = served(address, digits, 20)
    wanted = read_arrays(alone(digits, 20))
    rest = iter(batches.dataset)
    found = [next(rest) for _ in range(5)]
    # The first batch waited for the graph, which may take longer. Of one that is gone it is seen without waiting.
    batches.source.patience_seconds = 2.0 if end == signal.SIGSTOP else 300.0
    process.send_signal(end)
    found += list(rest)
    assert_equal(found, wanted)
    assert_equal(read(batches, epoch=1), read_arrays(alone(digits, 20), epoch=1))
    told = [one.partition(": ")[2] for one in caplog.messages if "this process makes" in one]
    if end == signal.SIGKILL:
        assert all(one.startswith("nobody answers at") and "rest of the pass" in one for one in told)
        assert len(told) == 2, "in each pass it is asked for anew"
    else:  # Where nothing at all comes it is not waited for again.
        assert [one.partition("; ")[0] for one in told] == ["nothing came for 2 s"] * 2
        assert ["rest of the training" in one for one in told] == [False, True]
        assert_equal(read(batches, epoch=2), read_arrays(alone(digits, 20), epoch=2))
        assert len([one for one in caplog.messages if "this process makes" in one]) == 2


def reading_now():
    return {thread for thread in threading.enumerate() if thread.name == "input-service"}


def test_reading_ends_with_who_reads(digits, serve, project):
    _, address = serve()
    before = set(threading.enumerate())  # Where servers have gone TensorFlow waits for them until the process ends.
    batches = served(address, digits, 20)
    reading = iter(batches.dataset)
    next(reading)
    assert reading_now() - before
    assert list((project / "mlruns").glob(".input.*"))
    del reading
    gc.collect()
    end = time.monotonic() + 60
    while (reading_now() - before or list((project / "mlruns").glob(".input.*"))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not reading_now() - before
    assert not list((project / "mlruns").glob(".input.*")), "what the workers were told of the pass"


def test_workers_that_see_other_folders_are_an_error(digits, serve, project, tmp_path):
    """They are told of each pass in a file of the project's folder, so another machine's folder is noticed."""
    shutil.rmtree(project / "mlruns")
    (project / "of_this_machine").mkdir()
    # Under one path, which leads each process to a folder of its own.
    (project / "mlruns").symlink_to("/proc/self/cwd/of_this_machine")
    (tmp_path / "another" / "of_this_machine").mkdir(parents=True)
    _, address = serve(cwd=tmp_path / "another")
    batches = served(address, digits, 20)
    batches.source.patience_seconds = 300.0
    with pytest.raises(StratagemError, match="this project's folder under the same path"):
        list(batches.arrays())


def test_every_example_once_an_epoch_with_two_workers(digits, serve):
    _, address = serve()
    serve(address)
    rows = Rows(digits)
    for epoch in (0, 1):
        assert sorted(rows.flat(read(served(address, digits, 7), epoch))) == list(range(len(rows.labels)))


def test_a_service_that_is_not_there_is_refused():
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=f"input.service = 'grpc://127.0.0.1:{port}': nobody answers"):
        service.check(load(f"input.service=grpc://127.0.0.1:{port}").input)
    with pytest.raises(UserError, match="started without the service"):
        service.check(load("input.service=local").input)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["input.service=http://x:1"], "input.service"),
        (["input.service=grpc://x"], "input.service"),
        (["input.service=local", "input.source=stream"], "give input.source=array|Give input.source=array"),
        (["input.service=local", "strategy.kind=parameter_server", "train.loop=custom"], "give input.service=none"),
        (
            ["input.service=local", "strategy.kind=multi_worker", "strategy.launcher=ray"],
            "input.service=grpc://HOST:PORT of",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, said):
    with pytest.raises(UserError, match=said):
        config.load(None, overrides)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(project, digits, number, tmp_path):
    (port,) = free_ports(1)
    # A test run in a shell's background ignores Ctrl-C, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with (tmp_path / "err").open("w") as err:
        command = subprocess.Popen(
            ["stratagem", "serve-input", "--open", "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            process_group=0,
        )
    signal.signal(signal.SIGINT, before)
    with command:
        assert command.stdout.readline().startswith(
            f"serves trainings with --set input.service=grpc://127.0.0.1:{port}"
        )
        (server,) = psutil.Process(command.pid).children()
        taken = subprocess.run(
            ["stratagem", "serve-input", "--open", "--port", str(port)], capture_output=True, text=True, check=False
        )
        assert (taken.returncode, taken.stderr.startswith(f"error: --port {port}: it is taken")) == (2, True)
        assert_equal(read(served(f"grpc://127.0.0.1:{port}", digits, 200)), read_arrays(alone(digits, 200)))
        command.send_signal(number)
        assert command.wait(120) == 128 + number
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert not server.is_running()

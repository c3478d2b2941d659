import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from jax.profiler import ProfileData
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tasks.input.batches import Batches
from tasks.training import trace as traced
from tasks.training.callbacks import profiler
from tasks.training.callbacks.progress import Throughput
from tasks.training.checkpoints import State
from tasks.training.position import Position

START = State(
    step=0, epoch=0, step_in_epoch=0, global_batch_size=8, seed=0, settings_digest="", data_version=None, history={}
)


def write_trace(path, planes):
    """Write a trace: plane -> line -> (name, begin ms, end ms, stats)."""
    space = xplane_pb2.XSpace()
    for plane_name, lines in planes.items():
        plane = space.planes.add(name=plane_name)
        for line_name, events in lines.items():
            line = plane.lines.add(name=line_name)
            for name, begin, end, stats in events:
                number = len(plane.event_metadata) + 1
                plane.event_metadata[number].id, plane.event_metadata[number].name = number, name
                event = line.events.add(metadata_id=number, offset_ps=round(begin * 1e9))
                event.duration_ps = round((end - begin) * 1e9)
                for key, value in stats.items():
                    number = len(plane.stat_metadata) + 1
                    plane.stat_metadata[number].id, plane.stat_metadata[number].name = number, key
                    event.stats.add(metadata_id=number, int64_value=value)
    path.write_bytes(space.SerializeToString())
    return path


def call(begin, end, **stats):
    return ("train", begin, end, stats)


def at(name, begin, end, **stats):
    return (name, begin, end, stats)


PARTS = ("compute", "collectives", "input_wait", "host")
OPERATION = "StatefulPartitionedCall/model/dense/MatMul:MatMul"
NEXT = "IteratorGetNextOp::DoCompute"
# Each row: the trace, the steps in it, and what a step's time went into in ms, added up by hand.
TRACES = {
    "the wait, then the step, then Python": (
        {"/host:CPU": {
            "python": [call(0, 10, epoch=0), call(12, 20, epoch=0), at("EagerExecute", 0, 20)],
            "tf_data_iterator_get_next/1": [at(NEXT, 1, 3), at(NEXT, 12, 15)],
            "tf_Compute/1": [at(OPERATION, 3, 8), at(OPERATION, 15, 19), at("ExecutorState::Process", 0, 20)],
        }},
        2, (9, 0, 5, 6),
    ),
    "two threads compute at once, and beside a wait; a wait of two replicas is one": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0)],
            "tf_data_iterator_get_next/1": [at("IteratorGetNextAsOptionalOp::DoCompute", 0, 6)],
            "tf_data_iterator_get_next/2": [at(NEXT, 2, 8)],
            "tf_Compute/1": [at(OPERATION, 7, 12)],
            "tf_Compute/2": [at(OPERATION, 10, 15)],
        }},
        1, (8, 0, 7, 5),
    ),
    "the input pipeline's own work is nothing, and a collective that waits for the others does not compute": (
        {"/host:CPU": {
            "python": [call(0, 10, epoch=0)],
            "tf_data_private_threadpool/1": [at("PyFunc:PyFunc", 0, 9)],
            "collective_ops/1": [at("adam/CollectiveReduceV2:CollectiveReduceV2", 4, 9)],
            "tf_Compute/1": [at(OPERATION, 2, 4), at("adam/CollectiveReduceV2:CollectiveReduceV2", 5, 6)],
        }},
        1, (2, 5, 0, 3),
    ),
    "the call that traces is left out, and the validation between two epochs": (
        {"/host:CPU": {
            "python": [call(0, 900), call(900, 910, epoch=0), call(950, 960, epoch=1)],
            "tf_Compute/1": [at(OPERATION, 0, 905), at(OPERATION, 910, 952)],
        }},
        2, (7, 0, 0, 13),
    ),
    "a GPU computes, not the threads that launch; NCCL is a collective, and a copy beside the wait is the wait": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0)],
            "tf_data_iterator_get_next/1": [at(NEXT, 0, 8)],
            "tf_Compute/1": [at(OPERATION, 0, 20)],
        }, "/device:GPU:0": {
            "Stream #13(Compute)": [at("sgemm_128x128", 2, 10), at("ncclDevKernel_AllReduce_Sum_f32", 10, 14)],
            "Stream #14(MemcpyH2D)": [at("MemcpyH2D", 0, 2)],
        }},
        1, (8, 4, 2, 6),
    ),
    "JAX: the wait is marked, operations name their HLO, and a sum beside them is theirs": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0), at("input_wait", 0, 6), at("PjitFunction(train_step)", 6, 20)],
            "tf_XLAPjRtCpuClient/1": [at("dot", 8, 12, hlo_op=1), at("all-reduce.3", 12, 18, hlo_op=1),
                                      at("ThunkExecutor::Execute", 6, 20)],
            "tf_XLAEigen/1": [at("fusion.1", 11, 14, hlo_op=1)],
        }},
        1, (6, 4, 6, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("planes", "num_steps", "expected"), TRACES.values(), ids=TRACES.keys())
def test_the_split_of_a_trace_made_by_hand(tmp_path, planes, num_steps, expected):
    parts = traced.split(write_trace(tmp_path / "made.xplane.pb", planes), num_steps)
    per_step = [milliseconds / num_steps for milliseconds in expected]
    assert list(parts) == ["compute", "collectives", "input_wait", "host"]
    assert list(parts.values()) == pytest.approx(per_step)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_calls_whatever_overlaps(tmp_path, seed):
    """Nanoseconds are added up as float64 of a time since 1970's order: 1e-6 of a call is a thousand times that."""
    draw = np.random.default_rng(seed)
    names = [OPERATION, NEXT, "a/CollectiveReduceV2:CollectiveReduceV2", "ExecutorState::Process"]

    def events():
        begins = draw.uniform(-5, 105, 30)
        return [at(names[draw.integers(4)], begin, begin + draw.exponential(8)) for begin in begins + 10]

    lines = {"tf_Compute/1": events(), "tf_Compute/2": events(), "collective_ops/1": events()}
    calls = [call(10, 40, epoch=0), call(45, 60, epoch=0), call(80, 105, epoch=1)]
    planes = {"/host:CPU": {"python": calls, **lines}}
    parts = traced.split(write_trace(tmp_path / "made.xplane.pb", planes), 1)
    assert sum(parts.values()) == pytest.approx(50 + 25, rel=1e-6)
    assert min(parts.values()) >= 0


def sleepy(num_steps, seconds=0.0, size=8):
    """A dataset of so many batches of zeros that takes so long for each."""

    def batch(_):
        time.sleep(seconds)
        return np.zeros((size, 64), np.float32)

    def images(number):
        return tf.ensure_shape(tf.numpy_function(batch, [number], tf.float32), (size, 64)), tf.zeros([size], tf.int64)

    return tf.data.Dataset.range(num_steps).map(images)


def small_model(units=(), **options):
    layers = [keras.layers.Dense(width) for width in (*units, 10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False, **options)
    return model


def fit(folder, steps, model=None, data=None, epochs=1, steps_per_epoch=6, start=START):
    """Train under a profiler of ``steps``; return what it sent, and the first step of each call in the trace."""
    batches = Batches(8 * steps_per_epoch, 8, drop_remainder=False)
    sent = []
    position = Position(batches, start)
    watched = profiler.Profiler(position, *steps, folder, lambda step, metrics: sent.append((step, metrics)))
    with watched:
        (model or small_model()).fit(
            data or sleepy(steps_per_epoch),
            epochs=epochs,
            initial_epoch=start.epoch,
            callbacks=[position, watched],
            shuffle=False,
            verbose=0,
        )
    return sent, [step for trace in traces(folder) for step in calls_of(trace)]


def traces(folder):
    return sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"))


def calls_of(trace):
    """The calls in a trace: first step -> (begin, end) in ns."""
    data = ProfileData.from_file(str(trace))
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    return {
        dict(event.stats)["step_num"]: (event.start_ns, event.start_ns + event.duration_ns)
        for event in events
        if event.name == "train"
    }


# Each row: profile_steps, steps a call, epochs of six steps; the calls by their first step, and after which it is sent.
RANGES = [
    ([3, 4], 1, 1, [3, 4], 4),
    ([1, 3], 1, 1, [1, 2, 3], 3),
    ([5, 8], 1, 2, [5, 6, 7, 8], 8),
    ([4, 6], 4, 1, [1, 5], 6),  # All calls that overlap the range; the last one has the two steps that are left.
    ([8, 8], 4, 2, [7], 10),
    ([5, 99], 1, 1, [5, 6], 6),  # The training ends before the range does.
]


@pytest.mark.in_ci(1, 3)
@pytest.mark.parametrize(("steps", "steps_per_execution", "epochs", "calls", "sent_at"), RANGES)
def test_which_steps_are_traced(tmp_path, steps, steps_per_execution, epochs, calls, sent_at):
    model = small_model(steps_per_execution=steps_per_execution)
    sent, found = fit(tmp_path, steps, model, epochs=epochs)
    assert found == calls
    assert [step for step, _ in sent] == [sent_at]
    assert sent[0][1].keys() == {f"performance/{part}_ms" for part in PARTS}
    assert min(sent[0][1].values()) >= 0
    assert sent[0][1]["performance/compute_ms"] > 0


def test_a_resumed_training_counts_from_the_start_of_the_run(tmp_path):
    start = START.model_copy(update={"step": 6, "epoch": 1})
    sent, found = fit(tmp_path / "inside", [8, 9], epochs=2, start=start)
    assert (found, [step for step, _ in sent]) == ([8, 9], [9])
    assert fit(tmp_path / "before", [2, 3], epochs=2, start=start) == ([], []), "the run has traced them already"


def test_what_the_profiler_itself_takes_is_not_the_steps_time(tmp_path, clock):
    class Slow:
        """Takes so long, and leaves an empty trace."""

        def start(self, folder):
            clock(1000)

        def stop(self):
            clock(1000)
            folder = tmp_path / "plugins" / "profile" / "first"
            folder.mkdir(parents=True)
            write_trace(folder / "some.xplane.pb", {})

        def split(self, trace, num_steps):
            clock(1000)
            return {}

        def mark_call(self, step, counted):
            return contextlib.nullcontext()

    position = Position(Batches(48, 8, drop_remainder=False), START)
    throughput = Throughput(position, began=0.0)
    watched = profiler.Profiler(position, 2, 4, tmp_path, lambda step, metrics: None, Slow())
    watched.set_model(small_model())
    told = [position, watched, throughput]
    for callback in told:
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    for batch in range(6):
        for callback in told:
            callback.on_train_batch_begin(batch)
        clock(2)
        for callback in told:
            callback.on_train_batch_end(batch)
    assert time.perf_counter() == 3000 + 12
    assert (throughput.num_examples, throughput.seconds) == (40, 10)


def test_the_steps_do_not_ask_for_the_model(tmp_path):
    # On JAX each reading of it puts the whole state back into the variables.
    class Watched(profiler.Profiler):
        reads = 0

        @property
        def model(self):
            Watched.reads += 1
            return super().model

    position = Position(Batches(48, 8, drop_remainder=False), START)
    with Watched(position, 3, 4, tmp_path, lambda step, metrics: None) as watched:
        small_model().fit(sleepy(6), callbacks=[position, watched], shuffle=False, verbose=0)
    assert Watched.reads == 1, "when the training begins"
    assert [list(calls_of(trace)) for trace in traces(tmp_path)] == [[3, 4]]


@pytest.mark.parametrize(
    ("steps", "calls", "said"),
    [
        ([1, 1], [1], "done by the call that traces and compiles, so there is no split"),
        ([7, 9], [], "the training ended after step 6, and nothing was traced"),
    ],
)
def test_what_cannot_be_split_is_said(tmp_path, caplog, steps, calls, said):
    assert fit(tmp_path, steps) == ([], calls)
    assert said in caplog.text
    assert "train.profile_steps = " in caplog.text


def test_the_call_that_traces_does_not_count(tmp_path):
    ((_, metrics),), _ = fit(tmp_path, [1, 6])
    (trace,) = traces(tmp_path)
    calls = calls_of(trace)
    assert calls.keys() == set(range(1, 7)), "it is in the trace"
    assert sum(metrics.values()) == pytest.approx((calls[6][1] - calls[2][0]) / 1e6 / 5)


def test_a_failed_training_leaves_the_profiler_free(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise OSError("full")

    position = Position(Batches(48, 8, drop_remainder=False), START)
    sent = []
    watched = profiler.Profiler(position, 2, 5, tmp_path / "failed", lambda step, metrics: sent.append(metrics))
    with pytest.raises(OSError, match="full"), watched:
        small_model().fit(sleepy(6), callbacks=[position, watched, Fails()], shuffle=False, verbose=0)
    assert not sent, "half of a trace has no split"
    assert fit(tmp_path / "next", [3, 4])[1] == [3, 4]


@pytest.mark.slow
def test_slow_input_is_input_wait_and_a_heavy_step_is_compute(tmp_path):
    slow = fit(tmp_path / "slow", [3, 6], data=sleepy(6, 0.4))[0][0][1]
    assert slow["performance/input_wait_ms"] > 5 * slow["performance/compute_ms"]
    assert slow["performance/input_wait_ms"] > slow["performance/host_ms"]
    looped = small_model(steps_per_execution=2)
    many = fit(tmp_path / "many", [3, 6], looped, sleepy(6, 0.4))[0][0][1]
    assert many["performance/input_wait_ms"] > 5 * many["performance/compute_ms"]
    heavy = fit(tmp_path / "heavy", [3, 6], small_model(units=(4096, 4096)))[0][0][1]
    assert heavy["performance/compute_ms"] > 5 * heavy["performance/input_wait_ms"]


# A process of its own: the backend cannot change.
ON_JAX = """
import json, sys, time
from pathlib import Path
import keras, numpy as np
from tasks.training import trace as traced
from tasks.training.callbacks import profiler
from tasks.training.position import Position
from tasks.training.checkpoints import State
from tasks.input.batches import Batches

start = State(
    step=0, epoch=0, step_in_epoch=0, global_batch_size=64, seed=0, settings_digest="", data_version=None, history={}
)

def batches(seconds):
    for _ in range(6):
        time.sleep(seconds)
        yield np.zeros((64, 64), np.float32), np.zeros(64, np.int64)

def fit(name, seconds, units):
    model = keras.Sequential([keras.Input((64,)), *[keras.layers.Dense(width) for width in (*units, 10)]])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    position = Position(Batches(64 * 6, 64, drop_remainder=False), start)
    sent = []
    watched = profiler.Profiler(position, 1, 5, Path(name), lambda step, metrics: sent.append((step, metrics)))
    data = traced.marked(batches(seconds))
    with watched:
        model.fit(data, steps_per_epoch=6, shuffle=False, callbacks=[position, watched], verbose=0)
    return sent, [len(list(Path(name).glob("plugins/profile/*/*.xplane.pb")))]

print(json.dumps({
    "slow": fit("slow", 0.4, ()), "heavy": fit("heavy", 0, (2048, 2048)), "tensorflow": "tensorflow" in sys.modules
}))
"""


@pytest.mark.slow
def test_on_jax(project, run):
    done = run([sys.executable, "-c", ON_JAX], env={"KERAS_BACKEND": "jax"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["tensorflow"]
    for name, larger, smaller in (("slow", "input_wait", "compute"), ("heavy", "compute", "input_wait")):
        ((step, metrics),), (num_traces,) = found[name]
        assert (step, num_traces) == (5, 1)
        assert metrics[f"performance/{larger}_ms"] > 5 * metrics[f"performance/{smaller}_ms"], name
        assert min(metrics.values()) >= 0
        assert metrics["performance/compute_ms"] > 0


@pytest.mark.in_ci(1, 2)
@pytest.mark.parametrize(
    ("loop", "steps_per_execution", "sent_at"), [("fit", 1, 4), ("custom", 1, 4), ("fit", 3, 5), ("custom", 3, 5)]
)
def test_a_run_is_profiled(tiny, train, loop, steps_per_execution, sent_at):
    sent = []
    train(
        tiny,
        f"train.loop={loop}",
        f"train.steps_per_execution={steps_per_execution}",
        "input.validation=53",  # 147 examples: five steps of 32, the last one short.
        "train.profile_steps=[2, 4]",
        send=lambda step, metrics: sent.append((step, metrics)),
    )
    (trace,) = traces("mlruns/runs/first/tensorboard")
    assert list(calls_of(trace)) == ([2, 3, 4] if steps_per_execution == 1 else [1, 4])
    parts = {step: metrics for step, metrics in sent if "performance/compute_ms" in metrics}
    assert parts.keys() == {sent_at}
    assert parts[sent_at].keys() == {f"performance/{part}_ms" for part in PARTS}
    assert parts[sent_at]["performance/compute_ms"] > 0


# Each row: what a run of ten steps, resumed after the third, profiles; the traced calls, and how many count.
RESUMED = [
    ([4, 8], [4, 5, 6, 7, 8], 4),
    ([7, 8], [7, 8], 2),  # Not yet begun when Keras' first `fit` ends with the epoch.
    ([5, 99], [5, 6, 7, 8, 9, 10], 6),
]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(("steps", "calls", "num_steps"), RESUMED)
@pytest.mark.parametrize("loop", ["fit", pytest.param("custom", marks=pytest.mark.exhaustive)])
def test_a_run_resumed_inside_an_epoch_is_traced_once(tiny, train, monkeypatch, caplog, loop, steps, calls, num_steps):
    counted, sent = [], []
    split = traced.split
    monkeypatch.setattr(traced, "split", lambda trace, count: counted.append(count) or split(trace, count))
    options = (f"train.loop={loop}", "input.validation=53", "checkpoint.every_steps=3", "checkpoint.keep=9",
               "train.steps_per_execution=1")  # fmt: skip
    train(tiny, *options, "train.epochs=1")
    for folder in Path("mlruns/runs/first/checkpoints").iterdir():
        if folder.name != "3":
            shutil.rmtree(folder)
    train(
        tiny,
        *options,
        f"train.profile_steps={steps}",
        resume=True,
        send=lambda step, metrics: sent.append((step, metrics)),
    )
    (trace,) = traces("mlruns/runs/first/tensorboard")
    assert list(calls_of(trace)) == calls
    assert counted == [num_steps]
    assert [step for step, metrics in sent if "performance/compute_ms" in metrics] == [min(steps[1], 10)]
    assert "nothing was traced" not in caplog.text

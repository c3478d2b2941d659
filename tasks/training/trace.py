"""A trace of training steps: what marks them in it, and what a step's time went into."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import keras

Intervals = list[tuple[float, float]]
Batch = TypeVar("Batch")

CALL = "train"
"""Marks a call of the train function in a trace. TensorBoard takes it for a step."""
WAIT = "input_wait"
"""Marks a wait for input outside a compiled function."""
OPERATION = re.compile(r"[^:]+:\w+")
"""How TensorFlow names an operation in a trace: `adam/Sqrt_5:Sqrt`, the node and its type."""
SUM = re.compile(r"[^:]+:(Collective|Nccl)\w+")
"""And one that sums over replicas. It ends when the last replica has come."""
COLLECTIVE = re.compile(r"(all-(reduce|gather|to-all)|reduce-scatter|collective-|nccl)")
"""How XLA's collectives and those of a GPU begin."""
COPY = re.compile(r"Memcpy|Memset")
"""How a GPU's copies begin."""


def start(folder: Path) -> None:
    """Begin to trace; a process can trace one thing at a time."""
    if keras.backend.backend() == "jax":
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # On by default, and slows every call of a Python function.
        jax.profiler.start_trace(folder, profiler_options=options)
    else:
        import tensorflow as tf

        tf.profiler.experimental.start(str(folder))


def stop() -> None:
    """End the trace, and write it into its folder."""
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.stop_trace()
    else:
        import tensorflow as tf

        tf.profiler.experimental.stop()


def split(trace: Path, num_steps: int) -> dict[str, float]:
    """Return what the time of the traced calls went into, in ms a step: ``compute``, ``collectives``, ``input_wait``
    and ``host``.

    The four add up to the time from the beginning of an epoch's first traced call to the end of its last one: a moment
    belongs to the first of them that holds.

    - ``compute``: some operation of the step is running: on a GPU or TPU where there is one, else on the CPU's threads.
    - ``collectives``: nothing computes, and gradients are summed over replicas, which includes the wait for those that
      are not done yet.
    - ``input_wait``: neither, and the step waits for its next batch: TensorFlow's ``IteratorGetNext``, which runs
      inside the compiled function, and what ``input_wait`` marks outside.
    - ``host``: the rest: Python, callbacks, launching, copies to a device.

    Where a step gathers its batch itself, from arrays that are resident, the gather is one of its operations.

    Args:
        trace: the .xplane.pb of a ``Profiler``. Both backends write this format, and JAX' reader serves for both.
        num_steps: training steps in the calls that count.
    """
    windows, intervals = _read(trace)
    calls = list(windows.values())
    shares, before, taken = {}, 0.0, []
    for name in ("compute", "collectives", "input_wait"):
        taken += intervals[name]
        covered = _covered(taken, calls)
        shares[name], before = covered - before, covered
    shares["host"] = _covered(calls, calls) - before
    return {name: nanoseconds / 1e6 / num_steps for name, nanoseconds in shares.items()}


def _read(trace: Path) -> tuple[dict[int, tuple[float, float]], dict[str, Intervals]]:
    """Return when each epoch's calls were, and when what was running."""
    from jax.profiler import ProfileData

    windows: dict[int, tuple[float, float]] = {}
    found: dict[str, Intervals] = {"host": [], "device": [], "collectives": [], "input_wait": []}
    for plane in ProfileData.from_file(str(trace)).planes:
        on_device = plane.name.startswith(("/device:GPU", "/device:TPU"))
        for line in plane.lines:
            for event in line.events:
                interval = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name == CALL and not on_device:
                    epoch = dict(event.stats).get("epoch")
                    if epoch is not None:
                        first, last = windows.get(epoch, interval)
                        windows[epoch] = min(first, interval[0]), max(last, interval[1])
                elif (what := _kind_of_event(event, line.name, on_device)) is not None:
                    found[what].append(interval)
    return windows, {**found, "compute": found["device"] or found["host"]}


def _kind_of_event(event: Any, line: str, on_device: bool) -> str | None:
    """Return what an event of a trace is: an operation on the host or on a device, a collective, a wait, or None."""
    if on_device:
        if not line.startswith(("Stream", "XLA Ops")) or COPY.match(event.name):
            return None
        return "collectives" if COLLECTIVE.match(event.name) else "device"
    if event.name == WAIT or ("GetNext" in event.name and event.name.endswith("::DoCompute")):
        return "input_wait"
    if SUM.fullmatch(event.name):
        return "collectives"
    if line.startswith("tf_Compute"):
        return "host" if OPERATION.fullmatch(event.name) else None
    # The input pipeline has threads of its own.
    if line.startswith("tf_data") or not _is_xla(event):
        return None
    return "collectives" if COLLECTIVE.match(event.name) else "host"


def _is_xla(event: Any) -> bool:
    return any(name == "hlo_op" for name, _ in event.stats)


def _covered(intervals: Iterable[tuple[float, float]], windows: Intervals) -> float:
    """Return how much of disjoint windows some interval covers."""
    total = 0.0
    ordered = sorted(intervals)
    for opens, closes in windows:
        reached = opens
        for first, last in ordered:
            first, last = max(first, reached), min(last, closes)
            if last > first:
                total += last - first
                reached = last
    return total


def marked(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches, and mark the wait for each in a trace: JAX has no operation that reads input. It costs next to
    nothing when nobody traces."""
    import jax

    while True:
        with jax.profiler.TraceAnnotation(WAIT):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def mark_call(step: int, counted: dict[str, int]) -> AbstractContextManager[Any]:
    """Mark a call of the train function in a trace; ``counted`` says that its time counts, and its epoch."""
    if keras.backend.backend() == "jax":
        import jax

        annotation: AbstractContextManager[Any] = jax.profiler.StepTraceAnnotation(CALL, step_num=step, **counted)
        return annotation
    import tensorflow as tf

    trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(CALL, step_num=step, _r=1, **counted)
    return trace

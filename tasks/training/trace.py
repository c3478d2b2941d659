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
OPERATION = re.compile(r"[^:]+:(?!Collective|Nccl)\w+")
"""How TensorFlow names an operation in a trace: `adam/Sqrt_5:Sqrt`, the node and its type."""
COLLECTIVE = re.compile(r"(all-(reduce|gather|to-all)|reduce-scatter|collective-|nccl|Memcpy|Memset)")
"""How XLA's collectives and a GPU's copies and collectives begin."""


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
    """Return what the time of the traced calls went into: ``input_wait``, ``compute`` and ``other``, in ms a step.

    The three add up to the time from the beginning of an epoch's first traced call to the end of its last one.

    - ``compute``: some operation of the step is running: on a GPU or TPU where there is one, else on the CPU's threads.
      Copies to a device and collectives are not in it.
    - ``input_wait``: nothing computes, and the step waits for its next batch: TensorFlow's ``IteratorGetNext``, which
      runs inside the compiled function, and what ``input_wait`` marks outside.
    - ``other``: the rest: Python, callbacks, collectives, copies, and launching.

    Where a step gathers its batch itself, from arrays that are resident, the gather is one of its operations.

    Args:
        trace: the .xplane.pb of a ``Profiler``. Both backends write this format, and JAX' reader serves for both.
        num_steps: training steps in the calls that count.
    """
    from jax.profiler import ProfileData

    windows: dict[int, tuple[float, float]] = {}
    waits: Intervals = []
    host: Intervals = []
    device: Intervals = []
    data = ProfileData.from_file(str(trace))
    for plane in data.planes:
        on_device = plane.name.startswith(("/device:GPU", "/device:TPU"))
        for line in plane.lines:
            for event in line.events:
                interval = (event.start_ns, event.start_ns + event.duration_ns)
                if on_device:
                    if line.name.startswith(("Stream", "XLA Ops")) and not COLLECTIVE.match(event.name):
                        device.append(interval)
                elif event.name == WAIT or ("GetNext" in event.name and event.name.endswith("::DoCompute")):
                    waits.append(interval)
                elif event.name == CALL:
                    epoch = dict(event.stats).get("epoch")
                    if epoch is not None:
                        first, last = windows.get(epoch, interval)
                        windows[epoch] = min(first, interval[0]), max(last, interval[1])
                elif line.name.startswith("tf_Compute"):
                    if OPERATION.fullmatch(event.name):
                        host.append(interval)
                # The input pipeline has threads of its own.
                elif not line.name.startswith("tf_data") and not COLLECTIVE.match(event.name) and _is_xla(event):
                    host.append(interval)
    calls = list(windows.values())
    computing = device or host
    compute, busy = _covered(computing, calls), _covered([*computing, *waits], calls)
    times = {"input_wait": busy - compute, "compute": compute, "other": _covered(calls, calls) - busy}
    return {name: nanoseconds / 1e6 / num_steps for name, nanoseconds in times.items()}


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

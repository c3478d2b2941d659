"""Trace training steps with the profiler, mark them, and split a step's time into its parts."""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import keras

Intervals = list[tuple[float, float]]
Batch = TypeVar("Batch")

CALL = "train"
"""Marks a call of the train function in a trace; TensorBoard shows it as a step."""
WAIT = "input_wait"
"""Marks a wait for input outside a compiled function."""
OPERATION = re.compile(r"[^:]+:\w+")
"""How TensorFlow names an operation in a trace: `adam/Sqrt_5:Sqrt`, the node and its type."""
SUM = re.compile(r"[^:]+:(Collective|Nccl)\w+")
"""Operations that sum over replicas; such an operation ends when the last replica has reached it."""
COLLECTIVE = re.compile(r"(all-(reduce|gather|to-all)|reduce-scatter|collective-|nccl)")
"""How the names of XLA's and a GPU's collectives begin."""
COPY = re.compile(r"Memcpy|Memset")
"""How the names of a GPU's copies begin."""


def start(folder: Path) -> None:
    """Start a trace; a process can have only one at a time."""
    if keras.backend.backend() == "jax":
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # On by default, and slows every call of a Python function.
        jax.profiler.start_trace(folder, profiler_options=options)
    else:
        import tensorflow as tf

        tf.profiler.experimental.start(str(folder))


def stop() -> None:
    """Stop the trace and write it into its folder."""
    if keras.backend.backend() == "jax":
        import jax

        jax.profiler.stop_trace()
    else:
        import tensorflow as tf

        tf.profiler.experimental.stop()


def split(trace: Path, num_steps: int) -> dict[str, float]:
    """Return how the time of the traced calls is split, in ms per step: ``compute``, ``collectives``, ``input_wait``
    and ``host``.

    The four add up to the time from the start of an epoch's first traced call to the end of its last one. Each moment
    counts for the first part in this list that applies:

    - ``compute``: an operation of the step is running, on the GPU or TPU if there is one, else on CPU threads.
    - ``collectives``: nothing computes and gradients are summed over replicas, including the wait for slower replicas.
    - ``input_wait``: neither, and the step waits for its next batch: TensorFlow's ``IteratorGetNext`` inside the
      compiled function, or an ``input_wait`` mark outside.
    - ``host``: the rest: Python, callbacks, launching, copies to a device.

    If a step gathers its batch from resident arrays, the gather counts as one of its operations.

    Args:
        trace: an .xplane.pb file. Both backends write this format; JAX's reader reads both.
        num_steps: training steps in the traced calls.
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
    """Return the time window of each epoch's calls, and the intervals of the events by kind."""
    from jax.profiler import ProfileData

    windows: dict[int, tuple[float, float]] = {}
    found: dict[str, Intervals] = {"host": [], "device": [], "collectives": [], "input_wait": []}
    for plane in ProfileData.from_file(str(trace)).planes:
        on_device = plane.name.startswith(("/device:GPU", "/device:TPU"))
        for line in plane.lines:
            for event in line.events:
                interval = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name == CALL and not on_device:
                    epoch = dict(event.stats)["epoch"]
                    first, last = windows.get(epoch, interval)
                    windows[epoch] = min(first, interval[0]), max(last, interval[1])
                elif (what := _kind_of_event(event, line.name, on_device)) is not None:
                    found[what].append(interval)
    return windows, {**found, "compute": found["device"] or found["host"]}


def _kind_of_event(event: Any, line: str, on_device: bool) -> str | None:
    """Return the kind of an event: an operation on the host or a device, a collective, a wait, or None."""
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
    # The input pipeline runs in its own threads.
    if line.startswith("tf_data") or not _is_xla(event):
        return None
    return "collectives" if COLLECTIVE.match(event.name) else "host"


def _is_xla(event: Any) -> bool:
    return any(name == "hlo_op" for name, _ in event.stats)


def _covered(intervals: Iterable[tuple[float, float]], windows: Intervals) -> float:
    """Return how much time of disjoint windows the intervals cover."""
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
    """Yield the batches and mark the wait for each in a trace, because JAX has no operation that reads input.

    Without a running trace this costs almost nothing."""
    import jax

    while True:
        with jax.profiler.TraceAnnotation(WAIT):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch


def mark_call(step: int, epoch: int) -> AbstractContextManager[Any]:
    """Mark a call of the train function in a trace."""
    if keras.backend.backend() == "jax":
        import jax

        annotation: AbstractContextManager[Any] = jax.profiler.StepTraceAnnotation(CALL, step_num=step, epoch=epoch)
        return annotation
    import tensorflow as tf

    trace: AbstractContextManager[Any] = tf.profiler.experimental.Trace(CALL, step_num=step, _r=1, epoch=epoch)
    return trace

"""Strategies by kind: the file is the key, and its ``build`` makes a ``Strategy`` from its section of the settings."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks import config
from tasks.records import Placement, VariablePlacement


def local_copies(variable: Any) -> tuple[tuple[str, ...], str, int]:
    """Locate a Keras variable of the TensorFlow backend in this process: on one device, or mirrored on several."""
    import numpy as np  # The process of a command imports `engines`, and so this package.

    copies = getattr(variable.value, "values", (variable.value,))
    num_bytes = int(np.prod(variable.shape)) * np.dtype(copies[0].dtype.as_numpy_dtype).itemsize
    return tuple(copy.device for copy in copies), "mirrored" if len(copies) > 1 else "whole", num_bytes


def _as_int64(values: Any) -> Any:
    import numpy as np

    return np.asarray(values, np.int64)


@dataclass(frozen=True)
class Strategy:
    """Where a training runs."""

    kind: str
    num_replicas: int
    """Of all workers together."""
    devices: tuple[str, ...]
    """Names of the devices that hold a replica, as the backend spells them."""
    scope: Callable[[], AbstractContextManager[Any]]
    """Variables (model, optimizer, metrics) are made inside it."""
    distribute: Callable[[Any], Any] = lambda dataset: dataset
    """Takes a ``tf.data.Dataset`` whose elements are per-replica batches, in the replicas' order; returns one that
    gives each replica its own."""
    run: Callable[..., Any] = lambda step, args: step(*args)
    """``run(step, args)`` calls a step on every replica (``tf.distribute.Strategy.run``)."""
    local_replica: Callable[[], Any] = lambda: 0
    """Inside a step: the number of the replica that runs it, among those of this worker."""
    local_results: Callable[[Any], Sequence[Any]] = lambda value: (value,)
    """Takes what ``run`` returned; returns the value of each replica of this worker, in their order."""
    place_batch: Callable[[Any, int], Any] = lambda batch, size: batch
    """On JAX: takes this worker's part of a batch, or all of it, arrays (n, ...), and how many examples the batch has;
    puts it on the devices."""
    replicate: Callable[[Any], Any] = lambda array: array
    """On JAX: puts all of an array that each worker has on each device."""
    lay_out: Callable[[Any], Any] = lambda batch: batch
    """On JAX, inside a step: cuts a batch over the devices."""
    all_reduce: Callable[[Any], Any] = lambda tensors: tensors
    """Inside a step: the sum of a list of tensors over all replicas, on each of them."""
    locate: Callable[[Any], tuple[tuple[str, ...], str, int]] = local_copies
    """Takes a Keras variable; returns its devices, its sharding, and the bytes of it on one device."""
    sum_over_workers: Callable[[Any], Any] = _as_int64
    """Gives every worker the sum over all of them of each number of an array int64, of any shape."""
    broadcast: Callable[[bytes], bytes] = lambda payload: payload
    """Gives every worker the chief's bytes."""
    check_model: Callable[[Any], None] = lambda model: None
    """Raises ``UserError`` when a built model does not fit the strategy."""
    collectives: str = "none"
    """What sums the gradients."""
    distributed: bool = False
    """Whether tf.distribute runs the steps."""
    coordinator: Any = None
    """The ``ClusterCoordinator`` of parameter servers."""
    backend: str = "tensorflow"
    worker: int = 0
    num_workers: int = 1
    is_one_program: bool = False
    """Whether a variable is one array over all workers: what reads or changes it in a way that needs them, they do
    together."""
    share: tuple[int, int] | None = None
    """Which part of a batch this worker reads, and of how many; None is a part for each worker."""

    @property
    def is_chief(self) -> bool:
        """Whether this process tracks, writes checkpoints and prints."""
        return self.worker == 0

    @property
    def on_cpus(self) -> bool:
        """Whether the replicas are on CPUs."""
        return all("cpu" in device.lower() for device in self.devices)

    @property
    def num_local_replicas(self) -> int:
        """Replicas of this worker."""
        return self.num_replicas // self.num_workers

    @property
    def reads(self) -> tuple[int, int, int]:
        """What ``Batches`` takes: which part of a batch this worker reads, of how many, and what a batch must divide by
        to be cut at all."""
        part, num_parts = self.share or (self.worker, self.num_workers)
        return part, num_parts, self.num_replicas if self.is_one_program else 1

    def describe(self) -> str:
        """Return one line: the kind, the replicas and the devices they really lie on."""
        replicas = f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}"
        workers = f" in {self.num_workers} workers" if self.num_workers > 1 else ""
        return f"{self.kind}, {replicas}{workers} on {', '.join(self.devices)}"

    def placement_of(self, model: Any) -> Placement:
        """Return where each variable of a built model and of its optimizer really lies."""
        variables = []
        for variable in [*model.variables, *model.optimizer.variables]:
            devices, sharding, num_bytes = self.locate(variable)
            variables.append(
                VariablePlacement(
                    path=variable.path,
                    shape=tuple(variable.shape),
                    dtype=variable.dtype,
                    devices=devices,
                    sharding=sharding,
                    bytes_per_device=num_bytes,
                )
            )
        return Placement(
            strategy=self.kind,
            backend=self.backend,
            num_replicas=self.num_replicas,
            num_workers=self.num_workers,
            devices=self.devices,
            collectives=self.collectives,
            variables=tuple(variables),
        )


def build(section: config.AnyStrategy) -> Strategy:
    """Return the strategy of a section; it takes hold of the devices, once for the whole process.

    Raises:
        UserError: a device that the section names does not exist.
    """
    return _build(section.kind, section.model_dump_json())


def on_one_device() -> Strategy:
    """Return the strategy of a process that computes on its first device, whatever it has been asked for before."""
    return Strategy("one_device", 1, (), scope=nullcontext)


@lru_cache(maxsize=1)
def _build(kind: str, values: str) -> Strategy:
    section = config.strategy_kinds()[kind].model_validate_json(values)
    strategy: Strategy = importlib.import_module(f"tasks.strategies.{kind}").build(section)
    return strategy

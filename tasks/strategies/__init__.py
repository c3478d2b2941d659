"""Strategies by kind: each file is named after its kind, and its ``build`` makes a ``Strategy`` from the settings.
`environment` has the environment of the processes, `engines` their places."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks import config
from tasks.records import Placement, VariablePlacement
from tasks.system import units


def tasks_of(cluster: Mapping[str, Sequence[str]]) -> list[tuple[str, int]]:
    """Return the (job, index) of each process of a cluster, the chief first."""
    return [(job, index) for job in ("chief", "worker", "ps") for index in range(len(cluster.get(job, ())))]


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
    """Replicas of all workers together."""
    devices: tuple[str, ...]
    """The backend's names of the devices that hold a replica."""
    scope: Callable[[], AbstractContextManager[Any]]
    """Create variables (model, optimizer, metrics) inside it."""
    distribute: Callable[[Any], Any] = lambda dataset: dataset
    """Takes a ``tf.data.Dataset`` of per-replica batches in the replicas' order; returns a dataset that gives each
    replica its own batch."""
    run: Callable[..., Any] = lambda step, args: step(*args)
    """``run(step, args)`` calls a step on every replica (``tf.distribute.Strategy.run``)."""
    local_replica: Callable[[], Any] = lambda: 0
    """Inside a step: the index of the replica that runs it among this worker's replicas."""
    local_results: Callable[[Any], Sequence[Any]] = lambda value: (value,)
    """Takes the result of ``run``; returns the value of each replica of this worker, in order."""
    place_batch: Callable[[Any, int], Any] = lambda batch, size: batch
    """On JAX: takes this worker's part of a batch, or the whole batch, arrays (n, ...), and the number of examples of
    the whole batch; places it on the devices."""
    replicate: Callable[[Any], Any] = lambda array: array
    """On JAX: takes an array that every worker has and copies it to each device."""
    lay_out: Callable[[Any], Any] = lambda batch: batch
    """On JAX, inside a step: splits a batch over the devices."""
    all_reduce: Callable[[Any], Any] = lambda tensors: tensors
    """Inside a step: sums a list of tensors over all replicas and gives each replica the sums."""
    locate: Callable[[Any], tuple[tuple[str, ...], str, int]] = local_copies
    """Takes a Keras variable; returns its devices, its sharding, and its bytes on one device."""
    sum_over_workers: Callable[[Any], Any] = _as_int64
    """Takes an int64 array of any shape; returns the elementwise sum over all workers on every worker."""
    broadcast: Callable[[bytes], bytes] = lambda payload: payload
    """Returns the chief's bytes on every worker."""
    check_model: Callable[[Any], None] = lambda model: None
    """Raises ``UserError`` if a built model does not fit the strategy."""
    collectives: str = "none"
    """The method that sums the gradients."""
    distributed: bool = False
    """Whether tf.distribute runs the steps."""
    coordinator: Any = None
    """The ``ClusterCoordinator`` of parameter servers."""
    backend: str = "tensorflow"
    worker: int = 0
    num_workers: int = 1
    is_one_program: bool = False
    """Whether each variable is one array over all workers, so that all workers must take part in operations on it."""
    share: tuple[int, int] | None = None
    """The part of a batch that this worker reads, and the number of parts; None means one part per worker."""

    @property
    def is_chief(self) -> bool:
        """Whether this process tracks, writes checkpoints and prints."""
        return self.worker == 0

    @property
    def on_cpus(self) -> bool:
        """Whether all replicas are on CPUs."""
        return all("cpu" in device.lower() for device in self.devices)

    @property
    def num_local_replicas(self) -> int:
        """Replicas of this worker."""
        return self.num_replicas // self.num_workers

    @property
    def reads(self) -> tuple[int, int, int]:
        """The arguments of ``Batches``: the part of a batch that this worker reads, the number of parts, and the number
        that a batch size must be divisible by to be split at all."""
        part, num_parts = self.share or (self.worker, self.num_workers)
        return part, num_parts, self.num_replicas if self.is_one_program else 1

    def describe(self) -> str:
        """Return one line: the kind, the replicas and their actual devices."""
        replicas = units.count(self.num_replicas, "replica")
        workers = f" in {self.num_workers} workers" if self.num_workers > 1 else ""
        return f"{self.kind}, {replicas}{workers} on {', '.join(self.devices)}"

    def placement_of(self, model: Any) -> Placement:
        """Return the actual placement of each variable of a built model and its optimizer."""
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
    """Return the strategy of a section; it claims the devices, once per process.

    Raises:
        UserError: a device in the section does not exist.
    """
    return _build(section.kind, section.model_dump_json())


def on_one_device() -> Strategy:
    """Return a strategy that computes on this process's first device, whatever strategy was built before."""
    return Strategy("one_device", 1, (), scope=nullcontext)


@lru_cache(maxsize=1)
def _build(kind: str, values: str) -> Strategy:
    section = config.strategy_kinds()[kind].model_validate_json(values)
    strategy: Strategy = importlib.import_module(f"tasks.strategies.{kind}").build(section)
    return strategy

"""The service source: an array's batches, gathered and augmented by the workers of tf.data service.

Which rows a step reads and what is drawn for them is decided here, as without the service, and lies in files that the
workers map. The service hands the steps out, each to one worker (TensorFlow's dynamic sharding, ``distributed_epoch``),
which promises that none comes twice, and no order; a worker that ends takes the steps that it had with it
(https://www.tensorflow.org/api_docs/python/tf/data/experimental/service/ShardingPolicy). A batch says which step it is
of, so they are put in order again here, and what does not come is gathered here: each step once, in the order without
the service, whatever becomes of the workers.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import numpy as np
from filelock import FileLock

from tasks import config
from tasks.input.array import ArraySource, in_graph, read_at_random
from tasks.input.augment import augment_batch
from tasks.input.batches import Batch, Batches
from tasks.input.draws import with_partners
from tasks.input.order import Rows
from tasks.records import as_input
from tasks.system import files, network
from tasks.system.errors import StratagemError, UserError

AHEAD = 8
"""How many batches wait here to be put in order."""
MOST_OVERTAKEN = 64
"""So many later batches may come before one that is missing; then it is gathered here."""
PATIENCE_SECONDS = 30.0
"""So long nothing may come; then the rest of the pass is gathered here. The first batch waits for the graph."""
START_SECONDS = 120.0
"""So long servers beside this process may take to start: they import TensorFlow."""
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


def check(section: config.Input) -> None:
    """Refuse a service that is not there; wait for one that is starting beside this process.

    Raises:
        UserError: nobody answers at its address.
    """
    if section.service == "none":
        return
    _await(find_address(section), f"input.service = '{section.service}'", section.service == "local")


def _await(address: str, asked: str, starts: bool = False) -> None:
    end = time.monotonic() + (START_SECONDS if starts else 0)
    while refused := _refused(address):
        if time.monotonic() > end:
            host, _, port = address.removeprefix("grpc://").rpartition(":")
            raise UserError(
                f"{asked}: {refused}. Start it with `stratagem serve-input --open --port {port}` on {host}, or give "
                "input.service=none"
            )
        time.sleep(POLL_SECONDS)


def _refused(address: str) -> str:
    """Return why nobody can be reached at an address, or nothing."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    error = network.connection_error(host, int(port), 5.0)
    return "" if error is None else f"nobody answers at {address} ({error})"


def find_address(section: config.Input) -> str:
    """Return where the service's dispatcher is.

    Raises:
        UserError: it is to be beside this process, which was started without one.
    """
    if section.service != "local":
        return section.service
    try:
        return os.environ[network.INPUT_SERVICE]
    except KeyError:
        raise UserError(
            "input.service = 'local': this process was started without the service, which `stratagem` starts beside "
            "the stages of a run. Give input.service=none, or the address of one"
        ) from None


def start_server(address: str, joins_as: str | None = None) -> Any:
    """Start a worker of tf.data service, and its dispatcher where that is not another process; return the worker.

    Args:
        address: the dispatcher's, `grpc://host:port`.
        joins_as: what others reach this machine by, where the dispatcher is another process.

    Raises:
        UserError: nobody answers there.
    """
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # It would take the memory of those that train.
    service = tf.data.experimental.service
    place = address.removeprefix("grpc://")
    host, _, port = place.rpartition(":")
    dispatcher = None
    if joins_as is None:
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=int(port), protocol="grpc"))
    else:
        _await(address, f"--join {address}")
    worker = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=place, worker_address=f"{joins_as or host}:%port%", protocol="grpc")
    )
    worker.dispatcher = dispatcher  # It serves as long as the object is there.
    return worker


def put_in_order(
    steps: range,
    take: Callable[[bool], tuple[int, Batch] | None],
    gather: Callable[[int], Batch],
    most_overtaken: int = MOST_OVERTAKEN,
) -> Iterator[Batch]:
    """Yield the batch of each step, in their order, as soon as it is known.

    Args:
        steps: each is yielded once.
        take: returns a step and its batch, in no order, or None where nothing comes any more; it is told whether
            anything came before.
        gather: makes the batch of a step here.
        most_overtaken: when so many later batches wait, the one that is missing is gathered.
    """
    arrived: dict[int, Batch] = {}
    came = ended = False
    for step in steps:
        while not (ended or step in arrived or len(arrived) >= most_overtaken):
            got = take(came)
            came, ended = came or got is not None, got is None
            if got is not None and got[0] >= step:
                arrived[got[0]] = got[1]
        yield arrived.pop(step) if step in arrived else gather(step)


@dataclass
class ServiceSource:
    """Rows of prepared arrays, made batches of by others."""

    array: ArraySource
    address: str
    patience_seconds: float = PATIENCE_SECONDS
    reads_ahead = False
    _made: Any = field(default=None, init=False, repr=False)
    _silent: bool = field(default=False, init=False)
    """Whether it has been waited for in vain; where nobody listens any more, each pass asks anew."""

    def rows_at(self, places: Rows) -> Rows:
        """Return which rows of the split's arrays lie at these places of the unshuffled data."""
        return self.array.rows_at(places)

    def arrays(self, batches: Batches) -> Iterator[Batch]:
        """Yield one batch a step in NumPy, through TensorFlow, which then leaves the GPUs alone."""
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")  # It would take all memory of a GPU that JAX trains on.
        yield from self._in_order(batches)

    def _in_order(self, batches: Batches) -> Iterator[Batch]:
        unread, in_pass = batches.unread, batches.steps_in_pass
        for number in range(unread.start // in_pass, -(-unread.stop // in_pass)):
            first, stop = max(unread.start, number * in_pass), min(unread.stop, (number + 1) * in_pass)
            yield from self._pass(batches, number, range(first, stop))

    def dataset(self, batches: Batches) -> Any:
        """Return the ``tf.data.Dataset`` of one batch a step."""
        import tensorflow as tf

        specs = [tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) for spec in tf.nest.flatten(self._specs(batches))]
        signature = tf.nest.pack_sequence_as(self._specs(batches), specs)
        return tf.data.Dataset.from_generator(lambda: self._in_order(batches), output_signature=signature)

    def close(self) -> None:
        """Nothing is cached on the disk."""

    def _pass(self, batches: Batches, number: int, steps: range) -> Iterator[Batch]:
        """Yield the batches of steps of one pass."""
        if self._silent or self._gives_up(_refused(self.address)):
            yield from (self._gather(batches, step) for step in steps)
            return
        with (
            # All workers see it. `runs.remove_leftovers` removes that of a process that died, whose lock is free.
            files.scratch(config.project_root() / "mlruns", ".input.") as folder,
            FileLock(folder / files.MARK),
            self._coming(batches, steps, self._write(batches, number, folder)) as coming,
        ):
            yield from put_in_order(
                steps, lambda came: self._next(coming, came), lambda step: self._gather(batches, step)
            )

    def _next(self, coming: "Queue[Any]", came: bool) -> tuple[int, Batch] | None:
        """Return what comes next, or None where nothing does, and say so; ``came`` is whether anything of the pass did.

        Raises:
            StratagemError: the workers cannot read what they are to read.
        """
        end = time.monotonic() + self.patience_seconds
        while True:
            try:
                got = coming.get(timeout=min(1.0, self.patience_seconds))
            except Empty:
                silent = time.monotonic() > end
                self._silent = (
                    silent and not came
                )  # One worker of several may be lost, which the next pass does without.
                if self._gives_up(
                    f"nothing came for {self.patience_seconds:g} s" if silent else _refused(self.address)
                ):
                    return None
                continue
            if isinstance(got, Exception):
                raise StratagemError(
                    f"the workers at {self.address} fail ({str(got).strip().splitlines()[0]}). Each has to see this "
                    "project's folder under the same path, with the same packages"
                ) from got
            return got[0], got[1]

    def _gives_up(self, why: str) -> bool:
        """Return whether there is a reason to make batches here, and say so."""
        if why:
            until = "training" if self._silent else "pass"
            log.warning("input     %s: %s; this process makes the rest of the %s itself", self.address, why, until)
        return bool(why)

    @contextlib.contextmanager
    def _coming(self, batches: Batches, steps: range, pass_files: Sequence[Path]) -> Iterator["Queue[Any]"]:
        """Give a queue of (step, batch) as they come, in a thread; at its end may be what went wrong."""
        coming: Queue[Any] = Queue(AHEAD)
        closed = threading.Event()

        def put(one: Any) -> None:
            while not closed.is_set():
                with contextlib.suppress(Full):
                    coming.put(one, timeout=POLL_SECONDS)
                    return

        def read() -> None:
            try:
                served = self._served(batches, steps, pass_files)
                # No more than that: where a worker has gone, the end never comes.
                for _, (step, batch) in zip(steps, served.as_numpy_iterator(), strict=False):
                    put((int(step), batch))
                    if closed.is_set():
                        return
            except Exception as error:
                put(error)

        # Where the servers have gone TensorFlow waits for them for ever, and nobody for this thread.
        threading.Thread(target=read, name="input-service", daemon=True).start()
        try:
            yield coming
        finally:
            closed.set()

    def _gather(self, batches: Batches, step: int) -> Batch:
        return next(self.array.gather(batches, self._mapped, range(step, step + 1)))

    @cached_property
    def _mapped(self) -> Batch:
        arrays = self.array.mapped()
        read_at_random(arrays)
        return arrays

    def _write(self, batches: Batches, number: int, folder: Path) -> list[Path]:
        """Return files of which rows a pass reads, in its order, and of what is drawn for them, if anything."""
        section, places = batches.augmentation, np.arange(batches.num_examples)
        pass_files = [folder / "rows.npy"]
        if section is not None:
            draws = batches.pass_draws(number, section)
            if section.mixes:
                places = with_partners(places, draws)
            pass_files.append(folder / "draws.npy")
            np.save(pass_files[1], draws[places])
        np.save(pass_files[0], self.rows_at(batches.pass_order(number)[places]))
        return pass_files

    def _served(self, batches: Batches, steps: range, pass_files: Sequence[Path]) -> Any:
        """Return the dataset of (step, batch) that the service reads: steps of one pass, in no order."""
        import tensorflow as tf

        total, size = batches.num_examples, batches.global_batch_size
        make = self._make(batches)

        def batch_of(step: Any) -> Any:
            first = step % batches.steps_in_pass * size
            count = tf.minimum(tf.constant(size, tf.int64), total - first)
            begin = first + count * batches.worker // batches.num_workers
            end = first + count * (batches.worker + 1) // batches.num_workers
            return step, make(*(in_graph(file)[begin:end] for file in pass_files))

        dataset = tf.data.Dataset.range(steps.start, steps.stop).map(
            tf.autograph.experimental.do_not_convert(batch_of), num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
        )
        return dataset.apply(tf.data.experimental.service.distribute("distributed_epoch", self.address))

    def _specs(self, batches: Batches) -> Any:
        return self._make(batches).structured_outputs

    def _make(self, batches: Batches) -> Any:
        """Return the graph that makes a batch of its rows and of what is drawn for them; traced once."""
        if self._made is None:
            self._made = self._trace(batches)
        return self._made

    def _trace(self, batches: Batches) -> Any:
        import tensorflow as tf

        features, labels, weights, _ = self.array.files()
        section = batches.augmentation
        pair = [2] if section is not None and section.mixes else []
        of_rows = [tf.TensorSpec([None, *pair], tf.int64)]
        of_draws = []
        if section is not None:
            columns = batches.pass_draws(0, section).shape[1]
            of_draws = [tf.TensorSpec([None, *pair, columns], tf.int32)]

        @tf.function(input_signature=[*of_rows, *of_draws], autograph=False)
        def make(rows: Any, *draws: Any) -> Any:
            x = as_input({name: tf.gather(in_graph(path), rows) for name, path in features})
            y = tf.gather(in_graph(labels), rows)
            batch: Batch = (x, y)
            of_example = None if weights is None else tf.gather(in_graph(weights), rows)
            if self.array.class_weights is not None:
                of_class = tf.gather(tf.constant(self.array.class_weights, tf.float32), y)
                of_example = of_class if of_example is None else of_example * of_class
            if of_example is not None:
                batch = *batch, of_example
            if section is not None:
                batch = augment_batch(batch, draws[0], section, batches.num_classes)
            return batch

        return make.get_concrete_function()

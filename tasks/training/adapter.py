"""What Keras' ``Model.fit`` is given to read."""

from collections.abc import Callable, Iterator
from typing import Any

from tasks.input.batches import Batches
from tasks.system import upstream
from tasks.training.trace import marked


class Epochs(upstream.data_adapter()):  # type: ignore[misc]
    """What ``Model.fit`` reads: batches iterated once an epoch, which say how many steps an epoch has.

    Keras would ask the dataset, and a distributed one counts a step once for each replica. It must not learn the
    length from the end of the data either: the step that finds no data has already advanced Dropout's seeds.
    """

    def __init__(
        self,
        batches: Batches,
        steps: int,
        dataset: Any = None,
        count: Callable[[int], int] | None = None,
        place: Callable[[Any, int], Any] = lambda batch, size: batch,
    ) -> None:
        """
        Args:
            batches: what is read.
            steps: of an epoch.
            dataset: what TensorFlow iterates instead of that of ``batches``.
            count: takes the steps that are left, returns those of the next call; without it Keras counts.
            place: on JAX, puts a batch of so many examples on the devices.
        """
        self._batches = batches
        self._steps = steps
        self._dataset = dataset
        self._count = count
        self._place = place

    def iterate_in_calls(self, iterator: Any) -> None:
        """Let an iterator of Keras' go through an epoch in calls of as many steps as ``count`` says: its own ones do
        the same number each time."""

        def calls(source: Any) -> Iterator[tuple[int, int, Any]]:
            done = 0
            while done < self._steps:
                count = self._count(self._steps - done) if self._count else self._steps
                yield done, done + count - 1, source
                done += count

        upstream.set_calls(iterator, calls)

    def get_tf_dataset(self) -> Any:
        return self._batches.dataset if self._dataset is None else self._dataset

    def get_jax_iterator(self) -> Iterator[Any]:
        for step, batch in zip(self._batches.unread, marked(self._batches.arrays()), strict=True):
            yield self._place(batch, self._batches.size(step))

    @property
    def num_batches(self) -> int:
        return self._steps

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None

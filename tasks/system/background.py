"""Work in threads while the caller continues: results ahead of time, or one task behind."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_order(
    make: Callable[[Given], Made], given: Iterable[Given], threads: int, ahead: int, name: str = ""
) -> Generator[Made]:
    """Yield ``make(one)`` for each of ``given``, in order, while threads make the next ones.

    An exception of ``make`` is raised in place of its result. Closing the generator waits for running calls and starts
    no others.

    Args:
        threads: number of threads.
        ahead: the number of results in memory besides the one that the caller uses.
        name: prefix of the threads' names.
    """
    pool, waiting = ThreadPoolExecutor(threads, name), deque[Future[Made]]()
    try:
        for one in given:
            waiting.append(pool.submit(make, one))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # Also when the caller closes the generator.
        pool.shutdown(cancel_futures=True)


class OneBehind:
    """Runs one task after another in a thread while the caller continues; the next call raises a task's exception."""

    def __init__(self, name: str) -> None:
        """Start a thread whose name begins with ``name``."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._doing: Future[object] | None = None

    def start(self, do: Callable[..., object], *given: Any) -> None:
        """Wait for the previous task, and start the next."""
        self.wait()
        self._doing = self._thread.submit(do, *given)

    def wait(self) -> None:
        """Wait for the running task, and raise its exception, once."""
        if self._doing is not None:
            doing, self._doing = self._doing, None
            doing.result()

    def stop(self) -> None:
        """Let the running task end; ``wait`` still raises its exception."""
        self._thread.shutdown()

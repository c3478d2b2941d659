"""Work in threads while the caller continues: results ahead of time."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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

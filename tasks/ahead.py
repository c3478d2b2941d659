"""What threads make while what came before is used."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_order(
    make: Callable[[Given], Made], given: Iterable[Given], threads: int, ahead: int, name: str = ""
) -> Generator[Made]:
    """Yield what ``make`` returns for each of ``given``, in their order, while threads make some that follow.

    What ``make`` raises is raised where its result would be yielded. Closed, or dropped, it waits for those that are
    being made, and makes no other one.

    Args:
        threads: how many make at once.
        ahead: how many are made, or wait to be, while one is used; the memory holds so many and that one.
        name: what the threads' names begin with.
    """
    pool, waiting = ThreadPoolExecutor(threads, name), deque[Future[Made]]()
    try:
        for one in given:
            waiting.append(pool.submit(make, one))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # Also when nobody wants the rest.
        pool.shutdown(cancel_futures=True)

"""What threads do while their caller goes on: make what follows, or finish what came before."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

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


class OneBehind:
    """Does one thing after another in a thread, while the caller goes on; what fails is raised by the next call."""

    def __init__(self, name: str) -> None:
        """Make the thread, whose name begins with ``name``."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._doing: Future[object] | None = None

    def start(self, do: Callable[..., object], *given: Any) -> None:
        """Wait for the one before, and start the next."""
        self.wait()
        self._doing = self._thread.submit(do, *given)

    def wait(self) -> None:
        """Wait for what is being done, and raise what it raised, once."""
        if self._doing is not None:
            doing, self._doing = self._doing, None
            doing.result()

    def stop(self) -> None:
        """Let what is being done end; ``wait`` still raises what it raised."""
        self._thread.shutdown()

"""How busy a machine is with other work while something is measured."""

import time
from contextlib import suppress

import psutil

from tasks.system.machine import core_numbers


class MachineLoad:
    """How busy other programs keep the processor cores of this process, since this object was made."""

    def __init__(self) -> None:
        # This takes a while on a busy machine: it comes first at both ends, so that both are as late.
        self._own = self._of_family()
        self._began, self._all = time.perf_counter(), self._busy()

    def of_others(self) -> float:
        """Return how many cores others kept busy on average; what this process started must still be there."""
        own = self._of_family()
        seconds, used_by_all = time.perf_counter() - self._began, self._busy() - self._all
        mine = sum(used - self._own.get(pid, 0.0) for pid, used in own.items())
        return round(max(0.0, used_by_all - mine) / max(seconds, 1e-9), 2)

    @staticmethod
    def _busy() -> float:
        """Return the seconds that all programs have used these cores."""
        cores, mine = psutil.cpu_times(percpu=True), core_numbers()
        idle = (times.idle + getattr(times, "iowait", 0.0) for times in cores)
        return sum(sum(times) - lazy for i, (times, lazy) in enumerate(zip(cores, idle, strict=True)) if i in mine)

    @staticmethod
    def _of_family() -> dict[int, float]:
        """Return the seconds that this process and those below it have used, by pid."""
        used = {}
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
        return used

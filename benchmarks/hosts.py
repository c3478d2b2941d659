"""Hosts on this one machine: a network namespace each, and a wire between them that is slow, loses packets, or is cut.

Linux limits the bandwidth (`tc qdisc ... tbf`). Latency and loss would be `netem`'s, which many kernels lack: here the
wire is a process of its own that takes each packet from one host and gives it to the other, later or never. Root alone
may make them, with `ip` and `tc` of the package iproute2.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "10.99.0"
INTERFACE = "wire"
# Of a network in a data centre; and the wire, which is Python, has a sixth of the packets.
MTU = 9000
# Of <linux/if_tun.h>.
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
# Of <sched.h>.
CLONE_NEWNET = 0x40000000


def missing() -> str | None:
    """Return why there can be no such hosts here, or None."""
    tools = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or tools:
        return f"hosts as network namespaces need Linux, root, and ip and tc of iproute2 (missing: {tools or 'root'})"
    try:
        Hosts(1).close()
        return None
    except RuntimeError as error:
        return f"hosts as network namespaces: {error}"


class Hosts:
    """So many hosts, with the addresses 10.99.0.1, 10.99.0.2 and so on, which end with `close`, or with this process.

    Their network namespaces have no names: the wire holds them, and the processes that are on them.
    """

    def __init__(self, count: int, *, latency_seconds: float = 0.0, loss: float = 0.0, bandwidth: float | None = None):
        """Make them.

        Args:
            count: how many.
            latency_seconds: how long a packet is under way, one way.
            loss: the share of all packets that never arrive.
            bandwidth: bits a second that each host can send; None for what this machine gives.

        Raises:
            RuntimeError: the kernel does not allow it: see `missing`.
        """
        self.addresses = [f"{PREFIX}.{index + 1}" for index in range(count)]
        # It ends when its standard input closes: with this process, however that ends.
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hosts", str(count)],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            answer, *self._namespaces = self._answer().split()
            if answer != "ready":
                raise RuntimeError(" ".join([answer, *self._namespaces]))
            for index, address in enumerate(self.addresses):
                for words in (
                    "link set lo up",
                    f"address add {address}/24 dev {INTERFACE}",
                    f"link set {INTERFACE} mtu {MTU} up",
                ):
                    _run(*self.command(index, "ip", *words.split()))
            self.shape(latency_seconds=latency_seconds, loss=loss, bandwidth=bandwidth)
        except BaseException:
            self.close()
            raise

    def shape(self, *, latency_seconds: float = 0.0, loss: float = 0.0, bandwidth: float | None = None) -> None:
        """Change what the wire is like from now on; see `__init__`."""
        self._tell(f"shape {latency_seconds} {loss}")
        for index in range(len(self.addresses)):
            if bandwidth is None:
                with contextlib.suppress(RuntimeError):  # There is no limit to take away.
                    _run(*self.command(index, "tc", "qdisc", "delete", "dev", INTERFACE, "root"))
            else:
                # A tenth of a second of packets waits at most; a smaller burst is less than the rate at 100 Hz timers.
                burst = max(2 * MTU, int(bandwidth / 8 / 100))
                limit = max(64 * MTU, int(bandwidth / 8 / 10))
                rate = f"rate {int(bandwidth)}bit burst {burst}b limit {limit}b".split()
                _run(*self.command(index, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate))

    def cut(self) -> None:
        """Let no packet through until `heal`; nobody is told."""
        self._tell("cut")

    def heal(self) -> None:
        """Let packets through again."""
        self._tell("heal")

    def command(self, index: int, *words: str, names: Path | None = None) -> list[str]:
        """Return a command on one of the hosts.

        Args:
            index: which, from 0.
            words: the command.
            names: a file that is /etc/hosts there.
        """
        inside = () if names is None else ("unshare", "--mount", "sh", "-c", IN_OWN_NAMES, str(names))
        # `ip netns exec` would mount another /sys, in which Slurm misses its control groups.
        namespace = f"/proc/{self._wire.pid}/fd/{self._namespaces[index]}"
        return ["nsenter", f"--net={namespace}", "--", *inside, *words]

    def close(self) -> None:
        """End the wire, and the hosts; processes on them are to have ended."""
        self._wire.communicate()

    def _tell(self, words: str) -> None:
        if self._wire.stdin is None:
            raise RuntimeError("the hosts are closed")
        self._wire.stdin.write(f"{words}\n")
        self._wire.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        answer = self._wire.stdout.readline() if self._wire.stdout is not None else ""
        if not answer:
            raise RuntimeError("the wire between the hosts has ended")
        return answer.strip()


# Each host has names for itself and for the others, as DNS gives them in a cluster.
IN_OWN_NAMES = 'mount --bind "$0" /etc/hosts && exec "$@"'


@contextlib.contextmanager
def made(
    count: int, *, latency_seconds: float = 0.0, loss: float = 0.0, bandwidth: float | None = None
) -> Iterator[Hosts]:
    """Give so many hosts, which end with the block; see `Hosts`."""
    hosts = Hosts(count, latency_seconds=latency_seconds, loss=loss, bandwidth=bandwidth)
    try:
        yield hosts
    finally:
        hosts.close()


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _carry(count: int) -> None:
    """Be the wire between so many new hosts until standard input closes.

    Each packet of a host is read from its interface, and written to that of the host whose address it has.
    """
    try:
        made = [_make_host() for _ in range(count)]
    except OSError as error:
        print(f"the kernel allows none: {error}", flush=True)
        return
    ends = [end for _, end in made]
    print("ready", *(namespace for namespace, _ in made), flush=True)
    latency, loss, is_cut = 0.0, 0.0, False
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([0, *ends], [], [], wait)
        now = time.monotonic()
        for end in readable:
            if end == 0:
                line = sys.stdin.readline().split()
                if not line:
                    return
                if line[0] == "shape":
                    latency, loss = float(line[1]), float(line[2])
                else:
                    is_cut = line[0] == "cut"
                print("done", flush=True)
                continue
            for _ in range(64):  # Not for ever: the others wait.
                try:
                    packet = os.read(end, 65536)
                except BlockingIOError:
                    break
                receiver = packet[19] - 1  # The last byte of an IPv4 header's destination.
                if packet[0] >> 4 == 4 and receiver < len(ends) and not is_cut and random.random() >= loss:
                    number += 1
                    heapq.heappush(under_way, (now + latency, number, receiver, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # The interface is not up yet: lost, as on any wire.
                os.write(ends[receiver], packet)


def _make_host() -> tuple[int, int]:
    """Return a descriptor of a new network namespace, and one from which the packets of its interface are read."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _libc("unshare", CLONE_NEWNET)
        namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
        return namespace, end
    finally:
        _libc("setns", home, 0)
        os.close(home)


def _libc(name: str, *arguments: int) -> None:
    """Call a function of the C library that Python has from 3.12 on; it moves only this thread."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


if __name__ == "__main__":
    _carry(int(sys.argv[1]))

"""A private network for one cluster: TensorFlow's servers listen on all interfaces and obey every client, even to read
and write files. In a separate network namespace, no other process on this or another machine can reach them.

`unshare` makes the namespace (`make`), and each member enters it with `nsenter`; both programs belong to util-linux. A
user other than root also gets a user namespace that keeps their identity; its extra rights end when a member's command
starts.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping

# Of <linux/sockios.h> and <net/if.h>.
SIOCSIFFLAGS = 0x8914
IFF_UP = 1


class Network:
    """A network that only processes with its descriptors can enter; it ends when the last of both has ended."""

    def __init__(self, namespaces: Mapping[str, int]) -> None:
        self._namespaces = dict(namespaces)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a process that enters must inherit."""
        return tuple(self._namespaces.values())

    def command(self, command: list[str]) -> list[str]:
        """Return a command line that runs in this network; its process must inherit the descriptors."""
        places = [f"--{name}=/proc/self/fd/{descriptor}" for name, descriptor in self._namespaces.items()]
        return ["nsenter", "--preserve-credentials", *places, *command]

    def close(self) -> None:
        """Close the descriptors; processes in the network stay in it."""
        while self._namespaces:
            os.close(self._namespaces.popitem()[1])


def make() -> Network:
    """Return a new network that has only 127.0.0.1.

    Raises:
        OSError: the kernel does not allow it, or `unshare` is missing.
    """
    command, names = ["unshare", "--net"], ["net"]
    if os.geteuid() != 0:  # In a user namespace of its own root could no longer write to what others own.
        command, names = [*command, "--user", "--map-current-user", "--keep-caps"], [*names, "user"]
    command += [sys.executable, "-I", __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, process_group=0) as maker:
        if maker.stdout is not None and not maker.stdout.readline():
            raise OSError(maker.communicate()[1].strip())
        return Network({name: os.open(f"/proc/{maker.pid}/ns/{name}", os.O_RDONLY) for name in names})


if __name__ == "__main__":  # In the new network, which ends when standard input closes unless a descriptor is open.
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    print("ready", flush=True)
    sys.stdin.read()

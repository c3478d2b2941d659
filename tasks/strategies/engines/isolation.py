"""A private network for one cluster: TensorFlow's servers listen on all interfaces and obey every client, even to read
and write files. In a separate network namespace, no other process on this or another machine can reach them.

The process that starts the members creates the network (`make`), and each member enters it before it imports a
framework: this file runs as a script, uses only the standard library, and then executes the member's command. A user
other than root also gets a user namespace that keeps their identity; its extra rights end when the command starts.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

# Of <sched.h>, <net/if.h> and <linux/sockios.h>.
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1


class Network:
    """A network that only processes with its descriptors can enter; it ends when the last of both has ended."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command line that runs in this network; its process must inherit the descriptors."""
        return [sys.executable, "-I", __file__, ",".join(map(str, self.descriptors)), *command]

    def close(self) -> None:
        """Close the descriptors; processes in the network stay in it."""
        given_up, self.descriptors = self.descriptors, ()
        for descriptor in given_up:
            os.close(descriptor)


def make() -> Network:
    """Return a new network that has only 127.0.0.1.

    Raises:
        OSError: the kernel does not allow it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has network namespaces")
    # In another process, because this one has threads and needs its own network.
    with subprocess.Popen(
        [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as maker:
        answer, _, names = (maker.stdout.readline() if maker.stdout is not None else "").strip().partition(" ")
        if answer != "made":
            raise OSError(names or "no answer")
        return Network([os.open(f"/proc/{maker.pid}/ns/{name}", os.O_RDONLY) for name in names.split()])


def _make() -> None:
    """Create a network and stay in it until standard input closes."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:  # In a user namespace of its own root could no longer write to what others own.
            leave_network()
        else:
            _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    except OSError as error:
        print("refused", error, flush=True)
        return
    print("made", "net" if user == 0 else "user net", flush=True)
    sys.stdin.read()  # As `system.lifetime` has it, which this file cannot import.


def _enter(descriptors: str, *command: str) -> None:
    """Enter an existing network and execute a command."""
    for descriptor in map(int, descriptors.split(",")):
        set_namespace(descriptor)
        os.close(descriptor)
    os.execvp(command[0], command)


def leave_network() -> None:
    """Move only this thread into a new, empty network.

    Raises:
        OSError: the kernel does not allow it.
    """
    _call("unshare", CLONE_NEWNET)


def set_namespace(descriptor: int) -> None:
    """Move only this thread into the namespace of an open file such as /proc/self/ns/net.

    Raises:
        OSError: the kernel does not allow it.
    """
    _call("setns", descriptor, 0)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):  # Python has both from 3.12 on.
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    _enter(*sys.argv[1:]) if sys.argv[1:] else _make()

"""A network for one cluster alone: TensorFlow's servers listen on all interfaces and do what anybody asks of them, such
as to read and write files. In a network namespace of their own nobody else reaches them, on this machine or another.

The process that starts the members makes it (`make`), and each member enters it before it is Python with a framework:
this file is run by itself, knows the standard library alone, and then becomes the member's command. A user who is not
root has a user namespace with it, in which they are who they are; what they may do there is lost when the command
begins.
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
    """A network that only processes with its descriptors can enter; it ends with the last of both."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command in this network, for a process that inherits the descriptors."""
        return [sys.executable, "-I", __file__, ",".join(map(str, self.descriptors)), *command]

    def close(self) -> None:
        """Give the network up; processes that are in it stay."""
        given_up, self.descriptors = self.descriptors, ()
        for descriptor in given_up:
            os.close(descriptor)


def make() -> Network:
    """Return a new network with nothing but 127.0.0.1.

    Raises:
        OSError: the kernel does not allow it.
    """
    if sys.platform != "linux":
        raise OSError("only Linux has network namespaces")
    # Another process, because this one has threads, and other things to do with the network.
    with subprocess.Popen(
        [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as maker:
        answer, _, names = (maker.stdout.readline() if maker.stdout is not None else "").strip().partition(" ")
        if answer != "made":
            raise OSError(names or "no answer")
        return Network([os.open(f"/proc/{maker.pid}/ns/{name}", os.O_RDONLY) for name in names.split()])


def _make() -> None:
    """Be in a new network until standard input closes."""
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
    """Become a command in a network that was made."""
    for descriptor in map(int, descriptors.split(",")):
        set_namespace(descriptor)
        os.close(descriptor)
    os.execvp(command[0], command)


def leave_network() -> None:
    """Be in a new network, in which nothing is, with this thread alone.

    Raises:
        OSError: the kernel does not allow it.
    """
    _call("unshare", CLONE_NEWNET)


def set_namespace(descriptor: int) -> None:
    """Enter the namespace of an open file such as /proc/self/ns/net, with this thread alone.

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

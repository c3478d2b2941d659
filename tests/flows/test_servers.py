"""Where the servers of `stratagem up` and `stratagem ui` listen, and whose database and password they take."""

import contextlib
import signal
import socket
import sys
import time

import pytest

from flows.operate import servers, up
from flows.operate.servers import Server


def listen(kept, stack):
    found = servers.listen(kept)
    for one in found.values():
        stack.enter_context(one)
    return {name: one.getsockname() for name, one in found.items()}


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_port_is_held_from_before_its_server_starts(tmp_path, stack):
    """Two commands that begin at once would both find 4200 free, and the slower one would tell the other's server its
    password."""
    places = [place for name in ("a", "b") for place in listen(tmp_path / name, stack).values()]
    assert len(set(places)) == 4
    assert {host for host, _ in places} == {"127.0.0.1"}
    for place in places:
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server(place)


def test_the_ports_of_the_last_time_are_taken_again(tmp_path):
    with contextlib.ExitStack() as first:
        before = listen(tmp_path / "kept", first)
    with contextlib.ExitStack() as second:
        assert listen(tmp_path / "kept", second) == before


@pytest.fixture
def child(project):
    return Server("own", ("own",), {}, project / "mlruns" / "own.log")


def test_pauses_grow_with_each_end_until_it_ran_for_long(child):
    pauses = []
    for _ in range(8):
        child.began, before = time.time(), time.monotonic()
        child.note_end(128 + signal.SIGKILL)
        pauses.append(child.pause)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (child.restarts, child.last_end, child.process) == (8, "SIGKILL", None)
    assert before + 60 <= child.not_before <= time.monotonic() + 60
    child.began = time.time() - servers.LONGEST_PAUSE_SECONDS - 1
    child.note_end(1)
    assert (child.pause, child.last_end) == (1, "exit code 1")


def test_what_a_program_says_is_in_its_log_without_secrets(child):
    child.log.write_bytes(b"x" * (servers.MAX_LOG_BYTES + 1))
    says = "print('first'); print('asked http://me:secret@host/')"
    child.command, child.environment = (sys.executable, "-c", says), {"PATH": ""}
    child.start()
    assert child.process.wait() == 0
    child.process.close()
    assert child.log.read_bytes().startswith(b"first\n")
    assert child.log.with_suffix(".log.1").stat().st_size == servers.MAX_LOG_BYTES + 1
    last = up.last_line(child.log)
    assert last.startswith("asked http://")
    assert "secret" not in last

"""`python -m tasks.system.lifetime`: whatever dies, nothing that it started stays."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.waiting import wait

PATIENCE_SECONDS = 600.0

# A process that starts another one in a session of its own, as a Prefect worker does, and waits for it.
STARTS_ANOTHER = """
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print("started", flush=True)
other.wait()
"""
SAYS_THAT_IT_ENDS = """
import signal, sys, time
def end(number, frame):
    time.sleep(0.5)  # A second signal would end it in the middle.
    open(sys.argv[-1] if len(sys.argv) > 1 else "told", "a").write("told once\\n")
    sys.exit()
signal.signal(signal.SIGTERM, end)
open("ready", "w").close()
time.sleep(600)
"""


@pytest.fixture
def guard(project) -> Iterator["subprocess.Popen[bytes]"]:
    """A guard, with what it guards and what that has started."""
    command = [sys.executable, "-m", "tasks.system.lifetime", sys.executable, "-c", STARTS_ANOTHER, SAYS_THAT_IT_ENDS]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert guard.stdout.readline() == b"started\n"
    wait("the last one handles its signal", (project / "ready").exists)
    yield guard
    for process in [*psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "told once" in " ".join(process.cmdline()):
                process.kill()
    guard.stdin.close()
    guard.stdout.close()
    guard.wait(60)


def _family(guard) -> tuple[psutil.Process, psutil.Process]:
    (guarded,) = psutil.Process(guard.pid).children()
    (other,) = guarded.children()
    return guarded, other


def _gone(process: psutil.Process) -> bool:
    end = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
    return True


def test_what_a_command_started_is_told_once_and_ends_when_input_closes(guard, project):
    family = _family(guard)
    guard.stdin.close()
    assert guard.wait(60) == 128 + signal.SIGTERM or guard.returncode == 0
    assert all(map(_gone, family))
    assert (project / "told").read_text() == "told once\n"


# A process that starts another one in its own session, as a command does a stage; that one ends with its input alone.
STARTS_A_STAGE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, process_group=0)
child.wait()
"""
STAGE = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_stage_is_waited_for_no_longer_than_it_takes_to_save_a_step(project):
    """It waits for its command, which is stopped meanwhile."""
    record = f"lifetime.GRACE_SECONDS, lifetime.RECORD_SECONDS = 1.0, {PATIENCE_SECONDS}"
    program = f"from tasks.system import lifetime; {record}; import sys; sys.exit(lifetime.run_guarded(sys.argv[1:]))"
    command = [sys.executable, "-c", program, sys.executable, "-c", STARTS_A_STAGE, STAGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdout.readline() == b"ready\n"
        family = _family(guard)
        guard.stdin.close()
        assert guard.wait(PATIENCE_SECONDS / 2) == 128 + signal.SIGTERM
    assert all(map(_gone, family))


def test_what_a_killed_command_started_is_told_and_ends(guard, project):
    guarded, other = _family(guard)
    guarded.kill()
    assert guard.wait(60) == 128 + signal.SIGKILL
    assert _gone(other)
    assert (project / "told").read_text() == "told once\n"


LEAVES_AN_ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while not os.path.exists("end"):
            time.sleep(0.05)
    os._exit(0)
os.wait()
print("started", flush=True)
time.sleep(600)
"""


def test_an_orphan_that_ends_leaves_no_zombie(project):
    command = [sys.executable, "-m", "tasks.system.lifetime", sys.executable, "-c", LEAVES_AN_ORPHAN]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert guard.stdout.readline() == b"started\n"
        process = psutil.Process(guard.pid)
        assert len(process.children()) == 2, "the guard has adopted nothing"
        (project / "end").touch()
        wait("the end of what the guard adopted", lambda: len(process.children()) < 2, 60)
        assert guard.poll() is None
    finally:
        guard.stdin.close()
        guard.stdout.close()
        guard.wait(60)


def test_a_killed_guard_takes_its_command_along(guard):
    guarded, other = _family(guard)
    os.kill(guard.pid, signal.SIGKILL)
    assert _gone(guarded)
    other.kill()


def test_a_guard_imports_next_to_nothing(run):
    """`stratagem up` has three of them."""
    shows = "import sys; from tasks.system import lifetime; print(*{'numpy', 'pydantic', 'yaml'} & sys.modules.keys())"
    assert run([sys.executable, "-c", shows]).stdout == "\n"

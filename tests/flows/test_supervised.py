"""One program that is kept running: its pauses, its log."""

import signal
import stat
import sys
import time

import pytest

from flows.operate import supervisor
from flows.operate.servers import Server
from flows.operate.supervisor import SupervisedProgram


@pytest.fixture
def program(project):
    return SupervisedProgram(Server("own", ("own",), {}), project / "mlruns" / "own.log")


def test_pauses_grow_with_each_death_until_it_lived_for_long(program):
    pauses = []
    program.began = time.time()
    for _ in range(8):
        before = time.monotonic()
        pauses.append(program.note_death("SIGKILL"))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (program.restarts, program.last_end, program.process) == (8, "SIGKILL", None)
    assert before + 60 <= program.not_before <= time.monotonic() + 60
    program.began = time.time() - supervisor.STEADY_SECONDS - 1
    assert program.note_death("exit code 1") == 1


def test_what_a_program_says_is_in_its_log_for_this_user_alone(program):
    program.log.write_bytes(b"x" * (supervisor.MAX_LOG_BYTES + 1))
    says = "print('first'); print('asked http://me:secret@host/')"
    program.server = Server("own", (sys.executable, "-c", says), {"PATH": ""})
    program.start()
    assert program.process.wait() == 0
    program.process.stdin.close()
    assert program.log.read_bytes().startswith(b"first\n")
    assert stat.S_IMODE(program.log.stat().st_mode) == 0o600
    assert program.log.with_suffix(".log.1").stat().st_size == supervisor.MAX_LOG_BYTES + 1
    last = supervisor.last_line(program.log)
    assert last.startswith("asked http://")
    assert "secret" not in last


@pytest.mark.parametrize(
    ("code", "words"), [(-signal.SIGKILL, "SIGKILL"), (128 + signal.SIGTERM, "SIGTERM"), (1, "exit code 1")]
)
def test_a_death_in_words(code, words):
    assert supervisor.death_in_words(code) == words

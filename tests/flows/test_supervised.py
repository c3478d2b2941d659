"""One program that is kept running: its pauses, the patience with it, its log."""

import signal
import stat
import sys
import time

import pytest

from flows.operate import supervised
from flows.operate.servers import Server
from flows.operate.supervised import SupervisedProgram


@pytest.fixture
def program(project):
    return SupervisedProgram(Server("own", ("own",), {}), project / "mlruns" / "own.log")


def test_pauses_grow_with_each_death_until_it_lived_for_long(program):
    pauses = []
    program.began = time.time()
    for _ in range(8):
        before = time.monotonic()
        program.note_end("SIGKILL")
        pauses.append(program.pause())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert (program.restarts, program.last_end, program.process) == (8, "SIGKILL", None)
    assert before + 60 <= program.not_before <= time.monotonic() + 60
    program.began = time.time() - supervised.STEADY_SECONDS - 1
    program.note_end("exit code 1")
    assert program.pause() == 1


def test_a_server_that_says_nothing_for_too_long_hangs(program):
    assert not program.hangs(0), "one that nobody asks never does"
    program.server = Server("own", ("own",), {}, health="http://127.0.0.1:9/")
    program.answered_at, program.has_answered = time.monotonic() - 100, True
    assert program.hangs(99)
    assert not program.hangs(1000)
    program.has_answered = False
    assert not program.hangs(99), "one that starts may take longer"
    assert not program.answers(), "it does not run"


def test_what_a_program_says_is_in_its_log_for_this_user_alone(program):
    program.log.write_bytes(b"x" * (supervised.MAX_LOG_BYTES + 1))
    says = "print('first'); print('asked http://me:secret@host/')"
    program.server = Server("own", (sys.executable, "-c", says), {"PATH": ""})
    program.start()
    assert program.process.wait() == 0
    program.process.stdin.close()
    assert program.log.read_bytes().startswith(b"first\n")
    assert stat.S_IMODE(program.log.stat().st_mode) == 0o600
    assert program.log.with_suffix(".log.1").stat().st_size == supervised.MAX_LOG_BYTES + 1
    last = supervised.last_line(program.log)
    assert last.startswith("asked http://")
    assert "secret" not in last


@pytest.mark.parametrize(
    ("code", "words"), [(-signal.SIGKILL, "SIGKILL"), (128 + signal.SIGTERM, "SIGTERM"), (1, "exit code 1")]
)
def test_a_death_in_words(code, words):
    assert supervised.death_in_words(code) == words

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.operate import notifications
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import free_ports
from tests.flows.receiver import Receiver
from tests.tasks.written_runs import write_run

TELL = """
import sys
from flows.operate import notifications
notifications.tell("gate", "the same", "a model", sys.argv[1])
"""


@pytest.fixture
def receiver(project, monkeypatch):
    """Somebody who is told, and does not listen yet."""
    receiver = Receiver(free_ports(1)[0])
    address = f"json://me:{receiver.password}@127.0.0.1:{receiver.port}/0123456789-a-token-of-a-service"
    monkeypatch.setenv(notifications.VARIABLE, address)
    yield receiver
    receiver.close()


def _kept() -> str:
    """Return all that was written down."""
    return "".join(path.read_text() for path in Path("mlruns").rglob("*") if path.is_file())


@pytest.mark.slow
def test_what_nobody_hears_is_told_once_when_somebody_listens(receiver, capfd):
    notifications.tell("drift", "digits 1", "the data\nhave changed", "by a lot")
    notifications.tell("failure", "a run", "a run failed", f"{receiver.password} in 0123456789-a-token-of-a-service")
    notifications.tell("drift", "digits 1", "the data have changed", "seen by another process")
    assert notifications.num_waiting() == 2
    said = capfd.readouterr().err
    assert said.count("warning: STRATAGEM_NOTIFY: json:... does not take it") == 1, said
    receiver.start()
    receiver.status = 500
    assert notifications.deliver() == 2
    receiver.status = 200
    assert notifications.deliver() == 0
    assert receiver.titles() == ["stratagem: the data have changed", "stratagem: a run failed"]
    assert [told["type"] for told in receiver.told] == ["warning", "failure"]
    assert receiver.told[0]["message"].startswith("by a lot\n\n20")
    # Also when another process sees the same later.
    notifications.tell("drift", "digits 1", "the data have changed", "again")
    assert notifications.deliver() == 0
    assert len(receiver.told) == 2
    for text in (said + capfd.readouterr().err, _kept(), json.dumps(receiver.told)):
        assert receiver.password not in text
        assert "a-token-of-a-service" not in text


def test_of_two_who_are_told_each_is_told_once(receiver, monkeypatch):
    other = Receiver(free_ports(1)[0], "other-password")
    both = f"json://me:{receiver.password}@127.0.0.1:{receiver.port} json://me:other-password@127.0.0.1:{other.port}"
    monkeypatch.setenv(notifications.VARIABLE, both)
    receiver.start()
    notifications.tell("gate", "a run", "a model", "is the champion")
    assert (len(receiver.told), notifications.deliver()) == (1, 1)
    other.start()
    assert notifications.deliver() == 0
    other.close()
    assert (receiver.titles(), other.titles()) == (["stratagem: a model"],) * 2


def test_two_processes_that_see_the_same_tell_it_once(receiver):
    receiver.start()
    processes = [subprocess.Popen([sys.executable, "-c", TELL, name]) for name in ("one", "other")]
    threads = [threading.Thread(target=notifications.tell, args=("gate", "the same", "a model", "here"))]
    for thread in threads:
        thread.start()
    assert [process.wait(120) for process in processes] == [0, 0]
    for thread in threads:
        thread.join()
    assert (notifications.deliver(), receiver.titles()) == (0, ["stratagem: a model"])


def test_nobody_is_told_where_nobody_is_named_and_what_waits_stays(receiver, monkeypatch):
    notifications.tell("gate", "a run", "a model", "is the champion")
    monkeypatch.delenv(notifications.VARIABLE)
    assert notifications.deliver() == 1
    notifications.tell("gate", "another run", "a model", "is not the champion")
    assert notifications.num_waiting() == 1
    (waiting,) = Path("mlruns/notifications/waiting").iterdir()
    waiting.write_text("{half")
    assert notifications.deliver() == 1


def test_a_restart_is_told_once_in_each_sitting(receiver):
    run = write_run(1)
    for sitting, reasons in (("a 1", ["worker 1 died"]), ("a 1", ["worker 1 died"]), ("b 1", ["worker 1 died"] * 2)):
        notifications.tell_restarts(run, sitting, reasons)
    assert notifications.num_waiting() == 3


def test_an_address_that_nobody_knows_is_refused_without_being_shown(project, monkeypatch):
    monkeypatch.setenv(notifications.VARIABLE, "json://127.0.0.1 jsn://s3cret-token")
    with pytest.raises(UserError, match=r"^STRATAGEM_NOTIFY: address 2 of 2, jsn:\.\.\., is none") as refused:
        notifications.check()
    assert "s3cret" not in str(refused.value)


def test_an_error_shows_no_part_of_an_address_that_is_a_secret(monkeypatch):
    token = "B" * 24
    monkeypatch.setenv(notifications.VARIABLE, f"slack://T1JJ3T3L2/A1BRTD4JD/{token} json://me:p%40ssword@host/path")
    told = str(StratagemError(f"POST https://hooks.slack.com/T1JJ3T3L2/{token} failed, p@ssword at host/path"))
    assert told == "POST https://hooks.slack.com/T1JJ3T3L2/*** failed, *** at host/path"

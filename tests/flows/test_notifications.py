import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from flows.cli import main
from flows.operate import notifications
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import free_ports
from tests.flows.receiver import Receiver

# A retry waits for two seconds, and a test does not.
pytestmark = pytest.mark.usefixtures("_without_pauses")


@pytest.fixture
def _without_pauses(monkeypatch):
    monkeypatch.setattr(notifications, "PAUSE_SECONDS", 0.0)


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


def test_a_notice_that_nobody_takes_is_lost_with_a_warning_and_shows_no_secret(receiver, capfd):
    receiver.start()
    receiver.status = 500
    notifications.tell("failure", "a run failed", f"{receiver.password} in 0123456789-a-token-of-a-service")
    said = capfd.readouterr().err
    assert said.count("warning: STRATAGEM_NOTIFY: json:... rejected it") == 1, said
    assert receiver.asked == 3
    assert "a run failed: json:... rejected it" in notifications.last_lost()
    for text in (said, _kept()):
        assert receiver.password not in text
        assert "a-token-of-a-service" not in text
    receiver.status = 200
    notifications.tell("drift", "the data\nhave changed", "by a lot")
    assert notifications.last_lost() is None
    assert receiver.titles() == ["stratagem: the data have changed"]
    assert receiver.told[0]["type"] == "warning"
    assert receiver.told[0]["message"].startswith("by a lot\n\n20")
    assert receiver.password not in json.dumps(receiver.told)


def test_status_names_a_lost_notice(receiver, capsys):
    notifications.tell("failure", "a run failed", "nobody listens")
    with pytest.raises(SystemExit):
        get_command(main.app)(["status"])
    line = "  the last notification could not be sent (STRATAGEM_NOTIFY): mlruns/notifications/lost"
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert "a run failed: json:... rejected it" in Path("mlruns/notifications/lost").read_text()


def test_an_address_that_answers_late_is_tried_again(receiver):
    receiver.start()
    receiver.failures = 2
    notifications.tell("gate", "a model", "is the champion")
    assert (receiver.asked, receiver.titles()) == (3, ["stratagem: a model"])


def test_each_address_is_told_though_another_one_does_not_listen(receiver, monkeypatch, capfd):
    other = Receiver(free_ports(1)[0], "other-password")
    both = f"json://me:other-password@127.0.0.1:{other.port} json://me:{receiver.password}@127.0.0.1:{receiver.port}"
    monkeypatch.setenv(notifications.VARIABLE, both)
    receiver.start()
    notifications.tell("gate", "a model", "is the champion")
    assert receiver.titles() == ["stratagem: a model"]
    assert capfd.readouterr().err.count("warning") == 1


def test_nobody_is_told_where_nobody_is_named(receiver, monkeypatch):
    monkeypatch.delenv(notifications.VARIABLE)
    receiver.start()
    notifications.tell("gate", "a model", "is the champion")
    assert receiver.asked == 0


def test_drift_is_told_once_for_each_data_version(receiver):
    receiver.start()
    drifted = SimpleNamespace(findings={"drift": SimpleNamespace(text="the mean has moved")})
    for version in ("1", "1", "2"):
        notifications.tell_drift(SimpleNamespace(name="digits", data_version=version), drifted)
    assert receiver.titles() == ["stratagem: the data of digits have changed"] * 2


def test_an_address_that_nobody_knows_is_refused_without_being_shown(project, monkeypatch):
    monkeypatch.setenv(notifications.VARIABLE, "json://127.0.0.1 jsn://s3cret-token")
    with pytest.raises(
        UserError, match=r"^STRATAGEM_NOTIFY: Apprise does not know address 2 of 2, jsn:\.\.\.: "
    ) as refused:
        notifications.check()
    assert "s3cret" not in str(refused.value)


def test_an_error_shows_no_part_of_an_address_that_is_a_secret(monkeypatch):
    token = "B" * 24
    monkeypatch.setenv(notifications.VARIABLE, f"slack://T1JJ3T3L2/A1BRTD4JD/{token} json://me:p%40ssword@host/path")
    told = str(StratagemError(f"POST https://hooks.slack.com/T1JJ3T3L2/{token} failed, p@ssword at host/path"))
    assert told == "POST https://hooks.slack.com/T1JJ3T3L2/*** failed, *** at host/path"

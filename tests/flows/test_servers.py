"""Where the servers of `stratagem up` and `stratagem ui` listen, and whose database and password they take."""

import contextlib
import socket
import stat

import pytest

from flows.operate import operation, servers, supervisor
from tasks.system.errors import UserError


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


def test_without_a_readable_note_of_the_ports_the_usual_ones_are_wanted(tmp_path):
    (tmp_path / "kept").write_text('{"mlflow": 50')
    assert servers.wanted_ports(tmp_path / "kept") == servers.wanted_ports(tmp_path / "none") == servers.USUAL_PORTS


@pytest.mark.exhaustive
def test_two_projects_keep_no_server_on_one_database(project, monkeypatch, tmp_path):
    """Two workers of one pool would end what the other has at work, and run it in their own folder."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("STRATAGEM_NOTIFY", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    with (
        operation.lock(tmp_path / "home" / "up.lock"),
        pytest.raises(UserError, match=r"PREFECT_HOME = .*/home: .* another"),
    ):
        supervisor.keep(lambda: None)
    assert not (project / "mlruns" / "up" / "state.json").exists()


@pytest.mark.parametrize("text", [b"\xff\xfe:" + b"a" * 40, b"stratagem:short", b"stratagem:" + b"a" * 40 + b"\nmore"])
def test_a_password_that_is_none_is_made_anew(project, text):
    path = operation.folder() / "key"
    path.write_bytes(text)
    path.chmod(0o600)
    key = operation.private_key()
    assert operation.private_key() == key, "and is kept"
    assert path.read_text() == f"{key}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key.encode() not in text
    path.chmod(0o640)
    assert operation.private_key() != key, "others could have read it"

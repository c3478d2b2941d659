import os
import socket
import stat

import pytest

from tasks.process.child import set_up_process
from tasks.system import network
from tasks.system.errors import UserError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000/api", "http://host:5000/api"),
        ("at postgresql+asyncpg://me:s3@cret@db:5432/runs and", "at postgresql+asyncpg://db:5432/runs and"),
        ("(https://token@host)", "(https://host)"),
        ("redis://:s3cret@127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("at postgresql://me:s3/c'r?e#t@db/runs and", "at postgresql://db/runs and"),
        ("mysql+pymysql://me:s3cret@db/runs?to=a@b", "mysql+pymysql://db/runs?to=a@b"),
        ("postgresql://db/runs?user=me&password=s3cret&x=1", "postgresql://db/runs?user=me&password=***&x=1"),
        ("sqlite:////home/me@work/mlruns/mlflow.db", "sqlite:////home/me@work/mlruns/mlflow.db"),
        ("ask me@example.org, or http://host/a@b?c@d", "ask me@example.org, or http://host/a@b?c@d"),
    ],
)
def test_an_address_is_shown_without_its_user_and_password(text: str, shown: str) -> None:
    assert network.without_userinfo(text) == shown
    assert str(UserError(text)) == shown


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("AWS_SECRET_ACCESS_KEY", "s3cret-1", "the password s3cret-1 is wrong"),
        ("MLFLOW_TRACKING_PASSWORD", "s3cret-1", "the password s3cret-1 is wrong"),
        ("MLFLOW_TRACKING_URI", "http://me:s3cret%2F1@host", "the password s3cret/1 or s3cret%2F1 is wrong"),
        ("MLFLOW_TRACKING_URI", "me:s3cret-1@host:5000", "the password s3cret-1 is wrong"),
        ("PREFECT_API_AUTH_STRING", "admin:s3cret-1", "the password s3cret-1 is wrong"),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=me;AccountKey=s3cret-1==;EndpointSuffix=core",
            "the password s3cret-1== is wrong",
        ),
        ("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql://me:s3cret/1@host/db", "the password s3cret/1 is wrong"),
    ],
)
def test_a_password_of_the_environment_is_in_no_message(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "s3cret" in str(UserError(text))
    monkeypatch.setenv(name, value)
    assert "s3cret" not in str(UserError(text))
    assert str(UserError(text)).startswith("the password ***")


@pytest.mark.parametrize(
    ("name", "text", "holds"),
    [
        ("dataset.options.api_token", "0123456789", True),
        ("dataset.options.token", "0123456789", True),
        ("model.options.pad_token", "[PADDING]", False),
        ("model.options.start_token", "<start>", False),
        ("model.initial", "s3://me@bucket/weights", False),
        ("model.initial", "s3://me:s3cret@bucket/weights", True),
        ("dataset.source", "ssh://git@host/data", False),
        ("dataset.source", "https://token@host/data", True),
    ],
)
def test_a_password_in_a_setting_is_known_by_its_name_or_its_look(name: str, text: str, holds: bool) -> None:
    assert network.holds_secret(name, text) is holds


def test_an_address_gives_its_password_to_the_variables_that_the_clients_read() -> None:
    environment = {
        "MLFLOW_TRACKING_URI": "http://me:s3%40cret@host:5000/x",
        "PREFECT_API_URL": "https://admin:s3cret@host/api",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://me:s3cret@host/db",
    }
    network.separate_credentials(environment)
    assert environment == {
        "MLFLOW_TRACKING_URI": "http://host:5000/x",
        "MLFLOW_TRACKING_USERNAME": "me",
        "MLFLOW_TRACKING_PASSWORD": "s3@cret",
        "PREFECT_API_URL": "https://host/api",
        "PREFECT_API_AUTH_STRING": "admin:s3cret",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://me:s3cret@host/db",
    }
    quoted = {"MLFLOW_TRACKING_URI": "http://me:it's[\"s3cret@host:5000/x"}
    network.separate_credentials(quoted)
    assert quoted["MLFLOW_TRACKING_URI"] == "http://host:5000/x"
    assert quoted["MLFLOW_TRACKING_PASSWORD"] == "it's[\"s3cret"
    other = {"MLFLOW_TRACKING_URI": "postgresql://me:s3cret@host/db", "PREFECT_API_URL": "http://host/api"}
    network.separate_credentials(same := dict(other))
    assert same == other, "a database's driver reads its password from the address itself"


@pytest.fixture
def answering(proxy):
    """A server that answers each request with its ``status``, and its address."""
    server = proxy(0)
    server.own = {"": (0, b"")}
    return server, f"http://me:s3cret@127.0.0.1:{server.port}/x"


@pytest.mark.parametrize(
    ("status", "reason"), [(200, None), (401, None), (404, None), (500, "HTTP status 500"), (502, "HTTP status 502")]
)
def test_a_server_answers_also_where_it_lets_nobody_in(answering, status: int, reason: str | None) -> None:
    server, address = answering
    server.status = status
    assert network.unreachable_reason(address) == reason


@pytest.mark.parametrize(
    "url",
    ["http://me:s3cret@127.0.0.1:9/x", "http://me:s3cret@no such/x", "http://:x", "x", "http://me:s3cret@",
     "http://me:s3cret@host:99999/x"],
)  # fmt: skip
def test_what_does_not_answer_is_told_without_the_password(url: str) -> None:
    reason = network.unreachable_reason(url)
    assert reason
    assert "s3cret" not in reason


def test_a_process_begins_with_no_password_in_an_address_and_no_proxy_before_its_own_servers(
    project, monkeypatch
) -> None:
    for name, value in {
        "MLFLOW_TRACKING_URI": "http://me:s3cret@host:5000",
        "PREFECT_API_URL": "http://admin:s3cret@host/api",
        "MLFLOW_TRACKING_USERNAME": "",
        "MLFLOW_TRACKING_PASSWORD": "",
        "PREFECT_API_AUTH_STRING": "",
        "http_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
        "NO_PROXY": "",
    }.items():
        monkeypatch.setenv(name, value)
    before = os.umask(0o022)
    try:
        set_up_process()
    finally:
        os.umask(before)
    assert (os.environ["MLFLOW_TRACKING_URI"], os.environ["PREFECT_API_URL"]) == ("http://host:5000", "http://host/api")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "s3cret"
    assert os.environ["PREFECT_API_AUTH_STRING"] == "admin:s3cret"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({"http_proxy": "http://127.0.0.1:9"}, "127.0.0.1,localhost"),
        ({"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "a.b, localhost"}, "a.b,localhost,127.0.0.1"),
        ({"all_proxy": "http://127.0.0.1:9", "no_proxy": "c.d", "NO_PROXY": "a.b"}, "c.d,127.0.0.1,localhost"),
        ({"http_proxy": "http://127.0.0.1:9", "no_proxy": "*"}, "*"),
        ({}, None),
    ],
)
def test_no_proxy_stands_before_the_servers_of_this_machine(answering, monkeypatch, given, direct) -> None:
    environment = dict(given)
    network.keep_proxies_out(environment)
    assert (environment.get("no_proxy"), environment.get("NO_PROXY", direct)) == (direct, direct)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert network.unreachable_reason(answering[1]) is None


@pytest.mark.parametrize(("mode", "umask"), [(0o755, 0o077), (0o775, 0o077), (0o2775, 0o007)])
def test_what_is_written_is_for_this_user_unless_the_folder_is_a_teams(project, mode: int, umask: int) -> None:
    os.chmod("mlruns", mode)
    assert stat.S_IMODE(os.stat("mlruns").st_mode) == mode
    before = os.umask(0o022)
    try:
        set_up_process()
    finally:
        assert os.umask(before) == umask


def test_whether_a_port_takes_connections_is_known_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.connection_error("127.0.0.1", port, 5.0) is None
    assert isinstance(network.connection_error("127.0.0.1", port, 5.0), ConnectionRefusedError)
    assert isinstance(network.connection_error("[::1]", port, 5.0), OSError)
    assert isinstance(network.connection_error("no such host", 1, 5.0), OSError)

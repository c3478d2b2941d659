import contextlib
import gc
import http.server
import json
import os
import resource
import signal
import sqlite3
import threading

import psutil
import pytest
import requests

from flows.operate import prefect_server
from tasks.system.errors import StratagemError, UserError
from tasks.system.machine import free_ports


def test_what_the_user_set_for_prefect_stays(monkeypatch):
    console, internal = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "PREFECT_LOGGING_INTERNAL_LEVEL"
    others = (console, internal, "PREFECT_CLIENT_MAX_RETRIES", "DO_NOT_TRACK", "STRATAGEM_DEBUG")
    for name in ("PREFECT_LOGGING_LEVEL", "PREFECT_SERVER_ANALYTICS_ENABLED", *others):
        monkeypatch.setenv(name, "")  # So that the test's end restores it.
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    prefect_server.set_environment(debug=False)
    assert os.environ["PREFECT_LOGGING_LEVEL"] == "WARNING"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "STRATAGEM_DEBUG" not in os.environ


@pytest.mark.parametrize(("home", "kept"), [("/dev/null", True), ("~nobody", True), ("", False)])
def test_where_the_users_home_cannot_be_written_the_project_keeps_prefects(project, tmp_path, monkeypatch, home, kept):
    monkeypatch.setenv("HOME", home or str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", "")
    prefect_server.set_environment(debug=False)
    assert os.environ["PREFECT_HOME"] == (str(project / "mlruns" / "prefect") if kept else "")


@pytest.mark.parametrize(
    ("name", "scheme"), [("ALL_PROXY", "socks"), ("http_proxy", "socks4"), ("https_proxy", "socks5")]
)
def test_a_socks_proxy_that_prefects_client_refuses_is_named(project, monkeypatch, name, scheme):
    monkeypatch.setenv(name, f"{scheme}://me:pw@h:1080")
    with pytest.raises(UserError, match=rf"^{name} = '{scheme}://h:1080': Prefect.+httpx\[socks\].+or unset") as caught:
        prefect_server.start_server()
    assert "pw" not in str(caught.value)
    monkeypatch.setenv("NO_PROXY", "*")
    prefect_server.check_proxy()


@pytest.fixture
def own_prefect(project, tmp_path, monkeypatch):
    """A Prefect home of its own, and no server."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path / "prefect"


def _asked(url, key=None):
    """Return how a Prefect server answers when it is asked for something."""
    auth = None if key is None else tuple(key.split(":"))
    return requests.post(f"{url}/flow_runs/count", json={}, auth=auth, timeout=60).status_code


def servers():
    """The servers that this process has started, also for other tests."""
    return [child for child in psutil.Process().children() if "flows.operate.server" in child.cmdline()]


@pytest.mark.slow
def test_a_run_has_an_api_of_its_own_which_only_it_may_use_and_which_ends_with_it(own_prefect):
    before = servers()
    server = prefect_server.start_server()
    assert server is not None
    try:
        server.await_ready()
        url, key = os.environ["PREFECT_API_URL"], os.environ["PREFECT_API_AUTH_STRING"]
        assert url.startswith("http://127.0.0.1:")
        assert requests.get(f"{url}/health", timeout=60).text == "true"
        assert (own_prefect / "prefect.db").exists(), "`stratagem ui` shows the run later"
        assert (_asked(url), _asked(url, "stratagem:guessed"), _asked(url, key)) == (401, 401, 200)
        (child,) = [child for child in servers() if child not in before]
        assert key.split(":")[1] not in " ".join(child.cmdline()), "every user can read it"
        asked_from = {"Origin": "http://attacker.example", "Access-Control-Request-Method": "POST"}
        answer = requests.options(f"{url}/deployments/", headers=asked_from, timeout=60)
        assert "access-control-allow-origin" not in answer.headers
        # What a service manager sends to every process leaves it to the run to end it.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
            assert _asked(url, key) == 200
    finally:
        server.close()
    assert servers() == before


def test_a_server_of_the_users_own_is_used(own_prefect, monkeypatch):
    own_prefect.mkdir()
    profile = "active = 'mine'\n[profiles.mine]\nPREFECT_API_URL = 'http://127.0.0.1:1/api'\n"
    (own_prefect / "profiles.toml").write_text(profile)
    assert prefect_server.start_server() is None
    assert "PREFECT_API_URL" not in os.environ, "Prefect reads it from the profile itself"
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:2/api")
    with pytest.raises(
        UserError, match=r"PREFECT_API_URL = http://127\.0\.0\.1:2/api: no Prefect server answers .+ unset"
    ):
        prefect_server.start_server()

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(401)
            self.end_headers()

    asked = []
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request).start()
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
        assert prefect_server.start_server() is None
    assert asked == ["/api/health"], "whether it lets us in shows later"


def test_a_shell_of_an_up_that_has_ended_is_told_how_to_leave_it(own_prefect, project, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(project / "mlruns" / "up" / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with pytest.raises(UserError, match=r"^this shell has sourced mlruns/up/environment, .* `unset PREFECT_API_URL "):
        prefect_server.start_server()


@pytest.mark.slow
def test_an_api_at_the_limit_on_the_size_of_files_names_it(own_prefect):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        server = prefect_server.PrefectServer()
        with pytest.raises(StratagemError, match=r"^Prefect's database .*Raise the file-size limit \(ulimit -f\)"):
            [server.await_ready() for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_an_api_that_cannot_start_is_told_in_one_message(own_prefect):
    own_prefect.mkdir()
    (own_prefect / "prefect.db").write_text("no database " * 1000)
    server = prefect_server.start_server()
    assert server is not None
    with pytest.raises(StratagemError, match=r"^Prefect's server for this run did not start: .+ \(--debug ") as caught:
        server.await_ready()
    server.close()
    assert "\n" not in str(caught.value)
    del server, caught
    gc.collect()  # Warns of a file that is still open.


@pytest.fixture
def trains_long(prepared_project):
    """Settings under which a training is still at work when its first checkpoint is there, and ends by itself."""
    (prepared_project / "long.yaml").write_text(LONG)
    return prepared_project


LONG = """
input: {augmentation: {crop_padding: 0}}
model: {name: mlp, options: {units: [16]}}
schedule: {kind: constant, learning_rate: 0.01}
train: {epochs: 200}
checkpoint: {every_epochs: 1}
tracking: {system_metrics: false}
"""


def _finished_once(command, project):
    """The command ended as if nothing had been, but for one line; return its summary."""
    assert command.process.wait(900) == 0, command.err.read_text()
    summary = json.loads(command.out.read_text())
    said = command.err.read_text()
    assert said.count("warning:") == 1, said
    assert "Worker" not in said
    assert "Traceback" not in said
    with contextlib.closing(sqlite3.connect(project / "mlruns" / "mlflow.db")) as database:
        assert database.execute("SELECT run_uuid, status FROM runs").fetchall() == [(summary["run_id"], "FINISHED")]
    return summary


@pytest.mark.slow
def test_a_run_whose_users_prefect_server_is_killed_ends_with_its_result_and_tells_the_server_later(
    trains_long, start, run, prefect_home
):
    key, (port,) = prefect_server.make_password(), free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    serving = {"PREFECT_HOME": str(prefect_home), "PREFECT_SERVER_API_AUTH_STRING": key}
    asking = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": key}
    serve = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server = start(*serve, **serving)
    assert prefect_server.answers(url, 600)
    command = start("stratagem", "run", "long.yaml", "--json", **asking)
    command.wait_until(lambda: list(trains_long.glob("mlruns/runs/*/checkpoints/*/state.json")))
    for process in [*psutil.Process(server.process.pid).children(recursive=True), server.process]:
        with contextlib.suppress(psutil.NoSuchProcess):  # It has ended with its parent.
            process.kill()
    server.process.wait()
    summary = _finished_once(command, trains_long)
    assert "warning: Prefect's server no longer answers" in command.err.read_text()
    start(*serve, **serving)
    assert prefect_server.answers(url, 600)
    auth = tuple(key.split(":"))
    flow_run = f"{url}/flow_runs/{summary['flow_run_id']}"
    assert requests.get(flow_run, auth=auth, timeout=60).json()["state_type"] == "RUNNING"
    told = run(["stratagem", "reconcile"], env=asking)
    assert f"Prefect flow run {summary['flow_run_id']} is now COMPLETED" in told.stdout, told.stderr
    assert requests.get(flow_run, auth=auth, timeout=60).json()["state_type"] == "COMPLETED"
    assert list(trains_long.glob("mlruns/unreported/*")) == []

import http.server
import os
import threading
import urllib.request

import psutil
import pytest

from flows import prefect_server
from tasks import processes
from tasks.errors import StratagemError, UserError


def test_what_the_user_set_for_prefect_stays(monkeypatch):
    for name in ("PREFECT_LOGGING_LEVEL", "PREFECT_SERVER_ANALYTICS_ENABLED", "DO_NOT_TRACK", "STRATAGEM_DEBUG"):
        monkeypatch.setenv(name, "")  # So that the test's end restores it.
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    prefect_server.set_environment(debug=False)
    assert os.environ["PREFECT_LOGGING_LEVEL"] == "WARNING"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "STRATAGEM_DEBUG" not in os.environ
    processes.show_tracebacks()
    assert os.environ["STRATAGEM_DEBUG"] == "1"


@pytest.fixture
def own_prefect(project, tmp_path, monkeypatch):
    """A Prefect home of its own, and no server."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.delenv("PREFECT_API_URL")
    return tmp_path / "prefect"


def test_a_run_has_an_api_of_its_own_which_ends_with_it(own_prefect):
    server = prefect_server.start_server()
    assert server is not None
    try:
        server.await_ready()
        url = os.environ["PREFECT_API_URL"]
        assert url.startswith("http://127.0.0.1:")
        assert urllib.request.urlopen(f"{url}/health", timeout=60).read() == b"true"
        assert (own_prefect / "prefect.db").exists(), "`stratagem ui` shows the run later"
    finally:
        server.close()
    assert [child for child in psutil.Process().children() if "flows.server" in child.cmdline()] == []


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


def test_an_api_that_cannot_start_is_told_in_one_message(own_prefect):
    own_prefect.mkdir()
    (own_prefect / "prefect.db").write_text("no database " * 1000)
    server = prefect_server.start_server()
    assert server is not None
    with pytest.raises(StratagemError, match=r"^Prefect's server for this run did not start: .+--debug\)$") as caught:
        server.await_ready()
    server.close()
    assert "\n" not in str(caught.value)

import json
import os
import socket
import subprocess
import sys

import pytest

from flows.operate.prefect_server import guarded_environment, make_password
from tests.flows.doors import assert_shut, assert_socket_shut

ASK_WITHOUT_PASSWORD = """
import asyncio, json, re
import httpx
from prefect.server.api.server import create_app
from tasks.system.access import from_here

async def ask():
    pages = httpx.ASGITransport(from_here(create_app(final=True, webserver_only=True)))
    async with httpx.AsyncClient(transport=pages, base_url="http://127.0.0.1") as client:
        described = (await client.get("/openapi.json")).json()
        asked = [("GET", path) for path in ("/", "/docs", "/redoc", "/openapi.json", "/ui-settings", "/api/docs")]
        asked += [
            (method.upper(), "/api" + re.sub("{[^}]*}", "health", path))
            for path, methods in described["paths"].items() for method in methods
        ]
        return {f"{method} {path}": (await client.request(method, path)).status_code for method, path in asked}

print(json.dumps(asyncio.run(ask())))
"""


def test_only_the_program_and_its_addresses_need_no_password(run, tmp_path):
    guarded = guarded_environment(make_password(), "http://127.0.0.1:4200")
    done = run(["python", "-c", ASK_WITHOUT_PASSWORD], env={"PREFECT_HOME": str(tmp_path), **guarded})
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    assert len(statuses) > 150
    paths = ("/", "/docs", "/redoc", "/openapi.json", "/ui-settings", "/api/health", "/api/ready")
    assert {asked for asked, status in statuses.items() if status == 200} == {f"GET {path}" for path in paths}
    assert set(statuses.values()) == {200, 401}


def start(listening, environment):
    """The server of a run, on a socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.operate.server", str(listening.fileno())],
        env=environment,
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive
def test_first_runs_at_the_same_moment_make_one_database(project, tmp_path):
    """Without the lock one or two of four failed inside the migration."""
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    servers = [start(listening, environment) for listening in sockets]
    try:
        for server in servers:
            assert server.stdout.readline() == "serving\n", server.stderr.read()
            assert server.stdout.readline() == "ready\n", server.stderr.read()
        # Each ends by itself when the run that started it is gone, however that ended.
        for server in servers:
            server.stdin.close()
        assert [server.wait(300) for server in servers] == [0, 0, 0, 0]
    finally:
        for listening in sockets:
            listening.close()
        for server in servers:
            server.kill()
            server.wait()
            for pipe in (server.stdin, server.stdout, server.stderr):
                pipe.close()


@pytest.mark.slow
def test_a_runs_own_server_lets_in_nobody_else(project, prefect_home):
    key, listening = make_password(), socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    environment = os.environ | {"PREFECT_HOME": str(prefect_home)} | guarded_environment(key, address)
    with listening, start(listening, environment) as server:
        assert server.stdout.readline() == "serving\n"
        assert server.stdout.readline() == "ready\n"
        assert_shut(address, "/api/flows/filter", key, {})
        assert_socket_shut(address)

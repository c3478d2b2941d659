import os
import socket
import subprocess
import sys

import pytest

from flows.operate.prefect_server import guarded_environment, make_password
from tests.flows.doors import assert_shut, assert_socket_shut


@pytest.mark.exhaustive
def test_first_runs_at_the_same_moment_make_one_database(project, tmp_path):
    """Without the lock one or two of four failed inside the migration."""
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.operate.server", str(listening.fileno())],
            env=environment,
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for listening in sockets
    ]
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
    with (
        listening,
        subprocess.Popen(
            [sys.executable, "-m", "flows.operate.server", str(listening.fileno())],
            env=environment,
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdout.readline() == "serving\n"
        assert server.stdout.readline() == "ready\n"
        assert_shut(address, "/api/flows/filter", key, {})
        assert_socket_shut(address)

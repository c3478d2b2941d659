import os
import socket
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_first_runs_at_the_same_moment_make_one_database(project, tmp_path):
    """Without the lock one or two of four failed inside the migration."""
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "flows.server", str(listening.fileno())],
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
        assert [server.wait(60) for server in servers] == [0, 0, 0, 0]
    finally:
        for listening in sockets:
            listening.close()
        for server in servers:
            server.kill()
            server.wait()
            for pipe in (server.stdin, server.stdout, server.stderr):
                pipe.close()

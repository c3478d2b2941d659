"""What a page of the web, another user or another machine asks of a server that listens, and that it is refused."""

import socket
from typing import Any

import psutil
import pytest
import requests
from requests.auth import HTTPBasicAuth
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

ELSEWHERE = ("http://attacker.example", "http://127.0.0.1:9", "null")
"""Origins: a page of the web, one of another user's server on this machine, one of a file or a frame."""
# A busy server needs more than the 10 s and 20 s that websockets gives a handshake and an answer to a ping.
AS_PREFECT: dict[str, Any] = {"subprotocols": ["prefect"], "proxy": None, "open_timeout": 120, "ping_interval": None}


def assert_shut(address: str, path: str, key: str, body: dict[str, object]) -> None:
    """Ask a server as others do, with the key that a browser has kept; only its own page, and a program, are let in.

    Args:
        address: http://127.0.0.1:PORT.
        path: of what is answered to a POST of ``body`` by whoever has the key.
        key: ``user:password``.
        body: of a right question.
    """
    auth, url, port = HTTPBasicAuth(*key.split(":")), address + path, int(address.rpartition(":")[2])
    listening = [one.laddr for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {place.ip for place in listening if place.port == port} == {"127.0.0.1"}, "of this machine alone"
    for given in (None, HTTPBasicAuth("stratagem", "guessed")):
        assert requests.post(url, json=body, auth=given, timeout=60).status_code == 401
    for headers in ({}, {"Origin": address}, {"Host": f"localhost:{port}"}):
        assert requests.post(url, json=body, auth=auth, headers=headers, timeout=60).status_code == 200, headers
    others = ("attacker.example", f"attacker.example:{port}", f"127.0.0.1:{port}@own.example", "127.0.0.1:attacker")
    for host in (*others, socket.gethostname()):
        for place in (url, f"{address}/", f"{address}/health", f"{address}/api/health", f"{address}/version"):
            assert requests.get(place, auth=auth, headers={"Host": host}, timeout=60).status_code == 403, place
        assert requests.post(url, json=body, auth=auth, headers={"Host": host}, timeout=60).status_code == 403
    for origin in ELSEWHERE:
        # Of these three types a browser sends a body to wherever a page says, without asking first.
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"):
            headers = {"Origin": origin, "Content-Type": kind}
            assert requests.post(url, json=body, auth=auth, headers=headers, timeout=60).status_code == 403, headers
        assert requests.get(f"{address}/", auth=auth, headers={"Origin": origin}, timeout=60).status_code == 403
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in requests.options(url, headers=asked, timeout=60).headers
    # A picture or a script of another page, with which no Origin is sent.
    hidden = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert requests.get(url, auth=auth, headers=hidden, timeout=60).status_code == 403


def assert_socket_shut(address: str) -> None:
    """Open a web socket of a Prefect server as a page does, which asks no browser's leave for it; and as a program
    without the key does."""
    place = address.replace("http:", "ws:") + "/api/events/in"
    for origin in ELSEWHERE:
        with pytest.raises(InvalidStatus, match="HTTP 403"), connect(place, origin=origin, **AS_PREFECT):
            pass
    with connect(place, **AS_PREFECT) as opened:
        opened.send('{"type": "auth", "token": "stratagem:guessed"}')
        with pytest.raises(ConnectionClosed, match="Invalid token"):
            opened.recv(60)

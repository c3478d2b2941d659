"""A server of ours refuses strangers and pages of the web. tests/flows asks each of them so, for real."""

import asyncio
import base64
from typing import Any

import pytest

from tasks.system.access import from_here, guarded

HOST = "127.0.0.1:5000"
BASIC = {"authorization": "Basic " + base64.b64encode(b"me:s3cret").decode()}
LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def ask(application, headers, kind="http", method="GET"):
    """Return the status of the answer, or how a web socket's request ended; 200 is the application's own."""
    said = []

    async def send(message):
        said.append(message)

    given = [(name.encode(), value.encode()) for name, value in headers]
    asyncio.run(application({"type": kind, "method": method, "headers": given}, None, send))
    return said[0].get("status") or said[0]["type"]


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:5000"}, 200),
        ({"host": "LOCALHOST:8080"}, 200),  # Behind `ssh -L 8080:127.0.0.1:5000`.
        ({"host": "127.0.0.1:8080", "origin": "http://127.0.0.1:8080"}, 200),
        ({"host": "attacker.example"}, 403),
        ({"host": "attacker.example:5000"}, 403),
        ({"host": "127.0.0.1.attacker.example:5000"}, 403),
        ({"host": "127.0.0.1@attacker.example"}, 403),
        ({"host": "127.0.0.1:80@attacker.example"}, 403),
        ({"host": "127.0.0.1:evil"}, 403),
        ({"host": "localhost:5000 "}, 403),
        ({"host": "192.168.0.7:5000"}, 403),
        ({"host": ""}, 403),
        ({"origin": f"http://{HOST}"}, 200),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "http://localhost:5000"}, 403),  # Another user's, where that has another address.
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": f"https://{HOST}"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none", **LINK}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({"sec-fetch-site": "same-site", **LINK}, 200),
    ],
)
def test_a_request_of_another_page_or_to_another_name_is_refused(headers: dict[str, str], status: int) -> None:
    given = {"host": HOST, **BASIC} | headers
    for kind, refused in (("http", 403), ("websocket", "websocket.close")):
        expected = refused if status == 403 else 200
        assert ask(guarded(inner, "me:s3cret"), given.items(), kind) == expected
        assert ask(from_here(inner), given.items(), kind) == expected


def test_a_form_of_another_page_is_no_link() -> None:
    headers = {"host": HOST, "sec-fetch-site": "cross-site", **LINK, **BASIC}
    assert ask(guarded(inner, "me:s3cret"), headers.items()) == 200
    assert ask(guarded(inner, "me:s3cret"), headers.items(), method="POST") == 403


def test_a_page_may_ask_its_own_server_alone() -> None:
    said = []

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    async def bare(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})  # ASGI lets an answer have no headers.

    asked = {"type": "http", "method": "GET", "headers": [(b"host", HOST.encode())]}
    for application in (bare, inner):
        said.clear()
        asyncio.run(from_here(application)(asked, None, send))
        assert [name for name, _ in said[0]["headers"]] == [b"content-security-policy"]
    (policy,) = [value for name, value in said[0]["headers"] if name == b"content-security-policy"]
    assert {"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"} < set(policy.decode().split("; "))


@pytest.mark.parametrize("given", ["", "Basic", "Basic bWU6Z3Vlc3NlZA==", "Bearer s3cret", "basic é"])
def test_who_has_no_key_is_asked_for_it(given: str) -> None:
    headers = {"host": HOST, "authorization": given}
    assert ask(guarded(inner, "me:s3cret"), headers.items()) == 401
    assert ask(guarded(inner, "me:s3cret"), headers.items(), "websocket") == "websocket.close"

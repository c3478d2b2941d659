"""A server of ours answers whoever gives its key and calls it by its own name, and no page of the web.

Every user of a machine reaches its loopback address, and so does each page in a browser on it. A page reaches it under
a name of its own, whose address its owner changes once the page is there (DNS rebinding), and it can let the browser
send requests, to which that adds a password that it was given before (CSRF).
"""

import base64
import hmac
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"connect-src 'self' data: blob: ws://127.0.0.1:* ws://localhost:*"
)
"""What a page of ours may load and ask: its own server. Prefect's own asks https://sr-client-cfg.amplitude.com whenever
it is opened, also with PREFECT_SERVER_ANALYTICS_ENABLED=false (3.8.8)."""
NAMES = ("127.0.0.1", "localhost")
"""Of a server that listens on 127.0.0.1; nobody's name server says what these are."""


def guarded(inner: Application, key: str) -> Application:
    """Return an ASGI application that answers 401 to requests without a key, which both programs and browsers give by
    Basic authentication, and refuses what ``from_here`` refuses.

    A browser keeps what it was given for this address and port alone. A cookie would go to whatever other port of
    127.0.0.1 it opens, such as another user's server.

    Args:
        inner: the application.
        key: ``user:password``.
    """
    basic = ("Basic " + base64.b64encode(key.encode()).decode()).encode()

    async def application(scope: Message, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] not in ("http", "websocket") or hmac.compare_digest(given, basic):
            await inner(scope, receive, send)
        else:
            await _refuse(scope, send, 401, "who asks gives a key", (b"www-authenticate", b'Basic realm="stratagem"'))

    return from_here(application)


def from_here(inner: Application) -> Application:
    """Return an ASGI application that answers 403 to requests to another name than those of this machine, and to those
    that a browser makes for a page of another server, also one on another port of this machine. Its own pages ask no
    other server."""

    async def application(scope: Message, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"content-security-policy", POLICY)]}
            await send(message)

        if scope["type"] in ("http", "websocket") and (reason := _foreign(scope)):
            await _refuse(scope, send, 403, reason)
        else:
            await inner(scope, receive, send_with_policy if scope["type"] == "http" else send)

    return application


def _foreign(scope: Message) -> str | None:
    """Return why a request is none of this machine's own, None where it is one."""
    found = [name for name, _ in scope["headers"] if name in (b"host", b"origin")]
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    if len(set(found)) < len(found) or host.partition(":")[0].lower() not in NAMES:
        return "this server is called 127.0.0.1"
    # The port is the one that was asked, which is another one behind `ssh -L`.
    own = f"http://{host}".encode("latin-1").lower()
    if headers.get(b"origin", own).lower() != own or _is_elsewhere(scope, headers):
        return "this server is asked by its own pages alone"
    return None


def _is_elsewhere(scope: Message, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser says that a page of another server asks: it sends no Origin with a picture, a script or
    a frame. A link that somebody follows is no such request."""
    if headers.get(b"sec-fetch-site") not in (b"same-site", b"cross-site"):
        return False
    link = (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
    return not (link and scope.get("method") == "GET")


async def _refuse(scope: Message, send: Any, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
    if scope["type"] == "http":
        told = [(b"content-type", b"text/plain"), *headers]
        await send({"type": "http.response.start", "status": status, "headers": told})
        await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
    else:
        await send({"type": "websocket.close", "code": 1008})

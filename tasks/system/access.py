"""Access control of our servers: they answer requests with the key and this machine's name, but not other servers'
pages.

Every user of a machine can reach its loopback address, and so can every page in a browser on it. The owner of a page
can point the page's host name to that address after the page is loaded (DNS rebinding), and a page can make the browser
send requests with a password that the browser has stored (CSRF).
"""

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"connect-src 'self' data: blob: ws://127.0.0.1:* ws://localhost:*"
)
"""Our pages may only load from and contact their own server. Prefect's page contacts
https://sr-client-cfg.amplitude.com whenever it is opened, even with PREFECT_SERVER_ANALYTICS_ENABLED=false (3.8.8)."""
NAMES = ("127.0.0.1", "localhost")
"""The names of a server that listens on 127.0.0.1; no name server resolves them."""
OWN_HOST = re.compile(rf"({'|'.join(map(re.escape, NAMES))})(:\d{{1,5}})?", re.ASCII | re.IGNORECASE)


def guarded(inner: Application, key: str) -> Application:
    """Return an ASGI application that answers 401 to requests without the key (HTTP Basic authentication) and refuses
    what ``from_here`` refuses.

    A browser sends the key only to this address and port, but would send a cookie to every port of 127.0.0.1, including
    another user's server.

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
            await _refuse(
                scope, send, 401, "this server needs a key", (b"www-authenticate", b'Basic realm="stratagem"')
            )

    return from_here(application)


def from_here(inner: Application) -> Application:
    """Return an ASGI application that answers 403 to requests for other host names than ``NAMES``, and to requests that
    a browser sends for a page of another server, even on another port of this machine. Its own pages contact no other
    server."""

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
    """Return why a request does not come from this machine's own pages or programs, or None."""
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    if not OWN_HOST.fullmatch(host):
        return "this server's name is 127.0.0.1"
    # With the port that the client uses, which differs from the server's behind `ssh -L`.
    own = f"http://{host}".encode("latin-1").lower()
    # A browser's requests for pictures, scripts and frames of another server's page have no Origin.
    elsewhere = headers.get(b"sec-fetch-site") in (b"same-site", b"cross-site")
    fetched = scope.get("method"), headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    is_link = fetched == ("GET", b"navigate", b"document")
    if headers.get(b"origin", own).lower() != own or (elsewhere and not is_link):
        return "this server answers only its own pages"
    return None


async def _refuse(scope: Message, send: Any, status: int, reason: str, *headers: tuple[bytes, bytes]) -> None:
    if scope["type"] == "http":
        told = [(b"content-type", b"text/plain"), *headers]
        await send({"type": "http.response.start", "status": status, "headers": told})
        await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
    else:
        await send({"type": "websocket.close", "code": 1008})

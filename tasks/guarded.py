"""A key for a server that has none: whoever knows a password is let in, and no page of the web."""

import base64
import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def guarded(inner: Application, key: str, origins: Collection[str]) -> Application:
    """Return an ASGI application that answers 401 to requests without a key, which both programs and browsers give by
    Basic authentication, and 403 to those of a page from elsewhere, to which a browser adds the key as well.

    A browser keeps what it was given for this address and port alone. A cookie would go to whatever other port of
    127.0.0.1 it opens, such as another user's server.

    Args:
        inner: the application.
        key: ``user:password``.
        origins: of its own pages.
    """
    basic = ("Basic " + base64.b64encode(key.encode()).decode()).encode()
    own = {origin.encode() for origin in origins}

    async def application(scope: Message, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        knows = hmac.compare_digest(headers.get(b"authorization", b""), basic)
        elsewhere = headers.get(b"origin") not in {None, *own}
        if scope["type"] not in ("http", "websocket") or (knows and not elsewhere):
            await inner(scope, receive, send)
        elif scope["type"] == "http":
            asked = [] if knows else [(b"www-authenticate", b'Basic realm="stratagem"')]
            await send({"type": "http.response.start", "status": 403 if knows else 401, "headers": asked})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    return application

"""MLflow's pages and API on 127.0.0.1, for whoever has the key: `python -m tasks.tracking.pages PORT`.

MLflow has no key of its own without packages that are not installed here (its `basic-auth` imports flask-wtf), and asks
nobody for one by default: every user of the machine could read the project's runs and delete them. So its application
is served inside one that asks. Its check of Host is narrowed to loopback names. Its check of Origin lets pages of every
port of this machine in, so the one outside refuses all but its own.

The environment says what is served, MLFLOW_TRACKING_URI, and to whom, STRATAGEM_KEY (`user:password`); a command line
is read by every user. Jobs, which MLflow's own command starts processes for, are off.
"""

import base64
import hmac
import os
import sys
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
            asked = [] if knows else [(b"www-authenticate", b'Basic realm="stratagem ui"')]
            await send({"type": "http.response.start", "status": 403 if knows else 401, "headers": asked})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    return application


def main() -> None:
    """Serve until this process is ended."""
    port = int(sys.argv[1])
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    names = [f"127.0.0.1:{port}", f"localhost:{port}"]
    os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(names)
    import uvicorn
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    os.environ[BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_TRACKING_URI"]
    from mlflow.server.fastapi_app import app

    pages = guarded(app, os.environ["STRATAGEM_KEY"], [f"http://{name}" for name in names])
    uvicorn.run(pages, host="127.0.0.1", port=port, access_log=False)


if __name__ == "__main__":
    main()

"""MLflow's pages and API on 127.0.0.1, for whoever has the key: `python -m tasks.tracking.pages PORT`.

MLflow has no key of its own without packages that are not installed here (its `basic-auth` imports flask-wtf), and asks
nobody for one by default: every user of the machine could read the project's runs and delete them. So its application
is served inside one that asks. Its checks of Host and Origin are narrowed to loopback names.

The environment says what is served, MLFLOW_TRACKING_URI, and to whom, STRATAGEM_KEY (`user:password`); a command line
is read by every user. Jobs, which MLflow's own command starts processes for, are off.
"""

import base64
import hmac
import http.cookies
import os
import sys
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def guarded(inner: Application, key: str, cookie: str) -> Application:
    """Return an ASGI application that answers 401 to requests without a key.

    A program gives the key by Basic authentication. A browser gives its password once, `?key=PASSWORD`, as in the link
    that `stratagem ui` prints, and from then on the cookie that it gets for it, which no other page may send.
    """
    password = key.partition(":")[2]
    basic = "Basic " + base64.b64encode(key.encode()).decode()

    async def application(scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await inner(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = urllib.parse.parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        sent = http.cookies.SimpleCookie(headers.get("cookie", "")).get(cookie)
        if _same(headers.get("authorization", ""), basic) or (sent is not None and _same(sent.value, password)):
            await inner(scope, receive, send)
        elif scope["type"] == "http" and _same(query, password):
            # The browser keeps what stands behind `#`, and the address no longer shows the password.
            kept = f"{cookie}={password}; Path=/; HttpOnly; SameSite=Strict"
            await _answer(send, 303, {"location": "/", "set-cookie": kept})
        elif scope["type"] == "http":
            await _answer(send, 401, {"www-authenticate": 'Basic realm="stratagem ui"'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    return application


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


async def _answer(send: Any, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Serve until this process is ended."""
    port = int(sys.argv[1])
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    names = [f"127.0.0.1:{port}", f"localhost:{port}"]
    os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(names)
    os.environ["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(f"http://{name}" for name in names)
    import uvicorn
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    os.environ[BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_TRACKING_URI"]
    from mlflow.server.fastapi_app import app

    uvicorn.run(
        guarded(app, os.environ["STRATAGEM_KEY"], f"stratagem-{port}"), host="127.0.0.1", port=port, access_log=False
    )


if __name__ == "__main__":
    main()

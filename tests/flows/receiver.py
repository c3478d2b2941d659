"""Somebody who is told: an HTTP server on 127.0.0.1 that takes what Apprise sends to json:// addresses."""

import base64
import http.server
import json
import threading
from typing import Any


class Receiver:
    """It listens from ``start`` on; ``told`` is what it took. The first ``failures`` requests get 503."""

    def __init__(self, port: int, password: str = "s3cret-of-the-receiver") -> None:
        self.port, self.password = port, password
        self.told: list[dict[str, Any]] = []
        self.status = 200
        self.asked = self.failures = 0
        self._server: http.server.ThreadingHTTPServer | None = None

    def start(self) -> None:
        """Begin to listen, if it does not."""
        if self._server is not None:
            return
        receiver = self
        wanted = f"Basic {base64.b64encode(f'me:{self.password}'.encode()).decode()}"

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.asked += 1
                status = 503 if receiver.asked <= receiver.failures else receiver.status
                status = status if self.headers.get("Authorization") == wanted else 401
                if status == 200:
                    receiver.told.append(body)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def titles(self) -> list[str]:
        """Return what it was told, by title."""
        return [told["title"] for told in self.told]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

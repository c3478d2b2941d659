"""A Prefect server with its pages on an inherited socket: `python -m flows.operate.prefect_pages FD [--no-services]`.

It does what `prefect server start` does, for requests from this machine to this machine alone: Prefect asks for a
password, but answers under whatever name it is asked by, and to the pages of whatever server ask it. The environment
says what else it is started with.
"""

import socket
import sys

import uvicorn
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings

from tasks.system.access import from_here


def main() -> None:
    """Serve until this process is ended."""
    api = get_current_settings().server.api
    application = create_app(final=True, webserver_only="--no-services" in sys.argv)
    served = uvicorn.Config(
        from_here(application),
        timeout_keep_alive=api.keepalive_timeout,
        ws_ping_interval=api.websocket_ping_interval,
        ws_ping_timeout=api.websocket_ping_timeout,
        log_level="warning",
    )
    uvicorn.Server(served).run([socket.socket(fileno=int(sys.argv[1]))])


if __name__ == "__main__":
    main()

"""A Prefect server on the listening socket that it inherits: `python -m flows.operate.server FD`.

Alone, it is the API of one run of a user without a server. It prints `serving`, then `ready`; or `configured`, when
Prefect's settings name a server. It ends when its standard input closes, which also happens when the run's process
dies. Prefect would start a temporary server by itself. That one shares the terminal's Ctrl-C with the run, which then
waits 77 s for it and ends with a traceback; it outlives a run that is killed; and it begins to start seconds later.

With `--pages` it does what `prefect server start` does (`--no-services`: without schedules), for requests from this
machine to this machine alone: Prefect asks for a password, but answers under whatever name it is asked by, and to the
pages of whatever server ask it.
"""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from filelock import FileLock

from tasks.process.environment import keep_private
from tasks.system import lifetime, timeline
from tasks.system.access import from_here
from tasks.system.machine import without_collections


def main() -> None:
    """Serve until this process is ended, or, for a run, until standard input closes."""
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        if "--pages" in sys.argv:
            _serve_pages(listening)
        else:
            _serve_run(listening)


def _serve_pages(listening: socket.socket) -> None:
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    api = get_current_settings().server.api
    application = create_app(final=True, webserver_only="--no-services" in sys.argv)
    served = uvicorn.Config(
        from_here(application),
        timeout_keep_alive=api.keepalive_timeout,
        ws_ping_interval=api.websocket_ping_interval,
        ws_ping_timeout=api.websocket_ping_timeout,
        log_level="warning",
    )
    uvicorn.Server(served).run([listening])


def _serve_run(listening: socket.socket) -> None:
    keep_private()
    # A signal to every process must not take it from the run, which reports its end to it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with without_collections():
        from prefect.settings import get_current_settings
    settings = get_current_settings()
    if settings.api.url is not None:
        print("configured", flush=True)
        return
    print("serving", flush=True)
    asyncio.run(_serve(listening, settings.home))


class _ApiServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are; uvicorn would end at each."""
        yield


async def _serve(listening: socket.socket, home: Path) -> None:
    with timeline.span("Prefect's API", "import"), without_collections():  # 3 s, after the run was told to go on.
        from prefect.server.api.server import create_app
        from prefect.server.database import provide_database_interface

    application = from_here(create_app(ephemeral=True, final=True))
    server = _ApiServer(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=2))

    def end() -> None:
        server.should_exit = True

    lifetime.when_input_closes(end)
    home.mkdir(parents=True, exist_ok=True)
    # Of four first runs at once, one or two failed inside the migration of the database that they all made; and of two
    # on a busy machine, one server ended once while it started beside the other.
    with FileLock(home / "stratagem.lock"):
        await provide_database_interface().create_db()
        with timeline.span("Prefect's API", "start"):
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.02)
    if server.started:
        print("ready", flush=True)
    await serving


if __name__ == "__main__":
    main()

"""Prefect's API for one run of a user without a server: `python -m flows.operate.server FD`, a child of the run.

It serves on the listening socket that it was given. It prints `serving`, then `ready`; or `configured`, when Prefect's
settings name a server. It ends when its standard input closes, which also happens when the process that started it
dies.

Prefect would start a temporary server by itself. That one shares the terminal's Ctrl-C with the run, which then waits
77 s for it and ends with a traceback; it outlives a run that is killed; and it begins to start seconds later.
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
from tasks.system import clock, lifetime
from tasks.system.access import from_here
from tasks.system.machine import without_collections


def main() -> None:
    """Serve until standard input closes."""
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
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        asyncio.run(_serve(listening, settings.home))


class _ApiServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are; uvicorn would end at each."""
        yield


async def _serve(listening: socket.socket, home: Path) -> None:
    with clock.span("Prefect's API", "import"), without_collections():  # 3 s, after the run was told to go on.
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
        with clock.span("Prefect's API", "start"):
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.02)
    if server.started:
        print("ready", flush=True)
    await serving


if __name__ == "__main__":
    main()

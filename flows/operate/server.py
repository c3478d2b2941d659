"""A Prefect server on the listening socket that it inherits: `python -m flows.operate.server FD`.

Without options, it is the API of one run of a user without a server. It prints `serving`, then `ready`; or `configured`
if Prefect's settings name a server. It ends when its standard input closes, and so when the run's process dies. It
replaces Prefect's temporary server, which shares the terminal's Ctrl-C with the run, so that the run waits 77 s for it
and ends with a traceback; which outlives a run that is killed; and which starts seconds later.

With `--pages` it does what `prefect server start` does (`--no-services`: without schedules), but only for requests from
this machine to this machine: Prefect checks the password of a request, but neither its host nor its origin.
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

from tasks.process.child import set_up_process
from tasks.system import lifetime
from tasks.system.access import from_here
from tasks.system.machine import without_collections


def main() -> None:
    """Serve until this process is terminated, or, for a run, until standard input closes."""
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
    set_up_process()
    # A signal to all processes must not end the server before the run reports its end.
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
        """Ignore signals; uvicorn would end at each."""
        yield


async def _serve(listening: socket.socket, home: Path) -> None:
    with without_collections():  # 3 s, which the run does not wait for.
        from prefect.server.api.server import create_app
        from prefect.server.database import provide_database_interface

    application = from_here(create_app(ephemeral=True, final=True))
    server = _ApiServer(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=2))

    def end() -> None:
        server.should_exit = True

    lifetime.when_input_closes(end)
    home.mkdir(parents=True, exist_ok=True)
    # When four first runs started at once, one or two failed in the migration of their common database; and on a busy
    # machine, one of two servers that started together once ended.
    with FileLock(home / "stratagem.lock"):
        await provide_database_interface().create_db()
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
    if server.started:
        print("ready", flush=True)
    await serving


if __name__ == "__main__":
    main()

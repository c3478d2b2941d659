"""Prefect's API for one run, where the user has no server: `python -m flows.server`, a child of the run's process.

It prints `serving URL`, then `ready`; or `configured`, when Prefect's settings name a server. It ends when its standard
input closes, which also happens when the process that started it dies.

Prefect would start a temporary server by itself. That one shares the terminal's Ctrl-C with the run, which then waits
77 s for it and ends with a traceback; it outlives a run that is killed; and it begins to start seconds later.
"""

import asyncio
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from filelock import FileLock
from prefect.settings import get_current_settings

from tasks import timeline
from tasks.process.environment import keep_private


def main() -> None:
    """Serve until standard input closes."""
    keep_private()
    settings = get_current_settings()
    if settings.api.url is not None:
        print("configured", flush=True)
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"serving http://127.0.0.1:{listening.getsockname()[1]}/api", flush=True)
        asyncio.run(_serve(listening, settings.home))


async def _serve(listening: socket.socket, home: Path) -> None:
    with timeline.span("Prefect's API", "import"):  # 3 s, after the address was printed.
        from prefect.server.api.server import create_app
        from prefect.server.database import provide_database_interface

    home.mkdir(parents=True, exist_ok=True)
    # Of four first runs at once, one or two failed inside the migration of the database that they all made.
    with FileLock(home / "stratagem.lock"):
        await provide_database_interface().create_db()
    server = uvicorn.Server(
        uvicorn.Config(create_app(ephemeral=True, final=True), log_level="error", timeout_graceful_shutdown=2)
    )

    def end_with_input() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_input, daemon=True).start()
    with timeline.span("Prefect's API", "start"):
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
    if server.started:
        print("ready", flush=True)
    await serving


if __name__ == "__main__":
    main()

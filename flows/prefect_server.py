"""Prefect's server for a run: the environment that Prefect is imported with, a server of the run's own, and whether one
that the user named answers. Nothing here imports Prefect: its settings are read once, when it is imported.
"""

import atexit
import os
import subprocess
import sys
import tempfile

from tasks import config
from tasks.errors import StratagemError, UserError
from tasks.launchers.cluster import close
from tasks.network import why_silent


def set_environment(debug: bool) -> None:
    """Set what Prefect reads when it is imported. What the user has set stays.

    Without ``debug`` Prefect logs nothing to the terminal: a failed run ends with its one message, not with tracebacks.
    """
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")  # Without a network it only prints errors.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if debug else "CRITICAL")


class PrefectServer:
    """The Prefect API of this process's run, for a user who has none: one running `python -m flows.server`.

    It ends when its standard input closes, so it cannot outlive this process.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # Its last line is the reason when it fails.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("STRATAGEM_DEBUG") else self._log,
            cwd=config.project_root(),
            # What only a server needs that other programs talk to. Each is one more writer to one SQLite file.
            env={
                **os.environ,
                "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
                "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
                "PREFECT_SERVER_UI_ENABLED": "false",
            },
            text=True,
            process_group=0,  # Ctrl-C must not reach it: the run reports its end to it.
        )

    def await_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            StratagemError: it ended instead.
        """
        self.read()

    def read(self) -> str:
        """Return the next line that the server says: where it serves, then that it is ready.

        Raises:
            StratagemError: it ended instead.
        """
        said = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if not said:
            close(self._process)
            self._log.seek(0)
            last = (self._log.read().decode(errors="replace").strip() or "it said nothing").splitlines()[-1]
            raise StratagemError(f"Prefect's server for this run did not start: {last} (the whole story: --debug)")
        return said

    def close(self) -> None:
        """End the server and wait for it."""
        close(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def start_server() -> PrefectServer | None:
    """Start this run's own Prefect API, before Prefect is imported here; None when Prefect's settings name a server."""
    if url := os.environ.get("PREFECT_API_URL"):
        _check_server(url)
        return None
    server = PrefectServer()
    # Not sooner: Prefect sends its last events while Python ends, and would try for half a minute.
    atexit.register(server.close)
    said = server.read()
    if said == "configured":
        server.close()
        return None
    os.environ["PREFECT_API_URL"] = said.removeprefix("serving ")
    return server


def _check_server(url: str) -> None:
    # Prefect's client tries for a minute.
    if (reason := why_silent(f"{url.rstrip('/')}/health")) is not None:
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers ({reason}): start it with `prefect server start`, or "
            "unset the variable: then each run starts one of its own"
        )

"""Prefect's server for a run: sets the environment for Prefect's import, starts the run's own server, and checks if a
server that the user named answers. This module does not import Prefect, which reads its settings once, on import.
"""

import atexit
import os
import secrets
import socket
import sys
import tempfile
import time

from tasks import config
from tasks.system import files, machine, temporary
from tasks.system.child import Child
from tasks.system.errors import StratagemError, UserError
from tasks.system.network import unreachable_reason

# The timeout of a health check: during a training, a server took more than 10 s.
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 5.0
SOCKS = ("all_proxy=socks", "http_proxy=socks", "https_proxy=socks")


def set_environment(debug: bool) -> None:
    """Set the variables that Prefect reads on import, except those that the user has set.

    Without ``debug`` Prefect logs nothing to the terminal: a failed run ends with its one message, not with tracebacks.
    """
    if not os.environ.get("PREFECT_HOME") and not machine.can_write(os.path.expanduser("~/.prefect")):
        os.environ["PREFECT_HOME"] = str(config.project_root() / "mlruns" / "prefect")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")  # Without a network it only prints errors.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Prefect sends its log to its server, which shows it with the run.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    if not debug:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        # For Prefect's own threads, which log each event that a lost server does not receive.
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")  # After 2 and 4 s. Five would be a minute a request.


def make_password() -> str:
    """Return a user's name and a random password, which the servers of this project require from every client.

    A client of a Prefect server can run commands with it and read its blocks, and every user of a machine can reach its
    loopback address. Processes pass the key in the environment, because every user can read a command line.
    """
    return f"stratagem:{secrets.token_urlsafe(32)}"


def guarded_environment(key: str, url: str) -> dict[str, str]:
    """Return the variables with which the Prefect server at a URL accepts only requests with the key, and from a
    browser only requests of its own pages."""
    return {"PREFECT_SERVER_API_AUTH_STRING": key, "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url}


class PrefectServer(Child):
    """A Prefect API for the run of this process, if the user has none: a process of `python -m flows.operate.server`.

    It ends when its standard input closes, so it cannot outlive this process. If it dies, the run continues without it.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # Its last line is the reason when it fails.
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.key = make_password()
        # Turn off services that only a shared server needs: each is one more writer to the same SQLite file.
        environment = {
            **os.environ,
            "TMPDIR": str(temporary.folder()),
            "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            **guarded_environment(self.key, self.address),
        }
        with listening:  # The server has it from here on.
            super().__init__(
                [sys.executable, "-m", "flows.operate.server", str(listening.fileno())],
                environment,
                cwd=config.project_root(),
                stderr=None if os.environ.get("STRATAGEM_DEBUG") else self._log,
                pass_fds=[listening.fileno()],
            )

    def await_ready(self) -> str:
        """Wait for the next line that the server prints, and return it: `serving` or `configured`, then `ready`.

        Raises:
            StratagemError: the server ended instead.
        """
        said = self.output.readline().strip()
        if not said:
            self.close()
            with self._log:
                self._log.seek(0)
                said = self._log.read().decode(errors="replace").strip() or "it printed nothing"
            last = said.splitlines()[-1]
            full = files.find_full_disk(StratagemError(said), "Prefect's database")
            raise full or StratagemError(
                f"Prefect's server for this run did not start: {last} (--debug shows the traceback)"
            )
        return said


def check_proxy() -> None:
    """Refuse a SOCKS proxy that Prefect's client cannot use.

    Raises:
        UserError: names the variable.
    """
    if socks := [
        f"{name} = '{value}'" for name, value in os.environ.items() if f"{name}={value}".lower().startswith(SOCKS)
    ]:
        import httpx

        try:
            httpx.Client().close()
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{socks[0]}: Prefect's client refuses it, even for a server on this machine ({error}). Use socks5:// "
                "and `pip install 'httpx[socks]'`, or unset the variable for this command"
            ) from None


def start_server() -> PrefectServer | None:
    """Start this run's own Prefect API, before this process imports Prefect; None if Prefect's settings name a server.

    Raises:
        UserError: the server of PREFECT_API_URL does not answer, or a SOCKS proxy cannot be used.
        StratagemError: the run's own server ended instead.
    """
    check_proxy()
    if url := os.environ.get("PREFECT_API_URL"):
        reason = _unreachable(url)  # Prefect's client tries for a minute.
        if reason is None:
            return None
        if os.environ.get("PREFECT_HOME") == str(config.project_root() / "mlruns" / "up" / "prefect"):
            raise UserError(
                "this shell has sourced mlruns/up/environment, and `stratagem up` is no longer running: start it, or "
                "`unset PREFECT_API_URL PREFECT_API_AUTH_STRING PREFECT_HOME PROJECT_ROOT`, so that each run starts "
                "its own Prefect server"
            )
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers ({reason}): start it with `prefect server start`, or "
            "unset the variable, so that each run starts its own"
        )
    server = PrefectServer()
    # Only at exit: Prefect sends its last events while Python exits, and would retry for half a minute.
    atexit.register(server.close)
    if server.await_ready() == "configured":
        server.close()
        return None
    os.environ.update(PREFECT_API_URL=f"{server.address}/api", PREFECT_API_AUTH_STRING=server.key)
    return server


def answers(url: str, seconds: float) -> bool:
    """Return whether the Prefect API at a URL answers within ``seconds``, repeating refused requests. A starting server
    counts: it accepts requests and delays its answer."""
    end = time.monotonic() + seconds
    while _unreachable(url) is not None:
        if time.monotonic() >= end:
            return False
        time.sleep(0.5)
    return True


def _unreachable(url: str) -> str | None:
    return unreachable_reason(f"{url.rstrip('/')}/health", (CONNECT_SECONDS, ANSWER_SECONDS))

"""Prefect's server for a run: the environment that Prefect is imported with, a server of the run's own, and whether one
that the user named answers. Nothing here imports Prefect: its settings are read once, when it is imported.
"""

import atexit
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tasks import config
from tasks.system import clock, lifetime, machine, temporary
from tasks.system.errors import StratagemError, UserError
from tasks.system.network import unreachable_reason

# How often a run's own server restarts. Without a limit, one that always dies would restart for ever.
MAX_RESTARTS = 3
# Within this time a server answers whether it is well: beside a training one took more than 10 s.
ANSWER_SECONDS = 30.0
# One that did not when it was asked last is given less: a run asks up to four times while it ends.
AGAIN_SECONDS = 5.0
CONNECT_SECONDS = 5.0
_silent: set[str] = set()


def set_environment(debug: bool) -> None:
    """Set what Prefect reads when it is imported. What the user has set stays.

    Without ``debug`` Prefect logs nothing to the terminal: a failed run ends with its one message, not with tracebacks.
    """
    if not os.environ.get("PREFECT_HOME") and not machine.can_write(os.path.expanduser("~/.prefect")):
        os.environ["PREFECT_HOME"] = str(config.project_root() / "mlruns" / "prefect")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")  # Without a network it only prints errors.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Its log goes to its server, which shows it beside the run.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")
    if not debug:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        # Of its own threads, which tell of each event that a lost server does not take.
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "2")  # After 2 and 4 s. Five would be a minute a request.


def make_password() -> str:
    """Return a user's name and a random password, which a server that this project starts asks of every client.

    Whoever can use a Prefect server can let it run commands and read its blocks, and every user of a machine reaches
    its loopback address. The key goes from process to process in the environment: a command line is read by every user.
    """
    return f"stratagem:{secrets.token_urlsafe(32)}"


def guarded_environment(key: str, url: str) -> dict[str, str]:
    """Return what lets only requests with the key into a Prefect server, and in a browser only its own pages ask it.

    Args:
        key: of ``make_password``.
        url: of the server, without a path.
    """
    return {"PREFECT_SERVER_API_AUTH_STRING": key, "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url}


class PrefectServer:
    """The Prefect API of this process's run, for a user who has none: one running `python -m flows.operate.server`.

    It ends when its standard input closes, so it cannot outlive this process. When it dies it restarts: its
    socket stays open here meanwhile, so that requests wait for it instead of failing.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # Its last line is the reason when it fails.
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._key = make_password()
        # Kept from before this process names its server in its own, which would tell the next one `configured`.
        # Off is what only a server needs that other programs talk to. Each is one more writer to one SQLite file.
        self._environment = {
            **os.environ,
            "TMPDIR": str(temporary.folder()),
            "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            **guarded_environment(self._key, self._address),
        }
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "flows.operate.server", str(self._listening.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("STRATAGEM_DEBUG") else self._log,
            cwd=config.project_root(),
            env=self._environment,
            text=True,
            pass_fds=[self._listening.fileno()],
            process_group=0,  # Ctrl-C must not reach it: the run reports its end to it.
        )

    def use(self) -> bool:
        """Let the Prefect that this process imports talk to this server.

        Returns:
            False where Prefect's own settings name another server.

        Raises:
            StratagemError: it ended instead of telling.
        """
        if self._read() == "configured":
            return False
        os.environ["PREFECT_API_URL"] = f"{self._address}/api"
        os.environ["PREFECT_API_AUTH_STRING"] = self._key
        return True

    def await_ready(self) -> None:
        """Wait until the server answers; from then on it restarts when it dies.

        Raises:
            StratagemError: it ended instead.
        """
        self._read()
        threading.Thread(target=self._keep_running, daemon=True).start()

    def _read(self) -> str:
        """Return the next line that the server says: whether it serves, then that it is ready."""
        said = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if not said:
            lifetime.close(self._process)
            self._log.seek(0)
            last = (self._log.read().decode(errors="replace").strip() or "it said nothing").splitlines()[-1]
            raise StratagemError(f"Prefect's server for this run did not start: {last} (the whole story: --debug)")
        return said

    def _keep_running(self) -> None:
        for _ in range(MAX_RESTARTS):
            code = self._process.wait()
            with self._starting:
                if self._closing.is_set():
                    return
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                print(f"warning: Prefect's server for this run died ({how}); restarting it", file=sys.stderr)
                self._release()
                self._process = self._start()
        self._process.wait()
        self._listening.close()  # Now requests fail at once, and the run goes on without Prefect.

    def _release(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        """End the server and wait for it."""
        with self._starting:
            self._closing.set()
        lifetime.close(self._process)
        self._release()
        self._listening.close()
        self._log.close()


def start_server() -> PrefectServer | None:
    """Start this run's own Prefect API, before Prefect is imported here; None when Prefect's settings name a server."""
    if url := os.environ.get("PREFECT_API_URL"):
        _check_server(url)
        return None
    server = PrefectServer()
    # Not sooner: Prefect sends its last events while Python ends, and would try for half a minute.
    atexit.register(server.close)
    if server.use():
        return server
    server.close()
    return None


@contextmanager
def starting(settings: config.Settings, debug: bool, with_cluster: bool = True) -> Iterator[None]:
    """Start what a flow needs while the block imports it; the server answers when the block has ended.

    Args:
        settings: whose processes are started.
        debug: as in ``set_environment``.
        with_cluster: as in ``client.start_processes``.
    """
    from tasks.process import client
    from tasks.system.machine import without_collections

    set_environment(debug)
    # Imports its framework while this process imports Prefect.
    client.start_processes(settings, with_cluster=with_cluster)
    with clock.span("flow", "wait for the API's address"):
        server = start_server()
    with clock.span("flow", "import Prefect"), without_collections():
        yield
    if server is not None:
        with clock.span("flow", "wait for the API"):
            server.await_ready()


def answers(url: str, seconds: float) -> bool:
    """Return whether a Prefect server answers, now or within some seconds.

    Args:
        url: of its API.
        seconds: for how long one that refuses is asked again. One that is being started takes requests and lets them
            wait; that counts.
    """
    end, patience = time.monotonic() + seconds, AGAIN_SECONDS if url in _silent else ANSWER_SECONDS
    while unreachable_reason(f"{url.rstrip('/')}/health", (CONNECT_SECONDS, patience)) is not None:
        if time.monotonic() >= end:
            _silent.add(url)
            return False
        time.sleep(0.5)
    _silent.discard(url)
    return True


def _check_server(url: str) -> None:
    # Prefect's client tries for a minute.
    if (reason := unreachable_reason(f"{url.rstrip('/')}/health", (CONNECT_SECONDS, ANSWER_SECONDS))) is not None:
        raise UserError(
            f"PREFECT_API_URL = {url}: no Prefect server answers ({reason}): start it with `prefect server start`, or "
            "unset the variable: then each run starts one of its own"
        )

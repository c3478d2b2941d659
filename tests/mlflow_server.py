"""The team's MLflow server, as a process of its own that a test may end or kill."""

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from tasks.system.machine import free_ports


class MlflowServer:
    """An MLflow server on 127.0.0.1, with its database and its files in a folder; ``start`` starts it on the same port
    again. In a ``with`` statement it runs until the block ends."""

    def __init__(self, folder: Path, artifacts: str | None = None, **environment: str) -> None:
        self.database, self.served, self._log = folder / "mlflow.db", folder / "served", folder / "log"
        self._artifacts, self._environment = artifacts or str(self.served), environment
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> None:
        """Start it, if it does not run, and wait for its first answer."""
        if self.process is None or self.process.poll() is not None:
            command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
            command += ["--backend-store-uri", f"sqlite:///{self.database}"]
            command += ["--artifacts-destination", self._artifacts]
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command], cwd=self._log.parent, stdout=log, stderr=log,
                    env=os.environ | self._environment, start_new_session=True,
                )  # fmt: skip
        while wait and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                break
            time.sleep(0.2)
        assert self.process.poll() is None, self._log.read_text()

    def end(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

"""Trainings in processes of their own: TensorFlow's and JAX' devices cannot change after their first use."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks import config

CODE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2]).main(*json.loads(sys.argv[3]))
"""


@pytest.fixture(scope="module")
def shared_project(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project's folder with the digits, for all tests of a file: ``params.yaml``, ``data`` and ``mlruns``."""
    root = tmp_path_factory.mktemp("parity")
    shutil.copy(Path(config.__file__).parents[2] / "params.yaml", root)
    (root / ".dvc").mkdir()
    shutil.copytree(digits_folder, root / "data" / "digits")
    return root


@pytest.fixture(scope="session")
def start() -> Callable[..., None]:
    """Run a test file's ``main(*args)`` in the current folder, in one process or as workers of a cluster, to the end:
    ``start("test_parity", ["mirrored x2"], num_workers=1, environment=os.environ)``; the first argument names the
    logs."""

    def start(module: str, args: list[Any], num_workers: int, environment: Mapping[str, str] = os.environ) -> None:
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(num_workers)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
        processes, logs = [], []
        try:
            for index in range(num_workers):
                cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                logs.append(Path(f"{args[0]} {index}.log"))
                with logs[-1].open("w") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-c", CODE, str(Path(__file__).parent), module, json.dumps(args)],
                            env={**environment, **({"TF_CONFIG": json.dumps(cluster)} if num_workers > 1 else {})},
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            # One that fails leaves the others waiting for it. The time limit is against those that hang.
            deadline = time.monotonic() + 1700
            while None in (codes := [process.poll() for process in processes]):
                if any(codes) or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = "\n".join(log.read_text()[-5000:] for log in logs)
        assert codes == [0] * num_workers, f"{module} {args}: exit codes {codes}\n{said}"

    return start

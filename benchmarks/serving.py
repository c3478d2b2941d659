"""Requests to a served model: ours and MLflow's own scoring server, with the same model, clients and requests.

Both serve on 127.0.0.1 in turn, and are asked by several threads that each wait for an answer before they ask again.
"""

import base64
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks import measure
from tasks.system.machine import free_ports

HEADING = "## Serving\n"
CLIENTS = (1, 8)
SECONDS = 5.0
KEY = "me:of-the-benchmark"
QUESTIONS = [
    measure.Question("p50 of one client, ours / MLflow's", "ours, 1, p50", "mlflow, 1, p50", "at most", 1.0),
    measure.Question("p99 of 8 clients, ours / MLflow's", "ours, 8, p99", "mlflow, 8, p99", "at most", 1.0),
    measure.Question("answers/s to 8 clients, ours / MLflow's", "ours, 8, rate", "mlflow, 8, rate", "at least", 1.0),
]


@dataclass
class Answers:
    """What clients measured: seconds of each request."""

    seconds: list[float]
    total: float

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        return {
            "p50": 1000 * statistics.median(ordered),
            "p99": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
            "rate": len(ordered) / self.total,
        }


def ask(port: int, body: bytes, clients: int) -> Answers:
    """Ask for so many seconds; every answer must be a prediction."""
    seconds: list[list[float]] = [[] for _ in range(clients)]
    failed: list[str] = []
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Basic " + base64.b64encode(KEY.encode()).decode(),
    }

    def client(own: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while time.perf_counter() < end and not failed:
            began = time.perf_counter()
            connection.request("POST", "/invocations", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            own.append(time.perf_counter() - began)
            if answer.status != 200:
                failed.append(content.decode())
        connection.close()

    began = time.perf_counter()
    end = began + SECONDS
    threads = [threading.Thread(target=client, args=(own,)) for own in seconds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(f"a request failed: {failed[0][:500]}")
    return Answers([one for own in seconds for one in own], time.perf_counter() - began)


@contextlib.contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the block ends."""
    environment = {
        **os.environ,
        "PATH": f"{measure.BIN}{os.pathsep}{os.environ['PATH']}",  # `mlflow models serve` starts uvicorn by its name.
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow",
        "STRATAGEM_KEY": KEY,
        "MLFLOW_TRACKING_URI": f"sqlite:///{measure.ROOT / 'mlruns' / 'mlflow.db'}",
    }
    with subprocess.Popen(
        command, cwd=measure.ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while server.poll() is None:
                with contextlib.suppress(OSError):
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                    connection.request("GET", "/ping")
                    connection.getresponse().read()
                    break
                time.sleep(0.2)
            if server.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with {server.returncode}")
            yield
        finally:
            server.terminate()


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure, and return a section of the page."""
    load = measure.Load()
    overrides = {
        "dataset.name": dataset,
        "train.epochs": 1,
        "register.model_name": "benchmark",
        "register.minimum": None,
    }
    measure.watch(measure.stratagem("run", "--fresh", settings=overrides))
    images = np.load(measure.ROOT / "data" / dataset / "prepared" / "test_images.npy", mmap_mode="r")
    body = json.dumps({"inputs": images[:1].tolist()}).encode()
    model, found = "models:/benchmark@challenger", {}
    for repeat in range(repeats):
        for who in ("ours", "mlflow"):
            (port,) = free_ports(1)
            command = (
                measure.stratagem("models", "serve", model, "--port", str(port))
                if who == "ours"
                else [
                    str(measure.BIN / "mlflow"),
                    "models",
                    "serve",
                    "-m",
                    model,
                    "--env-manager",
                    "local",
                    "-p",
                    str(port),
                ]
            )
            with serving(command, port):
                ask(port, body, 2)  # The first ones trace.
                for clients in CLIENTS:
                    for name, value in ask(port, body, clients).figures().items():
                        found.setdefault(f"{who}, {clients}, {name}", []).append(value)
            print(f"serving: repeat {repeat + 1} of {repeats}, {who}", file=sys.stderr)
    about = (
        f"One image of {dataset} per request, from clients that wait for each answer, {SECONDS:.0f} s each; "
        f"`stratagem models serve` and `mlflow models serve --env-manager local`; {repeats} starts. Ours also checks a "
        "password."
    )
    lines = [
        "| server | clients | p50, ms | p99, ms | answers/s |",
        "|---|---|---|---|---|",
    ]
    for who, title in (("ours", "`models serve`"), ("mlflow", "MLflow's")):
        for clients in CLIENTS:
            cells = [measure.spread(found[f"{who}, {clients}, {name}"], 1) for name in ("p50", "p99", "rate")]
            lines.append(f"| {title} | {clients} | {' | '.join(cells)} |")
    lines += ["", *measure.answers(QUESTIONS, found)]
    return measure.section(HEADING, ("mlflow", "tensorflow", "keras"), load.others(), about, lines)

"""`stratagem models serve` on a real registry: asked by several clients while its alias moves, its store is away, it
is told to end."""

import json
import os
import shutil
import signal
import socket
import threading
import time

import numpy as np
import psutil
import pytest
import requests
from mlflow import MlflowClient

from tests.flows.doors import assert_shut
from tests.waiting import wait

pytestmark = pytest.mark.slow

CLIENTS = 4


@pytest.fixture(scope="module")
def registry(finished, tmp_path_factory):
    """A copy of the finished project with a second version of its model, a client of its registry, and its name."""
    project = tmp_path_factory.mktemp("served") / "project"
    shutil.copytree(finished.project, project, symlinks=True)
    name = finished.summary["model_version"].split("/")[0]
    return project, name


@pytest.fixture
def served(registry, start, run, monkeypatch, one_prefect_server):
    project, name = registry
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(project))
    client = MlflowClient(uri := f"sqlite:///{project}/mlruns/mlflow.db", registry_uri=uri)
    if len(client.search_model_versions(f"name = '{name}'")) < 2:
        another = ("train.epochs=1", "train.seed=5", "register.minimum=null")
        done = run(["stratagem", "run", *(word for one in another for word in ("--set", one))])
        assert done.returncode == 0, done.stderr
    client.set_registered_model_alias(name, "champion", "1")
    command = start(
        "stratagem", "models", "serve", f"models:/{name}@champion", "--port", "0", "--poll", "0.2", "--json"
    )
    command.wait_until("}\n", of=command.out)
    said = json.loads(command.out.read_text())
    return command, said["url"], (said["user"], said["password"]), client, name


def body(project, count=1):
    images = np.load(project / "data/digits/prepared/test_images.npy")
    return json.dumps({"inputs": images[:count].tolist()}).encode()


class Clients:
    """Threads that ask on and on."""

    def __init__(self, url, key, content):
        self.url, self.key, self.content = url, key, content
        self.answers, self.failures, self.ended = [], [], threading.Event()
        self.threads = [threading.Thread(target=self.ask) for _ in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def ask(self):
        with requests.Session() as session:
            session.auth = self.key
            while not self.ended.is_set():
                try:
                    answer = session.post(f"{self.url}/invocations", self.content, headers=JSON, timeout=60)
                    if answer.status_code == 200:
                        self.answers.append((answer.headers["x-model"], answer.text))
                    else:
                        self.failures.append(answer.text)
                except requests.RequestException as error:
                    self.failures.append(str(error))

    def end(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()


JSON = {"Content-Type": "application/json"}


def test_no_request_is_lost_while_the_alias_moves_and_the_store_is_away(served, registry):
    command, url, key, client, name = served
    project, _ = registry

    def version():
        return requests.get(f"{url}/version", auth=key, timeout=60).json()["model"]

    assert version() == f"{name}/1"
    clients = Clients(url, key, body(project))
    try:
        for number in ("2", "1", "2"):
            client.set_registered_model_alias(name, "champion", number)
            wait("the change", lambda number=number: version() == f"{name}/{number}")
            before = len(clients.answers)
            wait("more answers", lambda before=before: len(clients.answers) > before + 10 * CLIENTS)
        store = project / "mlruns" / "mlflow.db"
        store.rename(store.with_name("away.db"))
        wait("a line", lambda: "cannot be looked up" in command.err.read_text())
        before = len(clients.answers)
        wait("more answers", lambda: len(clients.answers) > before + 10)
        assert "Still serving" in " ".join(command.err.read_text().split())
        store.with_name("away.db").rename(store)
        wait("a line", lambda: "can be looked up again" in command.err.read_text())
    finally:
        clients.end()
    assert clients.failures == []
    assert {model for model, _ in clients.answers} == {f"{name}/1", f"{name}/2"}
    told = {}
    for model, text in clients.answers:
        told.setdefault(model, []).append(json.loads(text)["predictions"][0])
    for answers in told.values():  # The load decides what is computed together, and that the last bits.
        np.testing.assert_allclose(answers, [answers[0]] * len(answers), atol=1e-4)
    assert not np.allclose(told[f"{name}/1"][0], told[f"{name}/2"][0], atol=1e-3)

    assert_shut(url, "/invocations", ":".join(key), json.loads(body(project)))
    # What is wrong is told with what is right; more than one name and its probability where asked for.
    answer = requests.post(f"{url}/invocations", b'{"inputs": [[1, 2]]}', headers=JSON, auth=key, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["expected"]["inputs"][0]["shape"] == [-1, 8, 8, 1]
    answer = requests.post(f"{url}/invocations?top_k=2", body(project), headers=JSON, auth=key, timeout=60)
    (row,) = answer.json()["predictions"]
    assert list(row) == ["prediction", "probability", "prediction_2", "probability_2"]
    assert requests.post(f"{url}/invocations?top_k=x", body(project), auth=key, timeout=60).status_code == 400
    assert key[1] not in " ".join(word for process in command.family for word in process.cmdline())


def test_it_answers_what_was_asked_before_it_ends(served, registry):
    command, url, key, _, _ = served
    content, port = body(registry[0], 2), int(url.rpartition(":")[2])
    request = requests.Request("POST", f"{url}/invocations", data=content, headers=JSON, auth=key).prepare()
    lines = [f"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1:{port}"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()] + ["Expect: 100-continue"]
    command.family = psutil.Process(command.process.pid).children(recursive=True)
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 "), "it waits for the body"
        connection.sendall(content[:10])
        os.killpg(command.process.pid, signal.SIGINT)  # As a terminal sends it: to the whole group.
        time.sleep(1)
        connection.sendall(content[10:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
    assert command.process.wait(300) == 130
    assert command.survivors() == []
    assert command.err.read_text() == "interrupted\n"


def test_it_ends_with_the_command_however_that_dies_and_a_port_that_is_taken_is_one_message(served, run):
    command, url, _, _, name = served
    done = run(["stratagem", "models", "serve", f"models:/{name}/1", "--port", url.rpartition(":")[2]])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Address already in use. Choose another one, or 0 for any\n"), done.stderr
    command.family = psutil.Process(command.process.pid).children(recursive=True)
    assert command.family
    command.process.kill()
    command.process.wait()
    assert command.survivors() == []


def test_what_is_refused_is_one_message(registry, run, monkeypatch):
    project, name = registry
    monkeypatch.chdir(project)
    for words, environment, message in (
        (["models:/none@champion"], {}, "unknown model 'models:/none@champion'"),
        ([f"models:/{name}"], {}, "is not the address of a model: write models:/NAME@ALIAS"),
        ([f"models:/{name}/1"], {"STRATAGEM_KEY": "short"}, "STRATAGEM_KEY: write it as USER:PASSWORD"),
    ):
        done = run(["stratagem", "models", "serve", *words], env={"PYTHONPATH": str(project), **environment})
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1

"""Prefect's form of a run, as somebody fills it in."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from typing import Any

import pytest

from tasks import config
from tests.waiting import wait

pytestmark = pytest.mark.slow

FILL_IN = """(() => {
  const field = name => [...document.querySelectorAll('.schema-form-property')]
    .filter(one => one.querySelector('label')?.innerText.trim().startsWith(name + ' ')).at(-1);
  const put = (element, value) => {
    Object.getOwnPropertyDescriptor(Object.getPrototypeOf(element), 'value').set.call(element, value);
    element.dispatchEvent(new Event('input', {bubbles: true}));
    element.dispatchEvent(new Event('change', {bubbles: true}));
  };
  const epochs = field('train.epochs')?.querySelector('input'), kind = field('strategy.kind')?.querySelector('select');
  if (!epochs || !kind) return '';
  if (epochs.value === '2' && kind.value === 'mirrored') return document.body.innerText;
  put(epochs, '2');
  put(kind, 'mirrored');
  return '';
})()"""
SUBMIT = "[...document.querySelectorAll('button')].filter(one => one.innerText.trim() === 'Submit')[0].click()"


@pytest.fixture
def server(prefect_home, project):
    """A Prefect server with the project's deployments, and no worker."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = os.environ | {
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PROJECT_ROOT": str(project),
        "PYTHONPATH": str(project),
    }
    given = {"cwd": project, "env": environment, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(
        ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **given,
    )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"{address}/api/health", timeout=5).status == 200
        return False

    try:
        wait("the server's first answer", answers, 300)
        for command in (
            ["prefect", "work-pool", "create", "local-process", "--type", "process"],
            ["prefect", "--no-prompt", "deploy", "--all"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **given)
            assert done.returncode == 0, done.stdout + done.stderr
        yield address
    finally:
        process.terminate()
        process.wait(300)


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{address}/api/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.exhaustive
def test_the_form_of_a_run_sends_what_was_filled_in_and_nothing_else(page, server):
    (deployment,) = ask(server, "deployments/filter", {"deployments": {"name": {"any_": ["training"]}}})
    form = page(f"{server}/deployments/deployment/{deployment['id']}/run")
    form.wait_for("document.body?.innerText.includes('heartbeat_timeout_seconds')")
    shown = form.wait_for(FILL_IN)
    time.sleep(2)  # On a busy machine the page may still be putting in its own values after it shows the fields.
    shown = form.wait_for(FILL_IN)
    assert "How often lost processes restart" in shown, "each setting is explained"
    assert "params.yaml: 15." in shown
    assert shown.index("input.validation") < shown.index("memory_budget_bytes"), "the common settings come first"
    form.run(SUBMIT)
    form.wait_for("!location.pathname.endsWith('/run')")  # It goes to the deployment's page.
    (run,) = ask(server, "flow_runs/filter", {"deployments": {"name": {"any_": ["training"]}}})
    given = config.Overrides.model_validate(run["parameters"]["overrides"]).given()
    assert given == {"train.epochs": 2, "strategy.kind": "mirrored"}
    assert run["parameters"]["recipe"] is None
    config.load(None, given)

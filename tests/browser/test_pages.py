"""The pages that `stratagem ui` serves, MLflow's and Prefect's, as somebody opens them."""

import base64
import json
import subprocess

import pytest

from tests.browser.conftest import asked, said

pytestmark = pytest.mark.slow


def sent(events, *own):
    """Return the addresses of other servers that a page asked for, and that the browser did not keep it from asking."""
    kept = {
        one["params"]["requestId"]
        for one in events
        if one["method"] == "Network.loadingFailed" and one["params"].get("blockedReason") == "csp"
    }
    asking = [one for one in events if one.get("params", {}).get("requestId") not in kept]
    return [address for address in asked(asking) if not address.startswith(own)]


@pytest.fixture
def served(project, run):
    """`stratagem ui` of a project with a run: the run's id, and what the command says, by its first word."""
    trained = run(["stratagem", "run", "--json", "--set", "train.epochs=1"])
    assert trained.returncode == 0, trained.stderr
    command = subprocess.Popen(["stratagem", "ui"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    with command:
        lines = list(iter(command.stdout.readline, "Press Ctrl-C to stop everything.\n"))
        yield json.loads(trained.stdout)["run_id"], dict(line.split(maxsplit=2)[:2] for line in lines)
        command.terminate()


def test_pages_show_the_runs_and_ask_no_other_server(served, page):
    run_id, shown = served
    key, mlflow, prefect = shown["Password"], shown["MLflow"].removesuffix("/"), shown["Prefect"].removesuffix("/runs")
    basic = {"Authorization": f"Basic {base64.b64encode(key.encode()).decode()}"}
    opened = page("about:blank")
    with opened.heard() as events:
        opened.call("Network.setExtraHTTPHeaders", headers=basic)  # As a browser does when it was told.
        opened.call("Page.navigate", url=f"{mlflow}/#/experiments/1/runs/{run_id}")
        opened.wait_for("document.body?.innerText.includes('test/accuracy')")
        opened.call("Page.navigate", url=f"{mlflow}/#/experiments/1/runs/{run_id}/artifacts/evaluation/report.html")
        opened.wait_for("[...document.querySelectorAll('iframe')].length > 0")
        assert sent(events, mlflow) == []
        assert asked(events), "what it asked was heard"
        opened.call("Network.setExtraHTTPHeaders", headers={})
    with opened.heard() as events:
        opened.call("Page.navigate", url=f"{prefect}/")
        opened.wait_for("document.querySelector('input[type=password]') !== null")
        opened.run(
            f"""(() => {{
              const field = document.querySelector('input[type=password]');
              Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, '{key}');
              field.dispatchEvent(new Event('input', {{bubbles: true}}));
              field.closest('form').requestSubmit();
            }})()"""
        )
        opened.wait_for("document.body?.innerText.includes('Flow Runs')")
        assert sent(events, prefect, prefect.replace("http:", "ws:")) == []
    assert not [one for one in said(events) if one["method"] == "Runtime.exceptionThrown"]

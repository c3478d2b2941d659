"""A page in Chromium, driven by its own protocol; a test that wants one is skipped where Chromium is not there."""

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.waiting import wait


class Page:
    """One page of a browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._calls = 0
        self._events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[dict[str, Any]]]:
        """Give what the page asks the network for and says to the console, from now to the block's end."""
        for domain in ("Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self._events.clear()
        yield self._events
        for domain in ("Network", "Log", "Runtime"):
            self.call(f"{domain}.disable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol, and return its result."""
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while (answer := json.loads(self._connection.recv(timeout=300))).get("id") != self._calls:
            self._events.append(answer)
        return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open_at(self, address: str, width: int) -> None:
        """Open a file in so many pixels, with all of its details, and see that it fits."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)
        self.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")
        self.run("[...document.querySelectorAll('details')].forEach(one => one.open = true)")
        assert self.run("window.innerWidth") == width
        assert self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        assert self.run("[...document.images].filter(one => one.complete && !one.naturalWidth).length") == 0

    def in_each_scheme(self, script: str) -> dict[str, Any]:
        """Return the value of an expression where the user likes pages light, and where dark."""
        found = {}
        for scheme in ("light", "dark"):
            self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            found[scheme] = self.run(script)
        return found

    def wait_for(self, script: str, timeout_seconds: float = 120) -> Any:
        """Return the value of an expression once it is true."""
        end = time.monotonic() + timeout_seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body?.innerText')}"
            time.sleep(0.2)
        return value


def asked(events: list[dict[str, Any]]) -> list[str]:
    """Return the addresses that a page asked for, but for what it holds itself."""
    found = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    return [address for address in found if not address.startswith(("data:", "blob:"))]


def said(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a page said to the console, and its errors."""
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    return [one for one in events if one["method"] in kinds]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Page]]:
    """Open an address in a browser of its own, which ends with the module."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    profile = tmp_path_factory.mktemp("browser")
    # As root, as in a container, Chromium has no sandbox; it opens pages of this test's own servers only.
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        "--window-size=1400,3000",
    ]
    process = subprocess.Popen(
        [browser, *options, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with contextlib.ExitStack() as opened:
        opened.callback(process.wait, 300)
        opened.callback(process.terminate)
        port = _port(profile / "DevToolsActivePort", process)
        # A busy machine needs more than the 10 s and 20 s that websockets gives a handshake and an answer to a ping.
        patient: dict[str, Any] = {"max_size": 2**26, "open_timeout": 120, "ping_interval": None}
        one = Page(opened.enter_context(connect(_first_tab(port), **patient)))
        one.call("Page.enable")

        def go(address: str) -> Page:
            one.call("Page.navigate", url=address)
            return one

        yield go


def _first_tab(port: str) -> str:
    """Return the address of the page that is open; Chromium takes questions before it has one."""

    def tabs() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
            return [tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page"]

    return str(wait("a page", tabs, 120)[0])


def _port(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the port that Chromium has chosen."""

    def words() -> list[str]:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        return file.read_text().split() if file.exists() else []

    return str(wait("Chromium's port", words, 120)[0])

"""Drives Debian's Chromium over its debugging protocol: opens a page, presses keys, reads what is drawn, takes pictures."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

WAIT_S = 60.0
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}


def program() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """A page. `problems` are exceptions, errors of the console and refusals of the content security policy."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if message["params"]["type"] == "error":
                self.problems.append(str(message["params"]["args"]))
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the window, and which colours the system prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        """Go to a URL, also to another fragment of the same, and wait until the page is drawn."""
        self.call("Page.navigate", url=url)
        self.settle()

    def leave(self) -> None:
        """Go to an empty page."""
        self.call("Page.navigate", url="about:blank")
        self.evaluate("document.readyState")

    def settle(self) -> None:
        """Wait until nothing is asked for and drawn any more."""
        self.wait("document.readyState === 'complete' && !!document.querySelector('main')?.childElementCount")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")
        self.wait("!document.querySelector('main[aria-busy]')")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")

    def evaluate(self, code: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"].get("exception", result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"not so after {WAIT_S:g} s: {condition}. The page: {self.text()[:500]!r}"
            )
            time.sleep(0.03)

    def text(self, selector: str = "body") -> str:
        """What is read there."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, and wait for what it does."""
        about = {
            "key": key,
            "modifiers": 8 if shift else 0,
            "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())),
        }
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)
        self.settle()

    def click(self, selector: str) -> None:
        """Click on the first element of a selector."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, or of what the window shows."""
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))


@contextmanager
def chromium() -> Iterator[Tab]:
    """A browser without a window, with a profile of its own and one page."""
    executable = program()
    assert executable is not None, "Chromium is not installed"
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--disable-background-networking"]
        process = subprocess.Popen(
            [executable, *options, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        try:
            with connect(_address(Path(profile)), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()
            process.wait(WAIT_S)


def _address(profile: Path) -> str:
    """The web socket of the first page."""
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if file.exists() and (lines := file.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=WAIT_S) as answer:
                pages = [page for page in json.loads(answer.read()) if page["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise AssertionError("Chromium has not opened its port")

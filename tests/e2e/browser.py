"""A headless Chromium that the DevTools protocol controls over two pipes; errors of the page are recorded.

The protocol: https://chromedevtools.github.io/devtools-protocol/. Over pipes, a message is JSON and ends with a NUL.
The browser reads descriptor 3 and writes descriptor 4 (--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMAND = ("chromium", "chromium-browser", "google-chrome")
# The browser must not fetch anything on its own: only requests of the page count.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--no-default-browser-check", "--remote-debugging-pipe"),
)
TIMEOUT_SECONDS = 120


class Browser:
    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads = writes, reads
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **values: Any) -> dict[str, Any]:
        """Return the result of a command. Events that arrive meanwhile are stored for `events`."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": values, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    pytest.fail(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def events(self, method: str, session: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._events
            if event.get("method") == method and event.get("sessionId") == session
        ]

    def wait(self, method: str, session: str) -> None:
        while not self.events(method, session):
            self._events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._reads, 1 << 20) if ready else b""
            if not data:
                pytest.fail("the browser sends nothing more")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Tab:
    """An open page. `width` in CSS pixels; `media` as in {"prefers-color-scheme": "dark"}."""

    def __init__(self, browser: Browser, url: str, width: int, media: dict[str, str]) -> None:
        self._browser = browser
        self.url = url
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": name, "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)
        browser.wait("Page.loadEventFired", self._session)

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **values)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            pytest.fail(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def console_errors(self) -> list[str]:
        """Return the errors and warnings of the console, and uncaught exceptions."""
        self.evaluate("new Promise(requestAnimationFrame)")  # all messages until now have arrived
        messages = [
            f"{event['type']}: {[argument.get('value', argument.get('description')) for argument in event['args']]}"
            for event in self._events("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        messages += [str(event["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        messages += [f"{entry['entry']['level']}: {entry['entry']['text']}" for entry in self._events("Log.entryAdded")]
        return messages

    def requested_urls(self) -> list[str]:
        """Return the URLs that the page requested apart from itself, even if the request failed."""
        urls = [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]
        return [url for url in urls if url != self.url]

    def _events(self, method: str) -> list[dict[str, Any]]:
        return self._browser.events(method, self._session)

    def emulate_colour_blindness(self) -> None:
        self.call("Emulation.setEmulatedVisionDeficiency", type="achromatopsia")

    def save_screenshot(self, path: Path) -> None:
        """Save the whole page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def save_pdf(self, path: Path) -> None:
        """Save the page as PDF for A4."""
        data = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """Run a Chromium with its files below `folder` until the block ends."""
    program = next(filter(None, map(shutil.which, COMMAND)), None)
    if program is None:
        pytest.fail("chromium is missing: scripts/setup.sh test-packages")
    (command_read, command_write), (event_read, event_write) = _pipe(), _pipe()
    shell_command = f'exec "$@" 3<&{command_read} 4>&{event_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell_command, "chromium", program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(command_read, event_write),
        env={**os.environ, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(event_write)
    try:
        yield Browser(command_write, event_read)
    finally:
        os.close(command_write)  # the browser ends when its pipe is closed
        os.close(event_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Return a reading and a writing end that are not 3 or 4, the descriptors of the browser."""
    original = os.pipe()
    reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in original)
    for end in original:
        os.close(end)
    return reads, writes


@contextmanager
def open_tab(browser: Browser, path: Path, width: int = 1200, **media: str) -> Iterator[Tab]:
    """Open the file as a page; `media` as in prefers_color_scheme="dark"."""
    features = {name.replace("_", "-"): value for name, value in media.items()}
    yield Tab(browser, path.resolve().as_uri(), width, features)

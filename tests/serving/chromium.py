# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, through its DevTools protocol over a pipe.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
# There is neither a display nor, in a container, a sandbox or a large /dev/shm.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-pipe", "--window-size=1000,900", "--disable-background-networking",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32}
CONTROL = 2


class Page:
    """A page of a browser.

    Attributes:
        events: all that happened, by name.
    """

    def __init__(self, read_fd: int, write_fd: int):
        self._read_fd, self._write_fd, self._received = read_fd, write_fd, b""
        self._numbers, self._session, self.events = itertools.count(), None, []

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method: str, **params) -> dict:
        """What a method of the protocol returns."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append((answer.get("method"), answer.get("params")))
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def value(self, expression: str):
        """Of a JavaScript expression, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = 120.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not self.value(condition):
            assert time.monotonic() < end_s, condition
            time.sleep(0.02)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = KEYS[key]
        text = {"Enter": "\r", "Space": " "}.get(key, "")
        common = {"windowsVirtualKeyCode": code, "code": key, "modifiers": modifiers}
        common["key"] = text.replace("\r", "Enter") or key
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path, *, in_grey: bool = False) -> None:
        kind = "achromatopsia" if in_grey else "none"
        self.call("Emulation.setEmulatedVisionDeficiency", type=kind)
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> dict:
        while b"\0" not in self._received:
            assert select.select([self._read_fd], [], [], 120)[0], "the browser says nothing"
            part = os.read(self._read_fd, 1 << 16)
            assert part, "the browser ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browsing(url: str, folder) -> Iterator[Page]:
    """A page of an address; the browser keeps its files in a folder."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Away from 3 and 4, which the browser reads and writes.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
    script = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, PROGRAM, *OPTIONS, f"--user-data-dir={folder}"],
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    for fd in (theirs_in, theirs_out, *high):
        os.close(fd)
    try:
        page = Page(ours_in, ours_out)
        page.open(url)
        yield page
        with contextlib.suppress(AssertionError, OSError):
            page._session = None
            page.call("Browser.close")
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)

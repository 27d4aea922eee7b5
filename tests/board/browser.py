"""Headless Chromium, led over a pair of pipes: `--remote-debugging-pipe` needs no port and no package."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time

from tests.harness import end_tree

PATIENCE_S = 120.0
# A busy machine draws in software; none of these looks anything up on a network.
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--disable-default-apps", "--remote-debugging-pipe"),
]
# The browser reads commands at 3 and writes answers at 4, whatever the pipes are here.
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 100) for each in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium():
    """The program; None where there is none."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in a browser of its own.

    Attributes:
        requests: addresses that the page has asked for.
        problems: what the page's console and its exceptions say.
        received_bytes: over the wire, with headers.
    """

    def __init__(self, profile):
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_3_AND_4, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer, self._session = 0, b"", None
        self.requests, self.problems, self.received_bytes = [], [], 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Ask the browser, and return what it answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def open(self, address):
        """Go to an address; `until` waits for what is there."""
        self.call("Page.navigate", url=address)

    def size(self, width, height, *, dark=False, mobile=False):
        """Set what the page is shown on."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression):
        """What a JavaScript expression is worth in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression):
        """Wait until an expression is true in the page, and return it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            # While a page is being opened there may be none to ask.
            with contextlib.suppress(AssertionError):
                if found := self.value(expression):
                    return found
            assert time.monotonic() < deadline_s, (
                expression,
                self.value("document.body.innerText"),
                self.problems,
            )
            time.sleep(0.05)

    def key(self, key, text=""):
        """Press a key."""
        more = {"text": text} if text else {}
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        number = codes.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            both = {"key": key, "windowsVirtualKeyCode": number, **(more if kind == "keyDown" else {})}
            self.call("Input.dispatchKeyEvent", type=kind, **both)

    def picture(self, path, *, whole=False):
        """Write what is on the screen, or the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """End the browser."""
        end_tree(self._process)
        os.close(self._out)
        os.close(self._in)

    def _next(self, deadline_s):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, values):
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Network.loadingFinished":
            self.received_bytes += values["encodedDataLength"]
        elif method == "Runtime.exceptionThrown":
            self.problems.append(values["exceptionDetails"].get("exception", {}).get("description", values))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append((values["entry"]["text"], values["entry"].get("url")))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.problems.append(str(values["args"]))

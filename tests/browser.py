# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its debugging pipe."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
_FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"

# It reads from descriptor 3 and writes to 4.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for place, fd in zip((3, 4), ends):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """One tab."""

    def __init__(self, reads, writes):
        self._reads, self._writes = reads, writes
        self._ids, self._rest, self._session = itertools.count(1), b"", None
        self.logged: list[str] = []
        """Errors that the page, or the browser about it, wrote."""
        self.requested: list[str] = []
        """Addresses that it loaded, or tried to."""

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._reads, 65536)
                assert more, "the browser has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            found = json.loads(text)
            self._note(found)
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def _note(self, found) -> None:
        params = found.get("params", {})
        if found.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.logged.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        if found.get("method") == "Runtime.exceptionThrown":
            self.logged.append(json.dumps(params["exceptionDetails"]))
        if found.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def run(self, script: str):
        """The value of a piece of JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, (script, self.logged)
            time.sleep(0.02)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Generator[Page]:
    """`folder`: of its profile."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    given = [CHROMIUM, *_FLAGS.split(), f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *given],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = Page(ours_in, ours_out)
    try:
        yield page
    finally:
        process.terminate()
        process.wait(20)
        os.close(ours_in)
        os.close(ours_out)

"""A real browser without a window, driven through a pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60.0


def find_browser() -> str | None:
    """Where there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of Chromium; it speaks the protocol of its developer tools.

    Attributes:
        requests: The addresses that the page has asked for.
        complaints: What it has written to the console, and its errors.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._rest, self._session = 0, b"", None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> Any:
        """Asks for something, and waits for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, file: Path) -> None:
        """Opens a file, and waits until all of it is there."""
        self.call("Page.navigate", url=file.as_uri())
        deadline = time.monotonic() + PATIENCE
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page is not there"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Draws the page into a file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _hear(self, event: Any) -> None:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(facts))
        elif method == "Log.entryAdded":
            self.complaints.append(facts["entry"]["text"])


@contextlib.contextmanager
def browser(binary: str, *options: Sequence[str]) -> Iterator[Browser]:
    """Starts Chromium with a profile of its own, and ends it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            binary,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
            *options,
        ]
        # The pipe of the protocol has the numbers 3 and 4 in the browser.
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *map(str, command)],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            process.kill()
            process.wait()
            os.close(ours_in)
            os.close(ours_out)

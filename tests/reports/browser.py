"""A small client for a headless Chromium over its debugging pipe: no sockets, no packages beside the browser."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = "PACKTRAIN_REQUIRE_BROWSER"
_PATIENCE = 120.0  # seconds for one answer: shared machines are slow at times


def find_browser() -> str | None:
    """The browser on PATH, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser with one page; everything that the page logs, throws or asks for is kept."""

    def __init__(self, binary: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4.
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
        quiet = '--remote-debugging-pipe --host-resolver-rules="MAP * ~NOTFOUND" --disable-background-networking'
        command = f'exec "$0" {flags} {quiet} --user-data-dir="$1" about:blank'
        self._process = subprocess.Popen(
            ["bash", "-c", f"{command} 3<&{theirs_in} 4>&{theirs_out}", binary, self._profile.name],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Load a file in a window of this size, with this preferred colour scheme."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.scheme(scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def scheme(self, name: str, media: str = "") -> None:
        """Prefer light or dark colours; `media` may be print."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """One key, down and up."""
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def problems(self) -> list[str]:
        """Errors and warnings that the page has caused since it was opened."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or (
                method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")
            ):
                found.append(json.dumps(params)[:500])
            if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """What the page has asked for, the file itself and data in it left out."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        urls = [params["request"]["url"] for params in sent if params.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "the browser ended or did not answer"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

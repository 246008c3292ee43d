"""Chromium without a window, driven by its DevTools protocol over a pipe: what a page shows, says and looks like."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 120.0
Message = dict[str, Any]


def missing() -> str:
    """Why no page can be opened here; empty where one can."""
    return "" if _program() else "needs a browser: apt-get install -y chromium"


def _program() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. Use it in `with`.

    errors: what the page wrote to the console as an error, exceptions, and what could not be loaded
    """

    def __init__(self, folder: Path) -> None:
        program = _program()
        assert program is not None, missing()
        self.errors: list[str] = []
        self._numbers, self._buffer = itertools.count(1), b""
        self._replies: dict[int, Message] = {}
        self._events: list[Message] = []
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        self._from_is_ready = select.poll()  # takes descriptors over 1023, too
        self._from_is_ready.register(self._from, select.POLLIN)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium refuses to have one as root
        command = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}", *sandbox]
        command += ["--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        # It reads descriptor 3 and writes descriptor 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._frame: str | None = None  # the session of a frame that has a process of its own
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.close(self._to)  # it ends when its pipe does
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def open(self, url: str) -> None:
        """Returns when the page has loaded. Errors of the page before are forgotten."""
        self._take_events()
        self.errors.clear()
        self._events.clear()
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        self._wait(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events), f"{url} loads")

    def look(self, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """The window, and which colours the reader prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression, as JSON; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, code: str, in_frame: bool = False) -> Any:
        """Until an expression is true; its value."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.run_in_frame(code) if in_frame else self.run(code)):
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:.0f} s: {code}\n{self.errors}"
            self._read(0.2)
        return value

    def run_in_frame(self, code: str) -> Any:
        """The same in the newest frame with an origin of its own, such as a sandboxed one; None: there is none."""
        page, self._session = self._session, self._frame or ""
        try:
            return self.run(code) if self._session else None
        finally:
            self._session = page

    def press(self, key: str, code: int) -> None:
        """A key with its Windows virtual key code: ("Tab", 9), ("Enter", 13)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, file: Path, whole: bool = True) -> None:
        """A PNG of the page; whole: also of what is below the window."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **arguments: Any) -> Message:
        number = next(self._numbers)
        message: Message = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        self._wait(lambda: number in self._replies, method)
        reply = self._replies.pop(number)
        assert "error" not in reply, f"{method}: {reply.get('error')}"
        result: Message = reply["result"]
        return result

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {TIMEOUT_S:.0f} s: {what}"
            self._read(1.0)

    def _take_events(self) -> None:
        while self._read(0.0):
            pass

    def _read(self, timeout_s: float) -> bool:
        """Whether something came."""
        if not self._from_is_ready.poll(1000 * timeout_s):
            return False
        data = os.read(self._from, 1 << 20)
        assert data, f"the browser ended with status {self._process.wait(30)}"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            else:
                self._events.append(message)
                if message["method"] == "Target.attachedToTarget" and self._session:
                    self._frame = message["params"]["sessionId"]
                self.errors += _errors_in(message["method"], message["params"])
        return True


def _errors_in(method: str, about: Message) -> list[str]:
    if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
        return [" ".join(str(one.get("value", one.get("description"))) for one in about["args"])]
    if method == "Runtime.exceptionThrown":
        details = about["exceptionDetails"]
        return [str(details.get("exception", {}).get("description", details["text"]))]
    if method == "Log.entryAdded" and about["entry"]["level"] == "error":
        return [f"{about['entry']['text']} {about['entry'].get('url', '')}"]
    if method == "Network.loadingFailed" and not about.get("canceled"):
        return [f"not loaded: {about['errorText']}"]
    return []

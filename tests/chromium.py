"""Chromium without a window, spoken to through its own protocol: no driver is needed, only `chromium`.

`python tests/chromium.py page.html picture.png 1120 1000` photographs the top of a page, for a document. More words at
the end: `dark`, and `whole` for all of the page.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip


def wait_for(found: Callable[[], Any], otherwise: str) -> Any:
    for _ in range(1200):
        if there := found():
            return there
        time.sleep(0.05)
    raise TimeoutError(f"{otherwise} within a minute")


class Chromium:
    """One page of a browser that this process started. Use it in a `with`."""

    def __init__(self, profile: Path) -> None:
        import websocket

        assert BINARY is not None
        self._process = subprocess.Popen(
            [BINARY, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        told = profile / "DevToolsActivePort"
        port = wait_for(lambda: told.exists() and told.read_text(), "Chromium did not start").splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            place = next(one for one in json.load(answer) if one["type"] == "page")["webSocketDebuggerUrl"]
        self._socket = websocket.create_connection(place, timeout=60)
        self._number, self.events = 0, list[dict[str, Any]]()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(timeout=30)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; events that come meanwhile are kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def run(self, script: str) -> Any:
        """What an expression, or the body of a function that has a `return`, is in the page."""
        text = f"(() => {{ {script} }})()" if "return" in script else script
        answer = self.call("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def show(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this width; what happened before is forgotten."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        media = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")
        self.run("1")
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        there = f"location.href === {json.dumps(page.as_uri())} && document.readyState === 'complete'"
        wait_for(lambda: self.run(there), f"{page} was not shown")

    def click(self, selector: str) -> None:
        """Press what a selector finds first, as a pointer does: it must be there, and be seen."""
        self.hover(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **self._point, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Bring the middle of what a selector finds into view, and the pointer onto it."""
        x, y = self.run(
            f"""const one = document.querySelector({json.dumps(selector)});
            one.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = one.getBoundingClientRect();
            if (!box.width || !box.height) throw new Error("not to be seen");
            return [box.x + box.width / 2, box.y + box.height / 2]"""
        )
        self._point = {"x": x, "y": y}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._point)

    def press(self, selector: str, key: str) -> None:
        """Type a key, such as ArrowRight, into what a selector finds."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        code = {"ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def text(self, selector: str) -> str:
        """What is written there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def seen(self, selector: str) -> bool:
        """Whether there is any such thing to be seen."""
        found = f"document.querySelector({json.dumps(selector)})"
        return bool(self.run(f"Boolean({found}?.checkVisibility() && {found}.getClientRects().length)"))

    def save(self, selector: str, folder: Path) -> Path:
        """The file that a press on something saves."""
        folder.mkdir(exist_ok=True)
        before = set(folder.iterdir())
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.click(selector)

        def new() -> list[Path]:
            return [path for path in set(folder.iterdir()) - before if path.suffix != ".crdownload"]

        return wait_for(new, f"{selector} saved nothing")[0]

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has asked for, itself included."""
        self.run("1")
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Errors and everything else that a page writes into the console."""
        self.run("1")
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event for event in self.events if event["method"] in kinds]

    def photograph(self, file: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        file.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    if not Path(sys.argv[1]).is_file():
        raise SystemExit(f"There is no page {sys.argv[1]}.")
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder)) as browser:
        words = sys.argv[5:]
        browser.show(Path(sys.argv[1]).resolve(), width=int(sys.argv[3]), height=int(sys.argv[4]), dark="dark" in words)
        browser.photograph(Path(sys.argv[2]), whole="whole" in words)

"""What a person in front of the page does: look at a view, read it, press keys, keep a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VIEWS = ["now", "timeline", "incidents", "goodput", "checkpoints", "nodes", "history"]
PATIENCE_MS = 60_000
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-precise-memory-info",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
"""How chromium is started. The last one: no page reaches another machine, whatever it loads."""

# What a canvas shows is known by its pixels: the share that differs from its most frequent colour.
_DRAWN = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = new Map();
  const pixels = new Uint32Array(data.buffer);
  for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  return 1 - Math.max(...counts.values()) / pixels.length;
}"""


class Sight:
    """One window of the browser."""

    def __init__(self, page: Any, pictures: Path) -> None:
        self.page = page
        self.pictures = pictures
        self.errors: list[str] = []
        self.forgiven: tuple[str, ...] = ()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.errors.append(f"{error}"))
        page.on("console", self._said)

    def _said(self, message: Any) -> None:
        text = f"{message.text} ({message.location['url']})"
        if message.type == "error" and not any(word in text for word in self.forgiven):
            self.errors.append(text)

    def leave(self) -> None:
        """Leave the page, before its server ends."""
        self.page.goto("about:blank")

    def forgive(self, *words: str) -> None:
        """Errors that the test is about to cause: those with one of these words in them."""
        self.forgiven += words

    def look(self, url: str, job: str, view: str = "now") -> None:
        """Open a view of a job, and wait until it shows something."""
        self.page.goto("about:blank")
        self.page.goto(f"{url}/job/{job}#{view}")
        self.settled()

    def turn(self, view: str) -> None:
        """Go to another view by its tab."""
        self.page.click(f'nav a[href="#{view}"]')
        self.page.wait_for_selector(f'nav a[href="#{view}"][aria-current]')
        self.settled()

    def settled(self) -> None:
        self.page.wait_for_selector('main[aria-busy="false"]')
        self.page.wait_for_selector("#job-state:not(:empty)")

    def until_drawn(self, selector: str, share: float) -> None:
        """Wait until at least this share of a canvas is not its most frequent colour."""
        self.page.wait_for_function(
            f"([q, share]) => {{ const found = document.querySelector(q);"
            f" return found && ({_DRAWN})(found) > share; }}",
            arg=[selector, share],
        )

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, selector: str, text: str) -> None:
        """Wait until an element has this text in it."""
        self.page.wait_for_function(
            "([q, text]) => document.querySelector(q)?.innerText.includes(text)",
            arg=[selector, text],
        )

    def keep(self, name: str) -> None:
        """A picture of the whole page, to be looked at after the tests."""
        self.page.screenshot(path=self.pictures / f"{name}.png", full_page=True)

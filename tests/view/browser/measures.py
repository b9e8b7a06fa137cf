"""Measures a page in the browser: what a key takes, what is transferred, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAP, LANES = ".picture canvas", ".lanes canvas"
MAP_KEYS = ["ArrowRight"] * 10 + ["ArrowDown"] * 10
LANES_KEYS = ["+"] * 8 + ["ArrowDown"] * 4 + ["-"] * 4 + ["PageDown"] * 4

# From a key to the second frame after it: by then what it changed is on the screen.
_PRESS = """async ([selector, keys]) => {
  const target = document.querySelector(selector), took = [];
  target.focus();
  for (const key of keys) {
    const begin = performance.now();
    target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    took.push(performance.now() - begin);
  }
  return took;
}"""


def first_paint_ms(page: Any) -> float:
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return float(paint)


def pressed_ms(page: Any, selector: str, keys: list[str]) -> list[float]:
    """Time from each key to the screen that shows what it changed, sorted."""
    return sorted(page.evaluate(_PRESS, [selector, keys]))


def transferred(page: Any, *, compressed: bool) -> list[int]:
    """Sizes of all that comes from now on, as it goes over the wire or as the page gets it."""
    session, sizes = page.context.new_cdp_session(page), list[int]()
    session.send("Network.enable")
    size = "encodedDataLength" if compressed else "dataLength"
    session.on("Network.dataReceived", lambda event: sizes.append(event[size]))
    return sizes


def renderer_bytes(browser: Any) -> int:
    """Memory of the page's process, what it shares with others counted in parts (PSS)."""
    session = browser.new_browser_cdp_session()
    sizes = []
    for process in session.send("SystemInfo.getProcessInfo")["processInfo"]:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
            sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    return max(sizes) * 1024

"""The page of a giant in a real browser: 10,000 ranks, about 1,000 incidents, 7 days.

    page.py --home DIR               simulate the giant into DIR unless it is there, then measure
    page.py --home DIR --hours 8     a shorter one

The simulator writes the journal that a coordinator of such a job would write: some 17 million events
and 30 GB, which takes half an hour. Then `holdfast web` and Chromium open it twice: when nobody has
read the journal yet, and when it was read and kept. Each time: the first paint, when map and timeline
are drawn, what was transferred before any zoom (compressed, as it went over the wire), how long a key
takes until what it changed is on the screen, and the memory of the page's process.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

from playwright.sync_api import Page, sync_playwright

JOB = "giant"
LIMIT_MS = 120_000

# From a key to the second frame after it: by then what it changed is on the screen.
PRESS = """async ([selector, keys]) => {
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
DRAWN = """(selector) => {
  const canvas = document.querySelector(selector);
  if (!canvas) return false;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set(new Uint32Array(data.buffer));
  return colours.size > 1;
}"""
MAP, LANES = ".picture canvas", ".lanes canvas"


def simulate(env: dict[str, str], hours: float) -> None:
    command = [sys.executable, "-m", "holdfast", "sim", "--nodes", "1250", "--slots", "8"]
    command += ["--hours", str(hours), "--faults", "heavy", "--fault-rate", "1.8", "--seed", "7"]
    began = time.monotonic()
    subprocess.run([*command, "--check", "never", "--job", JOB], env=env, check=True)
    print(f"simulated {hours:g} h in {time.monotonic() - began:.0f} s")


@contextmanager
def web(env: dict[str, str]) -> Iterator[str]:
    """A real `holdfast web`; the link that it prints."""
    command = [sys.executable, "-m", "holdfast", "web"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert server.stdout is not None
    try:
        found = re.match(r"http://\S+", server.stdout.readline())
        assert found is not None, "holdfast web printed no link"
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def renderer_mb(browser: Any) -> float:
    session = browser.new_browser_cdp_session()
    sizes = []
    for process in session.send("SystemInfo.getProcessInfo")["processInfo"]:
        if process["type"] == "renderer":
            lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
            sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")))
    return max(sizes) / 1e3


def pressed(page: Page, selector: str, keys: list[str]) -> str:
    took = sorted(page.evaluate(PRESS, [selector, keys]))
    return f"{took[len(took) // 2]:.0f} ms (worst {took[-1]:.0f})"


def turn(page: Page, view: str) -> None:
    page.click(f'nav a[href="#{view}"]')
    page.wait_for_selector(f'nav a[href="#{view}"][aria-current]')
    page.wait_for_selector('main[aria-busy="false"]')


def look(browser: Any, link: str, name: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(link)
    page.goto("about:blank")
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    sizes: list[int] = []
    session.on("Network.dataReceived", lambda event: sizes.append(event["encodedDataLength"]))
    page.goto(f"{link.split('/?')[0]}/job/{JOB}#now")
    page.wait_for_function(DRAWN, arg=MAP)
    shown = page.evaluate("performance.now()")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"{name}: first paint {paint:.0f} ms, map drawn {shown:.0f} ms; '{banner(page)}'")
    on_map = pressed(page, MAP, ["ArrowRight"] * 10 + ["ArrowDown"] * 10)
    began = time.monotonic()
    turn(page, "timeline")
    page.wait_for_function(DRAWN, arg=LANES)
    print(f"  timeline drawn {(time.monotonic() - began) * 1e3:.0f} ms after its tab was chosen")
    print(f"  {sum(sizes) / 1e3:.0f} kB transferred by then")
    keys = ["+"] * 8 + ["ArrowDown"] * 4 + ["-"] * 4 + ["PageDown"] * 4
    print(f"  keys: map {on_map}, timeline {pressed(page, LANES, keys)}")
    for view in ("incidents", "goodput", "checkpoints", "nodes", "history", "now"):
        began = time.monotonic()
        turn(page, view)
        print(f"  {view}: {(time.monotonic() - began) * 1e3:.0f} ms", end="")
    print(f"\n  page's process {renderer_mb(browser):.0f} MB")
    began = time.monotonic()
    while "is being read" in banner(page):
        time.sleep(1.0)
    print(f"  all was read {time.monotonic() - began:.0f} s later")
    context.close()


def banner(page: Page) -> str:
    return page.inner_text("#banner") if page.is_visible("#banner") else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--home", type=Path, required=True, help="where the giant is, or is made")
    parser.add_argument("--hours", type=float, default=168.0)
    given = parser.parse_args()
    env = {**os.environ, "HOLDFAST_HOME": str(given.home)}
    home = given.home / "jobs" / JOB
    if not home.exists():
        simulate(env, given.hours)
    (home / "history").unlink(missing_ok=True)
    print(f"journal: {(home / 'journal.db').stat().st_size / 1e9:.1f} GB")
    flags = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
    with sync_playwright() as driver:
        for name in ("never read", "read before"):
            browser = driver.chromium.launch(executable_path=which("chromium"), args=flags)
            with web(env) as link:
                look(browser, link, name)
            browser.close()
    print(f"kept: {(home / 'history').stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

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
import subprocess
import sys
import time
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "view"))

from browser.measures import (
    LANES,
    LANES_KEYS,
    MAP,
    MAP_KEYS,
    first_paint_ms,
    pressed_ms,
    renderer_bytes,
    transferred,
)
from browser.sight import FLAGS, VIEWS, Sight
from e2e.web import Web

JOB = "giant"
LIMIT_MS = 120_000
SEEN = 0.01
"""Share of a canvas that is drawn on once it shows anything."""


def simulate(env: dict[str, str], hours: float) -> None:
    command = [sys.executable, "-m", "holdfast", "sim", "--nodes", "1250", "--slots", "8"]
    command += ["--hours", str(hours), "--faults", "heavy", "--fault-rate", "1.8", "--seed", "7"]
    began = time.monotonic()
    subprocess.run([*command, "--check", "never", "--job", JOB], env=env, check=True)
    print(f"simulated {hours:g} h in {time.monotonic() - began:.0f} s")


def pressed(sight: Sight, selector: str, keys: list[str]) -> str:
    took = pressed_ms(sight.page, selector, keys)
    return f"{median(took):.0f} ms (worst {took[-1]:.0f})"


def look(browser: Any, web: Web, name: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    sight = Sight(page, Path())
    page.set_default_timeout(LIMIT_MS)
    page.goto(web.links[0])
    sight.leave()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    sizes = transferred(page, compressed=True)
    page.goto(f"{web.base}/job/{JOB}#now")
    sight.until_drawn(MAP, SEEN)
    shown = page.evaluate("performance.now()")
    paint = first_paint_ms(page)
    print(f"{name}: first paint {paint:.0f} ms, map drawn {shown:.0f} ms; '{banner(sight)}'")
    on_map = pressed(sight, MAP, MAP_KEYS)
    began = time.monotonic()
    sight.turn("timeline")
    sight.until_drawn(LANES, SEEN)
    print(f"  timeline drawn {(time.monotonic() - began) * 1e3:.0f} ms after its tab was chosen")
    print(f"  {sum(sizes) / 1e3:.0f} kB transferred by then")
    print(f"  keys: map {on_map}, timeline {pressed(sight, LANES, LANES_KEYS)}")
    for view in (*VIEWS[2:], "now"):
        began = time.monotonic()
        sight.turn(view)
        print(f"  {view}: {(time.monotonic() - began) * 1e3:.0f} ms", end="")
    print(f"\n  page's process {renderer_bytes(browser) / 1e6:.0f} MB")
    began = time.monotonic()
    while "is being read" in banner(sight):
        time.sleep(1.0)
    print(f"  all was read {time.monotonic() - began:.0f} s later")
    context.close()


def banner(sight: Sight) -> str:
    return sight.text("#banner") if sight.page.is_visible("#banner") else ""


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
    with sync_playwright() as driver:
        for name in ("never read", "read before"):
            browser = driver.chromium.launch(executable_path=which("chromium"), args=FLAGS)
            with Web(given.home, env) as web:
                look(browser, web, name)
            browser.close()
    if (home / "history").exists():  # A short journal is not worth it.
        print(f"kept: {(home / 'history').stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

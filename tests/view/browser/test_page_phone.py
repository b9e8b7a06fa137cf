"""The page on a phone: every view by finger, and ten thousand ranks on a small screen."""

from __future__ import annotations

from typing import Any

import pytest

from .pretend import PretendServer
from .sight import VIEWS, Sight

pytestmark = pytest.mark.browser

Points = list[tuple[float, float]]


class Fingers:
    """Fingers on the glass, as the browser's own input events."""

    def __init__(self, phone: Sight) -> None:
        self._session = phone.page.context.new_cdp_session(phone.page)

    def drag(self, begin: Points, end: Points, steps: int = 8) -> None:
        """Put fingers down, move them in straight lines, and lift them."""
        self._touch("touchStart", begin)
        for step in range(1, steps + 1):
            share = step / steps
            between = [
                (x + (to_x - x) * share, y + (to_y - y) * share)
                for (x, y), (to_x, to_y) in zip(begin, end, strict=True)
            ]
            self._touch("touchMove", between)
        self._touch("touchEnd", [])

    def _touch(self, kind: str, points: Points) -> None:
        found = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self._session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": found})


def seconds(text: str) -> float:
    """Read a duration as the page writes it."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    words = text.split()
    return sum(float(n) * units[u] for n, u in zip(words[::2], words[1::2], strict=True))


def test_two_fingers_zoom_the_timeline_and_one_moves_it(small: PretendServer, phone: Sight) -> None:
    phone.look(small.url, "small", "timeline")
    phone.until_drawn(".lanes canvas", 0.3)
    box: Any = phone.page.locator(".lanes canvas").bounding_box()
    middle, y, fingers = box["x"] + box["width"] * 0.6, box["y"] + 120, Fingers(phone)

    def span() -> float:
        return seconds(phone.text(".range").split("·")[1].strip())

    def after(begin: Points, end: Points) -> float:
        shown = phone.text(".range")
        fingers.drag(begin, end)
        phone.page.wait_for_function(
            "(before) => document.querySelector('.range').innerText !== before", arg=shown
        )
        return span()

    whole = span()
    near = after([(middle - 20, y), (middle + 20, y)], [(middle - 80, y), (middle + 80, y)])
    assert near == pytest.approx(whole / 4, rel=0.2)
    assert after([(middle, y)], [(middle - 90, y)]) == pytest.approx(near, rel=0.05)
    far = after([(middle - 80, y), (middle + 80, y)], [(middle - 10, y), (middle + 10, y)])
    assert far > near * 3
    assert phone.page.evaluate("visualViewport.scale") == 1, "the page itself is not zoomed"
    phone.keep("phone-timeline")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_ten_thousand_ranks_fits_a_phone(
    giant: PretendServer, phone: Sight, view: str
) -> None:
    phone.look(giant.url, "giant", view)
    assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    phone.keep(f"phone-giant-{view}")


def test_a_map_that_does_not_fit_is_folded_and_a_tap_shows_the_ranks(
    giant: PretendServer, phone: Sight
) -> None:
    phone.look(giant.url, "giant")
    phone.until_drawn(".picture canvas", 0.1)
    phone.until(".readout", "shows the worst of its ranks")
    canvas = phone.page.locator(".picture canvas")
    assert canvas.bounding_box()["height"] < 650
    canvas.tap(position={"x": 60, "y": 60})
    phone.page.wait_for_selector("button.unfolded")
    phone.until(".readout", "Rank ")
    assert canvas.bounding_box()["height"] < 650
    phone.keep("phone-giant-unfolded")
    canvas.tap(position={"x": 60, "y": 40})
    phone.until("dialog", "train.py:88")
    phone.page.keyboard.press("Escape")
    phone.page.tap("button.unfolded")
    phone.until(".readout", "gpu-0150 to gpu-0154")
    phone.page.keyboard.press("ArrowRight")
    phone.until(".readout", "gpu-0155 to gpu-0159: 40 running")
    phone.page.keyboard.press("Enter")
    phone.page.wait_for_selector("button.unfolded")

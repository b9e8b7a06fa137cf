"""Every view shows what the server says, by mouse and by keyboard, and says so when it cannot."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from .pretend import PretendServer
from .sight import VIEWS, Sight

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 1440), ("light", 390)])
def test_every_view_fits_its_window(
    sight: Sight, small: PretendServer, view: str, scheme: str, width: int
) -> None:
    sight.page.emulate_media(color_scheme=scheme)
    sight.page.set_viewport_size({"width": width, "height": 860})
    sight.look(small.url, "small", view)
    sight.page.wait_for_load_state("networkidle") if view == "history" else None
    assert sight.page.evaluate("document.documentElement.scrollWidth") <= width
    sight.keep(f"small-{view}-{scheme}-{width}")


def test_the_figures_are_those_of_the_server(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    assert sight.text('[data-figure="goodput"]') == "97.3 %"
    assert sight.text('[data-figure="ranks"]') == "32"
    assert sight.text('[data-figure="loss"]') == "2.417"
    assert sight.text('[data-figure="lost"]') == "3 m 54 s"


def test_new_figures_come_by_the_stream(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    now = small.jobs["small"].now()
    now["status"]["step"] = 77
    now["status"]["loss"] = now["loss"] = 1.5
    small.tell("now", now)
    sight.until('[data-figure="step"]', "77")
    sight.until('[data-figure="loss"]', "1.5")


def test_the_loss_is_drawn_over_the_steps_that_were_not_taken_again(
    sight: Sight, small: PretendServer
) -> None:
    sight.look(small.url, "small")
    line = sight.page.locator('div:has(> [data-figure="loss"]) .spark path:not(.under)')
    drawn = line.get_attribute("d")
    steps = [float(x) for x in re.findall(r"[ML]([-\d.]+) ", drawn)]
    assert len(steps) == 99, "of 100 steps one has no number"
    assert (steps, steps[0], steps[-1]) == (sorted(steps), 0.0, 100.0)


def test_a_loss_that_is_no_number_is_shown_and_needs_attention(
    sight: Sight, small: PretendServer
) -> None:
    sight.look(small.url, "small")
    assert "loss" not in sight.text(".attention")
    now = small.jobs["small"].now()
    now["status"] |= {"loss": "NaN", "loss_step": 1300}
    small.tell("now", now)
    sight.until('[data-figure="loss"]', "NaN")
    sight.until(".attention", "The loss is NaN at step 1,300.")
    now["status"] |= {"loss": None, "loss_step": None}
    small.tell("now", now)
    sight.until('[data-figure="loss"]', "–")
    sight.until(".figures", "not told by the script")


def test_a_rank_is_opened_by_mouse_and_by_keyboard(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    map_ = sight.page.locator(".picture canvas")
    map_.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        map_.press(key)
    assert "Rank 2 on gpu-0000" in sight.text(".readout")
    map_.press("Enter")
    sight.until("dialog", "train.py:88")
    assert sight.text("dialog h2") == "Rank 2"
    sight.page.keyboard.press("Escape")
    sight.page.wait_for_selector("dialog", state="detached")
    assert sight.page.evaluate("document.activeElement.tagName") == "CANVAS"
    map_.click(position={"x": 60, "y": 40})
    sight.until("dialog", "train.py:88")


def test_an_incident_is_announced_and_opens(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    incident = small.jobs["small"].short(9) | {"id": 10, "line": "rank 3 was killed by SIGSEGV"}
    small.tell("incident", incident)
    sight.until("#announcer", "rank 3 was killed by SIGSEGV")
    sight.until(".brief li:first-child", "rank 3 was killed by SIGSEGV")
    small.jobs["small"].incident_count = 10
    sight.page.click(".brief li:first-child a")
    sight.until("main", "From the fault to the first good step")
    assert "What was done" in sight.text("main")
    assert "The chain of causes" in sight.text("main")
    assert sight.page.locator(".stacks .stack-of").count() >= 2


def test_an_incident_leads_to_those_of_other_jobs_once_they_are_known(
    sight: Sight, small: PretendServer
) -> None:
    job = small.jobs["small"]
    job.elsewhere = None
    sight.look(small.url, "small", "incidents/9")
    sight.until("main", "The chain of causes")
    assert "other jobs" not in sight.text("main")
    job.elsewhere = [{"job": "small", "id": 4, "at": job.fault_at(4)}]
    sight.until("main", "Seen in other jobs: small, incident 4 at ")
    sight.page.click(".elsewhere a")
    sight.until("main h2:not(.sr)", "Incident 4")


def test_a_price_shows_what_lost_time_cost(sight: Sight, small: PretendServer) -> None:
    small.price = {"amount": 100.0, "unit": "EUR"}
    sight.look(small.url, "small")
    sight.until("dl.figures", "all: 208.00 EUR")  # 234 s of 32 ranks.
    sight.turn("goodput")
    sight.until("tfoot", "6,400.00 EUR")  # 2 h of 32 ranks.


def test_the_timeline_zooms_by_wheel_keys_buttons_and_drag(
    sight: Sight, small: PretendServer
) -> None:
    sight.look(small.url, "small", "timeline")
    sight.until_drawn(".lanes canvas", 0.3)
    lanes = sight.page.locator(".lanes canvas")

    def span() -> str:
        return sight.text(".range").split("·")[1].strip()

    def changed(act: Any) -> str:
        before = sight.text(".range")
        act()
        sight.page.wait_for_function(
            "(before) => document.querySelector('.range').innerText !== before", arg=before
        )
        return span()

    assert span() == "2 h 00 m"
    assert changed(lambda: sight.page.click("text='+'")) == "1 h 00 m"
    lanes.focus()
    assert changed(lambda: lanes.press("+")) == "30 m 00 s"
    lanes.hover()
    changed(lambda: sight.page.mouse.wheel(0, -600))
    assert changed(lambda: lanes.press("0")) == "2 h 00 m"
    changed(lambda: sight.page.click("text='Incident ›'"))
    sight.until(".legend", "rendezvous")
    sight.keep("small-timeline-incident")
    box = lanes.bounding_box()
    sight.page.mouse.move(box["x"] + 700, box["y"] + 200)
    sight.page.mouse.down()

    def drag() -> None:
        sight.page.mouse.move(box["x"] + 500, box["y"] + 200, steps=4)

    changed(drag)
    sight.page.mouse.up()
    for _ in range(40):
        lanes.press("+")
    sight.page.wait_for_function(
        "() => document.querySelector('.range').innerText.endsWith('· 1 ms')"
    )


def test_the_timeline_is_read_by_keyboard(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small", "timeline")
    sight.page.click("text='Incident ›'")
    sight.until(".legend", "rendezvous")
    lanes = sight.page.locator(".lanes canvas")
    lanes.focus()
    said = set()
    for _ in range(14):
        lanes.press("ArrowRight")
        said.add(sight.text(".readout").split(": ")[-1].split(" ")[0])
    assert {"detect", "stop", "rendezvous", "restore"} <= said
    lanes.press("ArrowDown")
    assert sight.text(".readout").startswith("rank 1,")


def test_a_lost_viewer_is_said_and_comes_back(sight: Sight, small: PretendServer) -> None:
    sight.forgive("ERR_", "Failed to load")
    sight.look(small.url, "small")
    port, job = small.server_address[1], small.jobs["small"]
    small.stop()
    sight.until("#banner", "The viewer does not answer")
    sight.keep("viewer-gone")
    job.opened_at = time.time() - 10.0
    again = PretendServer(job, port=port).start()
    try:
        sight.page.wait_for_selector("#banner", state="hidden")
        sight.until('[data-figure="wall"]', "s")
    finally:
        again.stop()


def test_a_lost_coordinator_is_said_and_its_return_too(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    small.tell("gone", {})
    sight.until("#banner", "The coordinator is gone")
    small.tell("back", {})
    sight.page.wait_for_selector("#banner", state="hidden")


def test_a_lost_network_is_said(sight: Sight, small: PretendServer) -> None:
    sight.forgive("ERR_", "Failed to load")
    sight.look(small.url, "small")
    sight.page.context.set_offline(True)
    sight.until("#banner", "no network")
    sight.page.context.set_offline(False)
    sight.page.wait_for_selector("#banner", state="hidden")


def test_a_browser_without_the_token_is_told_where_to_get_it(
    sight: Sight, small: PretendServer
) -> None:
    sight.forgive("401")
    small.locked_out = True
    sight.page.goto(f"{small.url}/job/small")
    sight.until("#banner", "Open the address that `holdfast web` printed")


def test_actions_are_shown_only_if_allowed(sight: Sight, small: PretendServer) -> None:
    small.jobs["small"].actions = []
    sight.look(small.url, "small")
    assert sight.page.locator("#actions select").count() == 0


def test_an_action_is_confirmed_by_the_jobs_name(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    sight.page.select_option("#actions select", "fault")
    go = sight.page.locator("dialog button[type=submit]")
    sight.page.fill("dialog input[type=number]", "3")
    sight.page.fill("dialog input[aria-label^=Type]", "smal")
    assert go.is_disabled()
    sight.page.fill("dialog input[aria-label^=Type]", "small")
    sight.keep("action-dialog")
    go.click()
    sight.until("dialog", "asked for")
    assert small.acted == [("fault", {"fault": "kill", "rank": 3, "confirm": "small"})]


def test_what_a_job_says_never_becomes_part_of_the_page(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small")
    evil = small.jobs["small"].short(9)
    evil["line"] = "<img src=x onerror=alert(1)><b id=evil>bold</b>"
    small.tell("incident", evil | {"id": 99})
    sight.until(".brief li:first-child", "<b id=evil>")
    assert sight.page.locator("#evil").count() == 0


def test_the_list_of_jobs_leads_to_each(sight: Sight, small: PretendServer) -> None:
    sight.page.goto(small.url)
    sight.page.click("text=small")
    sight.settled()
    assert sight.text("#job-name") == "small"

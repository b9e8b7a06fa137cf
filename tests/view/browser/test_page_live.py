"""The page beside a real job and a real `holdfast web`: ranks are killed, and it says so at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import PATIENCE_S, Run
from e2e.web import Web

from .sight import VIEWS, Sight
from .viewer import enter, further

pytest.importorskip("starlette", reason="holdfast[web] is not installed")
pytest.importorskip("uvicorn", reason="holdfast[web] is not installed")
pytestmark = pytest.mark.browser


@pytest.fixture
def web(trained: Run, sight: Sight) -> Iterator[Web]:
    web = Web(trained.folder, trained.env, "--allow-actions", "--price-per-hour", "2.10 EUR")
    yield web
    sight.leave()
    web.close()


def test_a_kill_is_told_at_once_and_every_view_has_it(sight: Sight, web: Web, trained: Run) -> None:
    enter(sight, web, trained.job)
    further(sight)
    trained.until_standbys(1)
    trained.kill_rank(1)
    sight.until("#announcer", "rank 1 killed by SIGKILL")
    sight.until(".brief", "rank 1 killed by SIGKILL")
    trained.until_stepping(round=2)
    further(sight)
    sight.until(".legend", "2\nrunning")
    sight.until(".figures", "Loss\n0.")
    sight.page.wait_for_selector('div:has(> [data-figure="loss"]) .spark')
    sight.keep("live-now")

    sight.turn("timeline")
    sight.until_drawn(".lanes canvas", 0.2)
    sight.page.click("text='Incident ›'")
    sight.until(".readout", "Incident 1")
    sight.until(".legend", "start")
    sight.keep("live-timeline")

    sight.turn("incidents")
    sight.until("main", "From the fault to the first good step")
    told = sight.text("main")
    assert "WorkerExited" in told
    assert "gave the ranks to standbys" in told or "standby" in told
    sight.keep("live-incident")

    sight.turn("goodput")
    sight.until("main", "torchrun would have lost")
    shares = sight.page.locator("tbody td:nth-child(4)").all_inner_texts()
    assert abs(sum(float(share.rstrip(" %")) for share in shares) - 100) < 0.2
    sight.keep("live-goodput")

    sight.turn("checkpoints")
    assert re.search(r"Step [\d,]+, from (memory|storage)", sight.text("main"))
    sight.keep("live-checkpoints")
    sight.turn("nodes")
    assert sight.page.locator("tbody tr").count() == 1
    sight.keep("live-nodes")
    sight.turn("history")
    assert trained.job in sight.text("main")


def test_every_view_of_a_live_job_fits_any_window(sight: Sight, web: Web, trained: Run) -> None:
    """A rank was killed and one was stopped; the job goes on meanwhile."""
    trained.until_standbys(1)
    trained.kill_rank(1)
    trained.until_stepping(round=2)
    trained.until_standbys(1)
    trained.kill_rank(0, signal.SIGSTOP)
    trained.until_stepping(round=3)
    enter(sight, web, trained.job)
    further(sight, 100)
    for scheme, width in (("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)):
        sight.page.emulate_media(color_scheme=scheme)
        sight.page.set_viewport_size({"width": width, "height": 860})
        for view in VIEWS:
            sight.turn(view)
            assert sight.page.evaluate("document.documentElement.scrollWidth") <= width
            assert "undefined" not in sight.text("main")
            assert "NaN" not in sight.text("main")
            if view == "timeline":
                sight.until_drawn(".lanes canvas", 0.2)
            sight.keep(f"kills-{view}-{scheme}-{width}")


def test_a_stopped_rank_is_shown_with_the_stacks_of_all(
    sight: Sight, web: Web, trained: Run
) -> None:
    enter(sight, web, trained.job)
    trained.until_standbys(1)
    trained.kill_rank(1, signal.SIGSTOP)
    sight.until("#announcer", "rank 1")
    trained.until_stepping(round=2)
    sight.turn("incidents")
    sight.until("main", "Stacks at that time")
    assert sight.page.locator(".stacks .stack-of").count() >= 2
    assert "train.py" in sight.text(".stacks")
    sight.keep("live-hang")


def test_a_ranks_stack_and_log_are_shown_while_it_trains(
    sight: Sight, web: Web, trained: Run
) -> None:
    enter(sight, web, trained.job)
    sight.page.locator(".picture canvas").focus()
    sight.page.keyboard.press("Enter")
    sight.until("dialog", "train.py")
    sight.until("dialog", "step ")
    sight.keep("live-rank")


def test_a_fault_is_injected_from_the_page(sight: Sight, web: Web, trained: Run) -> None:
    enter(sight, web, trained.job)
    sight.page.select_option("#actions select", "fault")
    sight.page.fill("dialog input[type=number]", "1")
    sight.page.fill("dialog input[aria-label^=Type]", trained.job)
    sight.page.click("dialog button[type=submit]")
    sight.page.wait_for_selector("dialog .note.is-good")
    sight.until("#announcer", "rank 1")
    trained.until_stepping(round=2)


def test_a_lost_coordinator_does_not_end_the_page(sight: Sight, web: Web, trained: Run) -> None:
    enter(sight, web, trained.job)
    further(sight)
    trained.kill(trained.coordinator())
    further(sight, 50)
    sight.page.wait_for_selector("#banner", state="hidden")


def test_the_page_of_one_job_needs_no_list(sight: Sight, web: Web, trained: Run) -> None:
    alone = Web(trained.folder, trained.env, trained.job)
    try:
        sight.page.goto(alone.links[0])
        sight.until("#job-name", trained.job)
        further(sight)
        sight.leave()
    finally:
        alone.close()


def test_the_job_goes_on_when_the_viewer_is_killed_and_the_page_says_so(
    sight: Sight, web: Web, trained: Run
) -> None:
    enter(sight, web, trained.job)
    sight.forgive("ERR_", "Failed to load")
    web.process.kill()
    sight.until("#banner", "The viewer does not answer")
    reached = trained.ask("status")["step"]
    trained.until(lambda job: trained.ask("status")["step"] > reached, "a later step")


def test_every_view_shows_a_finished_job(sight: Sight, web: Web, trained: Run) -> None:
    trained.kill_rank(0)
    trained.until_stepping(round=2)
    enter(sight, web, trained.job)
    trained.end()
    assert trained.code() == 0
    sight.until("#job-state", "finished")
    for view in VIEWS:
        sight.turn(view)
        assert "undefined" not in sight.text("main")
        assert "NaN" not in sight.text("main")
        if view == "now":
            sight.until_drawn(".picture canvas", 0.01)
        sight.keep(f"finished-{view}")
    assert sight.page.is_hidden("#banner")
    assert sight.page.locator("#actions select").count() == 0
    sight.turn("now")
    sight.page.locator(".picture canvas").focus()
    sight.forgive("503", "404", "Failed to load")
    sight.page.keyboard.press("Enter")
    sight.page.wait_for_selector("dialog .note.is-warn")


# ---- who may come in ----


def asked(url: str, **headers: str) -> int:
    """Status of a GET that a program sends."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_wrong_token_shows_nothing(sight: Sight, web: Web, trained: Run) -> None:
    sight.forgive("401", "403", "Failed to load")
    sight.page.goto(f"{web.base}/job/{trained.job}?token=guessed")
    assert trained.job not in sight.page.content()
    sight.page.goto(f"{web.base}/job/{trained.job}")
    assert asked(f"{web.base}/api/jobs") in (401, 403)


def test_another_host_name_is_refused(web: Web, trained: Run) -> None:
    port = web.base.rsplit(":", 1)[1]
    token = web.links[0].split("token=")[1]
    bearer = {"Authorization": f"Bearer {token}"}
    assert asked(f"{web.base}/api/jobs", **bearer) == 200
    assert asked(f"{web.base}/api/jobs", Host=f"evil.example:{port}", **bearer) in (400, 403, 421)


def test_another_website_can_neither_read_nor_act(
    sight: Sight, web: Web, trained: Run, tmp_path: Path
) -> None:
    enter(sight, web, trained.job)
    sight.forgive("CORS", "Failed to load", "403", "Cross-Origin", "ERR_", "Content Security")
    with other_site(tmp_path) as elsewhere:
        sight.page.goto(elsewhere)
        for method, what in (("GET", "now"), ("POST", "actions/stop")):
            said = sight.page.evaluate(
                """async ([url, method]) => {
                  try {
                    const answer = await fetch(url, { method, credentials: "include", mode: "cors",
                      headers: method === "POST" ? { "X-Holdfast": "1" } : {} });
                    return `read ${answer.status}`;
                  } catch { return "refused"; }
                }""",
                [f"{web.base}/api/jobs/{trained.job}/{what}", method],
            )
            assert said == "refused"
    assert trained.ask("status")["state"] == "running"


def test_a_link_for_looking_has_no_actions(sight: Sight, web: Web, trained: Run) -> None:
    sight.page.goto(web.links[1])
    sight.page.wait_for_url(f"{web.base}/")
    sight.look(web.base, trained.job)
    further(sight)
    assert sight.page.locator("#actions select").count() == 0
    status = sight.page.evaluate(
        """async ([url, confirm]) => (await fetch(url, { method: "POST", credentials: "same-origin",
          headers: { "X-Holdfast": "1", "Content-Type": "application/json" },
          body: JSON.stringify({ confirm }) })).status""",
        [f"{web.base}/api/jobs/{trained.job}/actions/stop", trained.job],
    )
    sight.forgive("403")
    sight.errors = [error for error in sight.errors if "403" not in error]
    assert status == 403


@contextlib.contextmanager
def other_site(folder: Path) -> Iterator[str]:
    """A website of somebody else: another origin on this machine."""
    site = folder / "site"
    site.mkdir()
    (site / "index.html").write_text("<!doctype html><title>elsewhere</title>")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"],
        cwd=site,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = re.search(r"port (\d+)", process.stdout.readline())
        assert port is not None
        yield f"http://localhost:{port[1]}/"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        process.stdout.close()

"""An open page says what is gone, and comes back by itself, without a click and without a new link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import Run
from e2e.web import Web

from .sight import Sight
from .viewer import enter, further
from .wire import Wire

pytest.importorskip("starlette", reason="holdfast[web] is not installed")
pytest.importorskip("uvicorn", reason="holdfast[web] is not installed")
pytestmark = pytest.mark.browser

WATCH = """() => {
  const banner = document.getElementById("banner");
  window.banners = [];
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) for (const node of addedNodes) banners.push(node.textContent);
  }).observe(banner, { childList: true });
}"""


@pytest.fixture
def trained(tmp_path: Path, sight: Sight) -> Iterator[Run]:
    """A job of two ranks that trains; the page has left it before it ends."""
    run = Run(tmp_path)
    run.train()
    run.until_stepping()
    yield run
    sight.leave()
    run.close()


def is_live(sight: Sight) -> None:
    """Nothing is amiss any more, and what the page shows moves on."""
    sight.page.wait_for_selector("#banner", state="hidden")
    sight.until("#link", "live")
    further(sight, 20)


def test_a_page_comes_back_when_its_viewer_was_killed_and_is_started_again(
    sight: Sight, trained: Run
) -> None:
    with Web(trained.folder, trained.env) as web:
        enter(sight, web, trained.job)
        further(sight)
        sight.forgive("ERR_", "Failed to load")
    sight.until("#banner", "The viewer does not answer")
    sight.keep("back-viewer-gone")
    with Web(trained.folder, trained.env) as again:
        assert again.links == web.links
        is_live(sight)
        sight.turn("goodput")
        sight.until("main", "In total")
        sight.leave()


def test_the_list_of_jobs_comes_back_too(sight: Sight, trained: Run) -> None:
    with Web(trained.folder, trained.env) as web:
        sight.page.goto(web.links[0])
        sight.until("#jobs", trained.job)
        sight.forgive("ERR_", "Failed to load")
    sight.until("#banner", "The viewer does not answer")
    with Web(trained.folder, trained.env):
        sight.page.wait_for_selector("#banner", state="hidden")
        sight.leave()


def test_a_page_is_shut_out_when_new_tokens_were_made(sight: Sight, trained: Run) -> None:
    with Web(trained.folder, trained.env) as web:
        enter(sight, web, trained.job)
        sight.forgive("401", "Failed to load", "ERR_")
        with Web(trained.folder, trained.env, "--new-tokens") as other:
            assert other.links != web.links
        sight.until("#banner", "The viewer does not know this browser")
        sight.page.goto(other.links[0].replace(other.base, web.base))
        sight.page.wait_for_url(f"{web.base}/")
        sight.look(web.base, trained.job)
        is_live(sight)
        sight.leave()


def test_a_page_says_that_the_coordinator_is_gone_and_goes_on_when_it_is_back(
    sight: Sight, trained: Run
) -> None:
    with Web(trained.folder, trained.env) as web:
        enter(sight, web, trained.job)
        further(sight)
        sight.page.evaluate(WATCH)
        trained.kill(trained.coordinator())
        sight.page.wait_for_function(
            "() => banners.some((each) => each.includes('The coordinator is gone'))"
        )
        is_live(sight)
        sight.leave()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_page_notices_a_cut_network_and_comes_back(
    sight: Sight, trained: Run, forgets: bool
) -> None:
    """No side is told of the cut: only silence shows it."""
    with Web(trained.folder, trained.env, "--host-name", "localhost") as web:
        wire = Wire(int(web.base.rpartition(":")[2]))
        try:
            near = f"http://localhost:{wire.port}"
            sight.page.goto(f"{near}/?token={web.token}")
            sight.page.wait_for_url(f"{near}/")
            sight.look(near, trained.job)
            further(sight)
            sight.forgive("ERR_", "Failed to load")
            wire.cut()
            sight.until("#banner", "The viewer does not answer")
            wire.mend(forgets=forgets)
            is_live(sight)
            sight.leave()
        finally:
            wire.close()

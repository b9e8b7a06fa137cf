"""Everybody can use the page: names, roles, order of focus and contrast, in every view, light and dark.

The rules are our own (`rules.js`), and axe-core's where `make test-browser` has put it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pretend import PretendServer
from .sight import VIEWS, Sight

pytestmark = pytest.mark.browser

RULES = (Path(__file__).parent / "rules.js").read_text()
AXE = Path(__file__).parents[3] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.mark.parametrize("view", [*VIEWS, "incidents/4"])
def test_everything_has_a_name_and_a_place(sight: Sight, small: PretendServer, view: str) -> None:
    sight.look(small.url, "small", view)
    sight.page.evaluate(RULES)
    for details in sight.page.locator("details:not([open]) > summary").all():
        details.click()
    assert sight.page.evaluate("rules.names()") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, "incidents/4"])
def test_every_text_stands_out(sight: Sight, small: PretendServer, view: str, scheme: str) -> None:
    sight.page.emulate_media(color_scheme=scheme)
    sight.look(small.url, "small", view)
    sight.page.evaluate(RULES)
    assert sight.page.evaluate("rules.contrast()") == []


@pytest.mark.parametrize("view", VIEWS)
def test_the_tab_key_reaches_everything_in_order_and_shows_where(
    sight: Sight, small: PretendServer, view: str
) -> None:
    sight.look(small.url, "small", view)
    sight.page.evaluate(RULES)
    sight.page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        sight.page.keyboard.press("Tab")
        at = sight.page.evaluate("rules.focused()")
        if at["tag"] == "BODY":
            break
        reached.append(at)
    assert reached[0]["href"] == "#main"
    assert [at for at in reached if not at["shown"]] == []
    inside = [at["inside"] for at in reached]
    assert inside == sorted(inside)
    tabs = [at["href"] for at in reached if str(at["href"]).startswith("#")]
    assert tabs[1 : 1 + len(VIEWS)] == [f"#{each}" for each in VIEWS]


def test_the_skip_link_leads_to_the_view(sight: Sight, small: PretendServer) -> None:
    sight.look(small.url, "small", "goodput")
    sight.page.keyboard.press("Tab")
    sight.page.keyboard.press("Enter")
    assert sight.page.evaluate("document.activeElement.id") == "main"
    assert sight.page.locator('nav a[aria-current="page"]').inner_text() == "Goodput"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS, "incidents/4"])
def test_axe_finds_nothing(sight: Sight, small: PretendServer, view: str, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not there; `make test-browser` puts it into .browser")
    sight.page.emulate_media(color_scheme=scheme)
    sight.look(small.url, "small", view)
    sight.page.evaluate(AXE.read_text())
    answer = sight.page.evaluate("axe.run({ resultTypes: ['violations'] })")
    found = [(each["id"], each["help"], each["nodes"][0]["html"]) for each in answer["violations"]]
    assert found == []

"""Looks at a job through a real `holdfast web`."""

from __future__ import annotations

from e2e.web import Web

from .sight import Sight


def enter(sight: Sight, web: Web, job: str, view: str = "now") -> None:
    """Log in with the first link, then look at the job."""
    sight.page.goto(web.links[0])
    sight.page.wait_for_url(f"{web.base}/")
    sight.look(web.base, job, view)


def step_shown(sight: Sight) -> int:
    return int(sight.text('[data-figure="step"]').replace(",", "").replace("–", "0"))


def further(sight: Sight, steps: int = 1) -> None:
    """Wait until the page shows a step that is later than the one it shows now by so many."""
    sight.page.wait_for_function(
        "(wanted) => Number(document.querySelector('[data-figure=step]').innerText"
        ".replace(/,/g, '')) >= wanted",
        arg=step_shown(sight) + steps,
    )

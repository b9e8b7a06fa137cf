"""Starts a real `holdfast web`, looks at a job through it, and ends it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from e2e.harness import PATIENCE_S, Run, wait_for

from .sight import Sight


class Web:
    """One `holdfast web`, of the home that its environment names."""

    def __init__(self, folder: Path, env: Mapping[str, str], *flags: str) -> None:
        self.said = folder / f"web-{len(list(folder.glob('web-*')))}.out"
        command = [sys.executable, "-m", "holdfast", "web", *flags]
        with open(self.said, "wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
            )
        self.links = wait_for(self._links, "the links of holdfast web")
        self.base = self.links[0].split("/?")[0]

    def _links(self) -> list[str]:
        assert self.process.poll() is None, self.said.read_text()
        found = re.findall(r"http://\S+[?&](?:token|view)=\S+", self.said.read_text())
        return found if len(found) == 2 else []

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def enter(sight: Sight, web: Web, run: Run, view: str = "now") -> None:
    """Log in with the first link, then look at the job."""
    sight.page.goto(web.links[0])
    sight.page.wait_for_url(f"{web.base}/")
    sight.look(web.base, run.job, view)


def step_shown(sight: Sight) -> int:
    return int(sight.text('[data-figure="step"]').replace(",", "").replace("–", "0"))


def further(sight: Sight, steps: int = 1) -> None:
    """Wait until the page shows a step that is later than the one it shows now by so many."""
    sight.page.wait_for_function(
        "(wanted) => Number(document.querySelector('[data-figure=step]').innerText"
        ".replace(/,/g, '')) >= wanted",
        arg=step_shown(sight) + steps,
    )

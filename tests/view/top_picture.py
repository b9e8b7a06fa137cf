"""Draws docs/pictures/top.svg: `holdfast top` of a simulated job, with what `frame` draws now.

python tests/view/top_picture.py     # draws it anew, after `holdfast top` has changed
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
from pathlib import Path

from journals import events_of, home_with, latest
from msgspec.structs import replace
from rich.console import Console

from holdfast.config.values import Price
from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.messages.events import JobOpened
from holdfast.messages.units import Time
from holdfast.sim.cluster import SimSettings
from holdfast.view.follower import Follower, JournalFile
from holdfast.view.rankmap import ranks
from holdfast.view.top.frame import frame
from holdfast.view.top.state import JobNow, Looks, look_at

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "top.svg"
WIDTH, HEIGHT = 110, 20


class Paused(Follower):
    """A job that runs, at the moment of its newest event."""

    @property
    def alive(self) -> bool:
        return True

    @property
    def now(self) -> Time:
        return self.known_until


def entries() -> tuple[Entry, ...]:
    """Two hours of a job of 32 ranks, up to a moment in which some of them save."""
    events = events_of(
        SimSettings(
            seed=11,
            nodes=4,
            spares=1,
            min_nodes=3,
            hours=2.2,
            slots=8,
            faults="heavy",
            fault_rate=100.0,
            check="never",
            step_s=0.6,
            save_every=100,
            checkpoints=True,
            light=True,
        )
    )
    opened = events[0].event
    assert isinstance(opened, JobOpened)
    named = replace(events[0], event=replace(opened, job="llm"))
    return latest((named, *events[1:]), _saves)[0]


def _saves(job: Job) -> bool | None:
    loss = job.loss
    return True if loss is not None and loss.value != "NaN" and "c" in ranks(job) else None


def drawn(view: JobNow) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor"
    )
    for line in frame(view, Looks(), WIDTH, HEIGHT):
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="holdfast top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # Of another site.


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOLDFAST_HOME"] = home
        follower = Paused(JournalFile(home_with(entries(), "llm")))
        follower.catch_up()
        PICTURE.write_text(drawn(look_at(follower, Price(2.1, "EUR"))))
        follower.close()


if __name__ == "__main__":
    main()

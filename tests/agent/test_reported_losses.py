"""What a worker's page says of its loss is reported with its steps."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.agent.timings import StepTimings
from holdfast.agent.worker import Worker
from holdfast.agent.worker_monitor import Reporter
from holdfast.clock import JobClock
from holdfast.messages.events import AnyEvent, Progress
from holdfast.messages.losses import Loss
from holdfast.messages.units import NodeId, Rank, RoundNumber
from holdfast.shm.rank_page import RankPage, create_page


class Scene:
    """A worker whose page the test writes, and its agent's reporter."""

    def __init__(self, tmp_path: Path) -> None:
        fd = create_page()
        self.page = RankPage(fd)
        os.close(fd)
        nothing: Any = None
        runtime: Any = SimpleNamespace(page=self.page, function=None)
        files = {"error_file": tmp_path / "error.json", "flight": tmp_path / "flight"}
        self.worker = Worker(RoundNumber(1), Rank(0), nothing, runtime, nothing, **files)
        self.reports: list[AnyEvent] = []
        self.reporter = Reporter(
            node=NodeId("n"),
            clock=JobClock(),
            report=self.reports.append,
            after_seals=lambda rank, well, act: act(),
            timings=StepTimings(nothing),
        )

    def look(self, step: int, steps: int, loss: float = 0.0, loss_steps: int = 0) -> None:
        """Write the page, and let the reporter look at it."""
        self.page.write(step, steps, 1.0, 2.0, 0.0, 0.0, loss=loss, loss_steps=loss_steps)
        self.reporter.progressed([self.worker])

    @property
    def told(self) -> list[tuple[int, Loss | None, int]]:
        """Step, loss and its age in each report."""
        pages = [one for e in self.reports if isinstance(e, Progress) for one in e.ranks]
        return [(page.step, page.loss, page.loss_age) for page in pages]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.page.close()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The reporter asks the event loop for the time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@in_loop
async def test_a_loss_goes_with_the_steps_and_says_how_old_it_is(scene: Scene) -> None:
    scene.look(11, 1)
    scene.look(14, 4, 0.5, 4)
    scene.look(19, 9, 0.5, 4)
    scene.look(20, 10, math.nan, 10)
    assert scene.told == [(11, None, 0), (14, 0.5, 0), (19, 0.5, 5), (20, "NaN", 0)]


@in_loop
async def test_a_loss_that_is_told_after_its_step_was_reported_is_reported_once(
    scene: Scene,
) -> None:
    """Else the loss of the last step before a long evaluation would be seen after that."""
    scene.look(11, 1)
    scene.look(11, 1, 0.5, 1)
    scene.look(11, 1, 0.5, 1)
    assert scene.told == [(11, None, 0), (11, 0.5, 0)]

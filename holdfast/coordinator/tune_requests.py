"""Answers users who asked for other loader settings, once all ranks of the job have changed.

A change takes effect some steps ahead. If that takes long, the answer says what it waits for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from msgspec import Struct

from holdfast.core.job import Job
from holdfast.core.tuning import wording
from holdfast.core.tuning.state import Tunings
from holdfast.messages.tuning import TuningChange
from holdfast.messages.wire import TuneTaken

LIMIT_S = 8.0


class TuneRequest(Struct, eq=False):
    """A request that waits for an answer."""

    dataset: str
    tell: Callable[[TuneTaken], None]
    timer: asyncio.TimerHandle


class TuneRequests:
    """The requests that wait for an answer, by their number."""

    def __init__(self, job: Callable[[], Job | None]) -> None:
        self._job = job
        self._waiting: dict[int, TuneRequest] = {}

    def add(self, dataset: str, tell: Callable[[TuneTaken], None]) -> int:
        """Answer a request later; return its number, which no other request of the job has had."""
        visit = secrets.randbits(53) | 1
        timer = asyncio.get_running_loop().call_later(LIMIT_S, self.answer, visit)
        self._waiting[visit] = TuneRequest(dataset, tell, timer)
        return visit

    def answer(self, late: int | None = None) -> None:
        """Answer the requests whose outcome is known, and the one whose time is up."""
        for visit, request in list(self._waiting.items()):
            job = self._job()
            assert job is not None
            loader = job.of(Tunings).loaders[request.dataset]
            change = next((one for one in loader.changes if one.visit == visit), None)
            if change is None and visit != late and job.result is None:
                continue
            request.timer.cancel()
            del self._waiting[visit]
            name = request.dataset
            under_way = wording.pending(loader, job) or "the job has changed"
            line = f"{name}: {under_way if change is None else _line(change)}"
            request.tell(TuneTaken(dataset=name, change=change, line=line))


def _line(change: TuningChange) -> str:
    what = f"{change.config}: {change.outcome}"
    if change.step is not None:
        where = f"the loader's step {change.step} of round {change.round}"
        what += f" as version {change.version} on all ranks from {where}"
    return f"{what} ({change.why})" if change.why else what

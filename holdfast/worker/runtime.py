"""The small part of Holdfast that lives on in a worker while the user's script runs.

It notes each finished step in the progress page and tells the agent of the first one. Whoever counts
steps, the optimizer hook or the user's own `holdfast.progress`, ends up in `Runtime.stepped`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.messages.local import Stepped
from holdfast.page import ProgressPage
from holdfast.vitals import BETWEEN, MOST_SECTIONS, PHASES, STEP
from holdfast.worker.channel import Channel
from holdfast.worker.requests import Requests

if TYPE_CHECKING:
    from holdfast.worker.torchstore import CoordinatorStore


class Runtime:
    def __init__(
        self, channel: Channel, page: ProgressPage, round: int = 0, images: str = ""
    ) -> None:
        self.channel = channel
        self.round = round
        self.images = images
        self.requests = Requests(channel)
        self.store: CoordinatorStore | None = None
        """Made when first asked for; torch needs somebody to hold it."""
        self._page = page
        self.vitals = page.vitals
        self._sections: dict[str, int] = {}
        self._naming = threading.Lock()
        self._steps = 0
        self._step = 0
        self._first_at = 0.0
        self._last_at = 0.0
        self._aside = {"checkpoint": 0.0, "restore": 0.0}
        self._own_count = False
        self._before = 0
        """The step that this process went on from."""
        self._saves = 0
        self._resumed: int | None = None
        """Where a checkpointer says that training went on."""

    def hook_stepped(self, resumed_from: int) -> None:
        """The optimizer hook saw a step; it counts unless the script counts for itself."""
        if not self._own_count:
            if self._steps == 0:
                base = resumed_from if self._resumed is None else self._resumed
                self._step = self._before = base
            self._note(self._step + 1)

    def resumed(self, step: int) -> None:
        """Training goes on from that step, whatever the optimizer's own count says."""
        if self._steps == 0:
            self._resumed = step

    def stepped(self, step: int) -> None:
        """The script says that this step is finished."""
        if not self._own_count:
            self._own_count = True
            self._before = step - max(1, self._steps)
        self._note(step)

    def _note(self, step: int) -> None:
        now = time.monotonic()
        first = self._steps == 0
        if not first:
            self.vitals.took(STEP, now - self._last_at)
        self._step = step
        self._steps = max(1, step - self._before)
        self._last_at = now
        if first:
            self._first_at = now
        self._publish()
        if first:
            self.channel.send(Stepped())

    def heartbeat(self) -> None:
        """The script says that it is well."""
        self.vitals.mark(BETWEEN, time.monotonic())

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A stretch of the script with a deadline of its own. Time in one that is called checkpoint
        or restore is spent on something else than training."""
        index = self._section(name)
        began = time.monotonic()
        place = self.vitals.enter(index, began) if index >= 0 else -1
        try:
            yield
        finally:
            now = time.monotonic()
            if index >= 0:
                self.vitals.took(len(PHASES) + index, now - began)
            self.vitals.leave(place)
            self.vitals.mark(BETWEEN, now)
            if name in self._aside:
                self._aside[name] += now - began
                self._saves += name == "checkpoint"
                self._publish()

    def _section(self, name: str) -> int:
        """The number of a section's name; -1 when there are too many."""
        with self._naming:
            index = self._sections.get(name)
            if index is None:
                index = len(self._sections)
                if index == MOST_SECTIONS:
                    return -1
                self._sections[name] = index
                self.vitals.name_section(index, name)
            return index

    def _publish(self) -> None:
        self._page.write(
            self._step,
            self._steps,
            self._first_at,
            self._last_at,
            self._aside["checkpoint"],
            self._aside["restore"],
            self._saves,
        )


class _Slot:
    """Where the process's runtime is kept: the API has no other way to find it."""

    runtime: Runtime | None = None


def install(runtime: Runtime) -> None:
    _Slot.runtime = runtime


def current() -> Runtime | None:
    """This process's runtime; None outside `holdfast run`."""
    return _Slot.runtime

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
from holdfast.shm.rank_page import RankPage
from holdfast.shm.vital_signs import BETWEEN, MOST_SECTIONS, PHASES, WARM_UP_DEVICE
from holdfast.worker.channel import Channel
from holdfast.worker.heartbeat import uses_device
from holdfast.worker.requests import Requests

if TYPE_CHECKING:
    from holdfast.worker.injected_faults import Traps
    from holdfast.worker.torch_store import CoordinatorStore


class Runtime:
    def __init__(self, channel: Channel, page: RankPage, round: int = 0, images: str = "") -> None:
        self.channel = channel
        self.round = round
        self.images = images
        self.requests = Requests(channel)
        self.store: CoordinatorStore | None = None
        """Made when first asked for; torch needs somebody to hold it."""
        self.copies: dict[str, list[threading.Event]] = {}
        """What each checkpointer is copying; of two with one name, the one that was made last."""
        self._page = page
        self.vitals = page.vitals
        self._sections: dict[str, int] = {}
        self._entering = threading.Lock()
        self._inside: set[tuple[int, str]] = set()
        """Who is in which section: one within another of the same name is booked once."""
        self._marks = 0
        """How many marks there were at the last step that the script told of."""
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
        self.traps: Traps | None = None
        """Faults to inject."""

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
            self._step = step - 1
        if self.vitals.marks == self._marks:  # No hook of ours sees it train.
            self.vitals.mark(BETWEEN, time.monotonic())
        self._marks = self.vitals.marks
        self._note(step)

    def _note(self, step: int) -> None:
        now = time.monotonic()
        first = self._steps == 0
        self.vitals.stepped(now, None if first else now - self._last_at)
        before, self._step = self._step, step
        self._steps = max(1, step - self._before)
        self._last_at = now
        if first:
            self._first_at = now
            if uses_device():
                self.vitals.warm_up = WARM_UP_DEVICE
        self._publish()
        if first:
            self.channel.send(Stepped())
        if self.traps is not None:
            self.traps.passed(before, step)

    def heartbeat(self) -> None:
        """The script says that it is well."""
        self.vitals.mark(BETWEEN, time.monotonic())

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A stretch of the script with a deadline of its own. Time in one that is called checkpoint
        or restore is spent on something else than training."""
        thread, vitals = threading.get_ident(), self.vitals
        own = thread == vitals.trainer
        if own:
            vitals.mark(BETWEEN, time.monotonic())
        index, place, began = self._enter(name, own)
        outermost = (thread, name) not in self._inside
        self._inside.add((thread, name))
        try:
            yield
        finally:
            now = time.monotonic()
            if index >= 0:
                vitals.took(len(PHASES) + index, now - began)
            vitals.leave(place)
            if own:
                vitals.go_on(BETWEEN, now)
            if outermost:
                self._inside.discard((thread, name))
                self._booked(name, now - began if own else 0.0)

    def _enter(self, name: str, own: bool) -> tuple[int, int, float]:
        """The number of a section's name (-1 when there are too many), its place, and when it began."""
        with self._entering:
            index = self._sections.get(name, len(self._sections))
            if index == MOST_SECTIONS:
                return -1, -1, time.monotonic()
            if name not in self._sections:
                self._sections[name] = index
                self.vitals.name_section(index, name)
            began = time.monotonic()
            return index, self.vitals.enter(index, began, own), began

    def _booked(self, name: str, seconds: float) -> None:
        if name in self._aside:
            self._aside[name] += seconds
            self._saves += name == "checkpoint"
            self._publish()

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

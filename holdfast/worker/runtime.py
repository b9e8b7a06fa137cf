"""The small part of Holdfast that lives on in a worker while the user's script runs.

It notes each finished step in the progress page and tells the agent of the first one. Whoever counts
steps, the optimizer hook or the user's own `holdfast.progress`, ends up in `Runtime.stepped`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.messages.local import Stepped
from holdfast.page import ProgressPage
from holdfast.worker.channel import Channel
from holdfast.worker.requests import Requests

if TYPE_CHECKING:
    from holdfast.worker.torchstore import CoordinatorStore


class Runtime:
    def __init__(self, channel: Channel, page: ProgressPage) -> None:
        self.channel = channel
        self.requests = Requests(channel)
        self.store: CoordinatorStore | None = None
        """Made when first asked for; torch needs somebody to hold it."""
        self._page = page
        self._steps = 0
        self._step = 0
        self._first_at = 0.0
        self._last_at = 0.0
        self._aside = {"checkpoint": 0.0, "restore": 0.0}
        self._own_count = False
        self._before = 0
        """The step that this process went on from."""
        self._saves = 0

    def hook_stepped(self, resumed_from: int) -> None:
        """The optimizer hook saw a step; it counts unless the script counts for itself."""
        if not self._own_count:
            if self._steps == 0:
                self._step = self._before = resumed_from
            self._note(self._step + 1)

    def stepped(self, step: int) -> None:
        """The script says that this step is finished."""
        if not self._own_count:
            self._own_count = True
            self._before = step - max(1, self._steps)
        self._note(step)

    def _note(self, step: int) -> None:
        now = time.monotonic()
        first = self._steps == 0
        self._step = step
        self._steps = max(1, step - self._before)
        self._last_at = now
        if first:
            self._first_at = now
        self._publish()
        if first:
            self.channel.send(Stepped())

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Time that is spent on something else than training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._aside[name] += time.monotonic() - began
            if name == "checkpoint":
                self._saves += 1
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

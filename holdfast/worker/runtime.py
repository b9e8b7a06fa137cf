"""Holds the part of Holdfast that stays in a worker while the user's script runs.

It notes each finished step in the rank page and reports the first one to the agent. Both ways of
counting steps, the optimizer hook and the script's own `holdfast.progress`, end in `Runtime._note`.

Steps count on from where the script resumed. In this order: the script's own count, the step that a
checkpointer restored, the optimizer's count of earlier steps, what the files say that the script read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holdfast.messages.local import Stepped
from holdfast.messages.records import RESUMED, Resumed
from holdfast.shm.rank_page import RankPage
from holdfast.shm.vital_signs import BETWEEN, MOST_SECTIONS, PHASES, WARM_UP_DEVICE
from holdfast.worker.channel import Channel
from holdfast.worker.heartbeat import uses_device
from holdfast.worker.requests import RequestClient
from holdfast.worker.resumption import Resumption
from holdfast.worker.step_times import StepTimes
from holdfast.worker.told_losses import ToldLosses

if TYPE_CHECKING:
    from holdfast.checkpoint.memory.slots import Copy
    from holdfast.worker.injected_faults import Traps
    from holdfast.worker.torch_store import CoordinatorStore
    from holdfast.worker.tracking import Tracking

EVALUATION = "evaluation"
"""Name of the section in which a script evaluates."""


class Runtime:
    """The state that Holdfast keeps in one worker."""

    def __init__(
        self,
        channel: Channel,
        page: RankPage,
        round: int = 0,
        images: str = "",
        opened_at: float = 0.0,
    ) -> None:
        self.channel = channel
        self.images = images
        self.pid = os.getpid()
        self.requests = RequestClient(channel)
        self.copies: dict[str, list[Copy]] = {}
        """Copies in progress of the newest checkpointer of each name."""
        self.vitals = page.vitals
        registry = os.path.join(images, "saved_steps") if images else ""
        self.resumption = Resumption(registry, round, opened_at)
        self.traps: Traps | None = None
        """Injected faults, once there are any."""
        self.at_first_step: list[Callable[[], None]] = []
        """Called once the first step is finished."""
        self.parked = False
        """Whether the process has left its restartable function, and has no place."""
        self.when_renewed: list[Callable[[], None]] = []
        """What else forgets the round before when the process gets another place."""
        self.tracking: Tracking | None = None
        """What writes to the script's tracker: see `holdfast.track`."""
        self._page = page
        self._forget(round)

    def renew(self, round: int) -> None:
        """Forget everything of the round before: the process enters its function in another one."""
        self._forget(round)
        self.vitals.trainer = threading.get_ident()
        self.requests.fence()
        self.resumption.begin_again(round)
        self._page.traps.rewind()
        if self.traps is not None:
            self.traps.clear()
        for forget in self.when_renewed:
            forget()

    def _forget(self, round: int) -> None:
        self.round = round
        self.renumbered = False
        """Whether the script gave the ranks of the round other numbers, or left some in reserve."""
        self.store: CoordinatorStore | None = None
        """Created on first use, and held here because torch does not hold it."""
        self._sections: dict[str, int] = {}
        """Index of each section name."""
        self._entering = threading.Lock()
        self._inside: set[tuple[int, str]] = set()
        """Threads and the sections they are in: nested ones of the same name are booked once."""
        self._marks = 0
        """Number of marks at the last step that the script reported."""
        self._step = 0
        self._steps = 0
        """Steps that this process has finished."""
        self._before = 0
        """Step that this process resumed from."""
        self._resumed: int | None = None
        """Step that a checkpointer restored."""
        self._base: Resumed = "none"
        """Whether that step is known."""
        self._own_count = False
        """Whether the script counts steps itself."""
        self._first_at = self._last_at = 0.0
        self._booked_s = {"checkpoint": 0.0, "restore": 0.0, EVALUATION: 0.0}
        self._booked_before = 0.0
        """Sum of the booked seconds at the last step."""
        self._step_times = StepTimes()
        self._saves = 0
        self._evaluating = False
        self._samples = 0
        """Records that the script was given to train on."""
        self._samples_used = 0
        """The same at the last step."""
        self._losses = ToldLosses()
        self._own_loss = False
        """Whether the script tells losses itself."""

    # ---- steps ----

    @property
    def step(self) -> int:
        """The last step that was finished, counted from the job's first; before the first step of
        this process, the one that it resumes from, as far as that is known."""
        if self._steps > 0:
            return self._step
        return self._resumed if self._resumed is not None else self.resumption.so_far()[0]

    def hook_stepped(self, resumed_from: int) -> None:
        """Count an optimizer step, unless the script counts for itself."""
        if not self._own_count:
            if self._steps == 0:
                self._step, self._base = self._begin(resumed_from)
                self._before = self._step
            self._note(self._step + 1)

    def _begin(self, resumed_from: int) -> tuple[int, Resumed]:
        step, base = self.resumption.base()
        if self._resumed is not None:
            return self._resumed, "known"
        return (resumed_from, "known") if resumed_from > 0 else (step, base)

    def resumed(self, step: int) -> None:
        """Continue counting from the step that was restored, whatever the optimizer's own count."""
        if self._steps == 0:
            self._resumed = step

    def stepped(self, step: int, loss: Any = None) -> None:
        """Take the script's word that this step is finished, and had this loss."""
        if not self._own_count:
            self._own_count = True
            self._base = "known"
            self._before = step - max(1, self._steps)
            self._step = step - 1
        elif step < self._step:  # It loaded an earlier state, and goes on: this is one step more.
            self._before = step - self._steps - 1
            self._losses = ToldLosses()
        if self.vitals.marks == self._marks:  # No hook of ours sees this script train.
            self.vitals.mark(BETWEEN, time.monotonic())
        self._marks = self.vitals.marks
        self._note(step, loss)

    def tell_loss(self, loss: Any) -> None:
        """Take the script's word for the loss of the last step that was counted."""
        self._own_loss = True
        self._take_loss(loss)

    def hear_loss(self, loss: Any) -> None:
        """Take what a framework logs as the loss of the last step, unless the script tells it."""
        if not self._own_loss:
            self._take_loss(loss)

    def _take_loss(self, loss: Any) -> None:
        if self._steps > 0:
            self._losses.tell(loss, self._steps)
            self._publish()

    def _note(self, step: int, loss: Any = None) -> None:
        now = time.monotonic()
        first = self._steps == 0
        self.vitals.stepped(now, None if first else now - self._last_at)
        booked = sum(self._booked_s.values())
        if not first:
            self._step_times.took(max(0.0, now - self._last_at - (booked - self._booked_before)))
        self._booked_before = booked
        before, self._step = self._step, step
        self._steps = max(1, step - self._before)
        self._last_at = now
        self._samples_used = self._samples
        if loss is not None:
            self._own_loss = True
            self._losses.tell(loss, self._steps)
        elif self._losses.under_way is not None:
            self._losses.look()
        if first:
            self._first_at = now
            if uses_device():
                self.vitals.warm_up = WARM_UP_DEVICE
        self._publish()
        if first:
            self.channel.send(Stepped())
            while self.at_first_step:
                self.at_first_step.pop(0)()
        if self.traps is not None:
            self.traps.passed(before, step)

    def noting(self) -> Callable[[Any], None]:
        """Return a function to call with a file once it is saved: it holds the state of now.

        A thread that saves beside the training may save an earlier state.
        """
        step, own = self._step, threading.get_ident() == self.vitals.trainer
        exact = own and self._base != "unknown"
        # Before the first step it is not known where the script resumed; and a forked process, as a
        # data loader's worker, saves no state of the training.
        if self._steps == 0 or os.getpid() != self.pid:
            return lambda target: None
        return lambda target: self.resumption.saved(target, step, exact)

    def used(self, records: int) -> None:
        """Count records that the script is given; those of an evaluation do not count."""
        if not self._evaluating:
            self._samples += records

    def heartbeat(self) -> None:
        """Mark progress on the script's request."""
        self.vitals.mark(BETWEEN, time.monotonic())

    # ---- sections ----

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Run a section with its own deadline; those in `_booked_s` are booked as such."""
        thread, vitals = threading.get_ident(), self.vitals
        own = thread == vitals.trainer
        if own:
            vitals.mark(BETWEEN, time.monotonic())
        index, slot, began = self._enter(name, own)
        outermost = (thread, name) not in self._inside
        self._inside.add((thread, name))
        booked_before = sum(self._booked_s.values())
        evaluates = own and outermost and name == EVALUATION
        self._evaluating = self._evaluating or evaluates
        try:
            yield
        finally:
            now = time.monotonic()
            if index >= 0:
                vitals.took(len(PHASES) + index, now - began)
            vitals.leave(slot)
            if own:
                vitals.go_on(BETWEEN, now)
            if outermost:
                self._inside.discard((thread, name))
                inner_s = sum(self._booked_s.values()) - booked_before
                self._book(name, max(0.0, now - began - inner_s) if own else 0.0)
            if evaluates:
                self._evaluating = False

    def _enter(self, name: str, own: bool) -> tuple[int, int, float]:
        """Return the index of a section's name (-1 if there are too many), its slot and its start."""
        with self._entering:
            index = self._sections.get(name, len(self._sections))
            if index == MOST_SECTIONS:
                return -1, -1, time.monotonic()
            if name not in self._sections:
                self._sections[name] = index
                self.vitals.name_section(index, name)
            began = time.monotonic()
            return index, self.vitals.enter(index, began, own), began

    def _book(self, name: str, seconds: float) -> None:
        if name in self._booked_s:
            self._booked_s[name] += seconds
            self._saves += name == "checkpoint"
            self._publish()

    def _publish(self) -> None:
        self._page.write(
            self._step,
            self._steps,
            self._first_at,
            self._last_at,
            self._booked_s["checkpoint"],
            self._booked_s["restore"],
            self._saves,
            self._step_times.pause_s,
            self._step_times.usual_s or 0.0,
            RESUMED.index(self._base),
            self._samples_used,
            self._step_times.trained_s,
            self._booked_s[EVALUATION],
            self._losses.value,
            self._losses.steps,
        )


class _Slot:
    """Holder of the process's runtime: the public API has no other way to find it."""

    runtime: Runtime | None = None


def install(runtime: Runtime) -> None:
    _Slot.runtime = runtime


def current() -> Runtime | None:
    """Return this process's runtime; None outside `holdfast run`."""
    return _Slot.runtime

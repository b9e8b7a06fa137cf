"""Changes the settings of a loader while it runs, at the same step on all ranks.

    tuning = Tuning("train", LoaderConfig(micro_batch=32, workers=2, prefetch=2), link=link.current())
    config = tuning.config                     # what to begin with
    for step in ...:
        changed = tuning.at_boundary(step)     # between two steps: None, or other settings from here on

A thread waits for news from the coordinator, so the training never does: only at the very step at which
a change is to take place it asks, once, whether all ranks have heard of it. Outside `holdfast run`
nothing ever changes.

The steps of `at_boundary` are those of this loader in its process. They must rise, and be the same on
all ranks: see `holdfast.core.tuning.rules`.
"""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import Final

from holdfast.data.link import JobLink
from holdfast.errors import HoldfastError
from holdfast.messages.requests import AwaitTuning, SettleTuning, Truth, TuningNotice
from holdfast.messages.tuning import LoaderConfig, LoaderMeasured
from holdfast.messages.units import Seconds, StepNumber

WARM_UP: Final = 5
"""Steps after a change that are not measured: buffers fill, kernels are chosen."""
LEAST_STEPS: Final = 20
MOST_STEPS: Final = 200
LEAST_S: Final = 3.0
STEADY: Final = 0.1
"""Speeds of the two halves of a measurement may differ by this share; else it goes on."""
LOOK_S: Final = 1.0
"""A measurement that is not over is looked at again after this time at the earliest."""


class StepMeter:
    """Measures how long steps take, without those that follow a change."""

    def __init__(self) -> None:
        self._skipped = 0
        self._took: list[Seconds] = []

    def add(self, seconds: Seconds) -> None:
        if self._skipped < WARM_UP:
            self._skipped += 1
        elif len(self._took) < MOST_STEPS:
            self._took.append(seconds)

    @property
    def steps_left(self) -> int:
        """How many more steps it needs at least."""
        return max(0, WARM_UP - self._skipped) + max(0, LEAST_STEPS - len(self._took))

    def steps_per_s(self) -> float | None:
        """Return the speed; None if it is not steady yet. Medians count: a checkpoint is no step."""
        took = list(self._took)
        middle = len(took) // 2
        if len(took) < LEAST_STEPS or (sum(took) < LEAST_S and len(took) < MOST_STEPS):
            return None
        first, second = median(took[:middle]), median(took[middle:])
        steady = abs(first - second) <= STEADY * max(first, second)
        if not steady and len(took) < MOST_STEPS:
            return None
        return 1 / max(second if not steady else median(took), 1e-9)


class Tuning:
    """The settings of one loader."""

    def __init__(
        self,
        dataset: str,
        own: LoaderConfig,
        *,
        most: int = 0,
        auto: bool = False,
        link: JobLink | None = None,
    ) -> None:
        """Get the settings in force, which may take a moment while the coordinator restarts.

        `own` are the script's settings; `most` is the largest micro-batch that leaves results as they
        are, and 0 if another one would change them; `auto` has the best micro-batch searched for.
        """
        self.config = own
        """Settings to use, from the last boundary on."""
        self.version = 0
        """Their version; 0 if they are the script's own."""
        self._dataset, self._own, self._most, self._auto = dataset, own, most, auto
        self._link = link
        self._lock = threading.Lock()
        self._proposal: TuningNotice | None = None
        self._step = 0
        self._stepped_at: float | None = None
        self._step_s: Seconds | None = None
        self._meter: StepMeter | None = None
        if link is None:
            return
        self._opening = link.count_opening(dataset)
        first = self._ask(0, None)
        if first.version:
            self._apply(first)
        elif first.measure:
            self._meter = StepMeter()
        listen = threading.Thread(
            target=self._listen, args=(first.number,), name="holdfast-tuning", daemon=True
        )
        listen.start()

    def at_boundary(self, step: int) -> LoaderConfig | None:
        """Return the settings from here on if they change between `step` steps and the next one.

        It waits for the coordinator only at the step at which a change was proposed. Raises
        `FencedError` if the round ends meanwhile.
        """
        if self._link is None:
            return None
        now = time.monotonic()
        with self._lock:
            self._note_step(step, now)
            proposal = self._proposal
            if proposal is None or proposal.at_step is None or step < proposal.at_step:
                return None
            self._proposal = None
        request = SettleTuning(dataset=self._dataset, number=proposal.number)
        # Without an answer nobody can say what the other ranks do: there is no limit.
        answer = self._link.ask(request, None)
        assert isinstance(answer, Truth)
        if not answer.so:
            return None
        with self._lock:
            self._apply(proposal)
        return self.config

    def _note_step(self, step: int, now: float) -> None:
        before, self._stepped_at, self._step = self._stepped_at, now, step
        if before is None:
            return
        took = now - before
        self._step_s = took if self._step_s is None else 0.9 * self._step_s + 0.1 * took
        if self._meter is not None:
            self._meter.add(took)

    def _apply(self, notice: TuningNotice) -> None:
        self.config, self.version = notice.config.over(self._own), notice.version
        self._meter = StepMeter() if notice.measure else None

    # ---- the thread ----

    def _listen(self, after: int) -> None:
        measured: LoaderMeasured | None = None
        while True:
            try:
                notice = self._ask(after, measured)
            except HoldfastError:
                return  # The round is over, or the script has opened the data set anew.
            measured = None
            if notice.number == after:
                measured = self._measured()
            after = notice.number
            self._hear(notice)

    def _ask(self, after: int, measured: LoaderMeasured | None) -> TuningNotice:
        assert self._link is not None
        with self._lock:
            request = AwaitTuning(
                dataset=self._dataset,
                opening=self._opening,
                after=after,
                at=StepNumber(self._step),
                step_s=self._step_s,
                own=self._own,
                most=self._most,
                auto=self._auto,
                for_s=self._look_again_s(),
                measured=measured,
            )
        answer = self._link.ask(request, None)
        assert isinstance(answer, TuningNotice)
        return answer

    def _hear(self, notice: TuningNotice) -> None:
        """Keep a proposal for its step; one whose step is over is refused by the next request."""
        with self._lock:
            if notice.at_step and self._step < notice.at_step:
                self._proposal = notice

    # ---- measuring ----

    def _look_again_s(self) -> Seconds | None:
        if self._meter is None and (self._proposal is None or not self._proposal.measure):
            return None
        ahead = 0
        if self._proposal is not None and self._proposal.at_step is not None:
            ahead = self._proposal.at_step - self._step + WARM_UP + LEAST_STEPS
        elif self._meter is not None:
            ahead = self._meter.steps_left
        return max(LOOK_S, ahead * (self._step_s or 0.0))

    def _measured(self) -> LoaderMeasured | None:
        """Return what was measured with the settings in use, once."""
        assert self._link is not None
        with self._lock:
            speed = self._meter.steps_per_s() if self._meter is not None else None
            if speed is None:
                return None
            version, self._meter = self.version, None
        memory = self._link.memory()
        return LoaderMeasured(version=version, steps_per_s=min(speed, 1e9), memory=memory)

"""Runs checks of this node: by hand, before a join, and now and then while training.

    with Checker(settings_here(os.environ)) as checker:
        results = checker.run()                     # all of them
        results = checker.run(["gpu", "nic"])       # some, by name or kind
        results = checker.run(checker.names(costly=False))
        checker.baseline                            # what to give the next checker, to see changes

A run takes as long as its slowest check and never longer than the deadlines say. Probes are kept
between runs, so that another run costs milliseconds; `close` ends them. A checker is used by one
thread at a time; from an event loop, call `run` in a thread.

Its probes are children of the calling process: whoever ends strays there must spare `pids`.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection, Iterable
from types import TracebackType

from holdfast.health.baseline import Baseline
from holdfast.health.catalogue import COSTLY, Check, checks_of, chosen
from holdfast.health.exchange import Question
from holdfast.health.finding import SEVERITY, Finding
from holdfast.health.node import boot_id
from holdfast.health.probes import Lane
from holdfast.health.settings import HealthSettings
from holdfast.messages.health import Result, Verdict

REASON_CHARACTERS = 600


class Checker:
    def __init__(self, settings: HealthSettings, baseline: Baseline | None = None) -> None:
        self.settings = settings
        self.baseline = baseline or Baseline()
        self.checks: list[Check] = checks_of(settings, _installed(settings))
        self._lanes = {check.lane: Lane(keep=check.kind != "own") for check in self.checks}
        self._look = 0
        self._results: dict[str, Result] = {}

    def names(self, costly: bool = True) -> list[str]:
        """All checks, or those that may be made every few seconds while training goes on."""
        return [check.name for check in self.checks if costly or check.kind not in COSTLY]

    def run(
        self, names: Collection[str] | None = None, deadline_s: float | None = None
    ) -> list[Result]:
        """Look once. `deadline_s` is for all together; each check has its own besides."""
        checks = self.checks if names is None else chosen(self.checks, names)
        now = time.monotonic()
        out_of_time = float("inf") if deadline_s is None else now + deadline_s
        self._forget_if_rebooted()
        self._look += 1
        self._results = {}
        by_lane: dict[str, list[Check]] = {}
        for check in checks:
            by_lane.setdefault(check.lane, []).append(check)
        try:
            for name, waiting in by_lane.items():
                lane = self._lanes[name]
                lane.begin(waiting, self._question, self._note, now, out_of_time)
            self._listen([self._lanes[name] for name in by_lane])
        except BaseException:
            # An answer that nobody waited for would be taken for the next question's.
            self.close()
            raise
        return [self._results[check.name] for check in checks]

    def _listen(self, lanes: Iterable[Lane]) -> None:
        while busy := [lane for lane in lanes if lane.busy]:
            patience = min(lane.until for lane in busy) - time.monotonic()
            with selectors.DefaultSelector() as selector:
                for lane in busy:
                    selector.register(lane, selectors.EVENT_READ, lane)
                ready = selector.select(max(0.0, patience))
            now = time.monotonic()
            for key, _ in ready:
                key.data.on_readable(now)
            # Whoever has answered meanwhile has done so in time, however late we come to look.
            heard = [key.data for key, _ in ready]
            for lane in busy:
                if lane.busy and lane not in heard and now >= lane.until:
                    lane.on_deadline(now)

    def _question(self, check: Check) -> Question:
        before = self.baseline.seen.get(check.name)
        return Question(check.kind, check.subject, self._look, self.settings, before)

    def _note(self, check: Check, found: Finding, seconds: float) -> None:
        if found.seen is not None:
            self.baseline.seen[check.name] = found.seen
        reason = "".join(c if c.isprintable() else " " for c in found.reason)
        if len(reason) > REASON_CHARACTERS:
            reason = reason[: REASON_CHARACTERS - 3] + "..."
        self._results[check.name] = Result(
            check.name, found.verdict, reason, round(seconds, 6), found.facts
        )

    def _forget_if_rebooted(self) -> None:
        boot = boot_id(self.settings.root)
        if boot != self.baseline.boot:
            self.baseline = Baseline(boot=boot)

    @property
    def pids(self) -> set[int]:
        """The processes that work for this checker at this moment."""
        return {lane.pid for lane in self._lanes.values() if lane.pid is not None}

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _installed(settings: HealthSettings) -> dict[str, str]:
    if not settings.installed_checks:
        return {}
    from holdfast.health.own_checks import installed_checks

    return installed_checks()


def worst_verdict(results: Iterable[Result]) -> Verdict:
    """The worst of them; "unknown" where nothing was looked at."""
    verdicts = [result.verdict for result in results]
    return max(verdicts, key=lambda verdict: SEVERITY[verdict], default="unknown")

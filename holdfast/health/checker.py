"""Runs health checks of this node: by hand, before a join, and once a minute during training.

    with Checker(settings_here(os.environ)) as checker:
        results = checker.run()                     # all of them
        results = checker.run(["gpu", "nic"])       # some, by name or kind
        results = checker.run(checker.names(costly=False))
        checker.baseline                            # what the next checker needs to see changes

A run takes as long as its slowest check and never longer than the deadlines allow. Probes stay between
runs, so that another run costs milliseconds; `close` ends them. A checker is used by one thread at a
time; from an event loop, call `run` in a thread.

Probes are children of the calling process: code there that ends stray processes must spare `pids`.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection, Iterable

from holdfast.health.baseline import Baseline
from holdfast.health.catalogue import COSTLY, HealthCheck, checks_of, chosen
from holdfast.health.judgement import SEVERITY, Judgement, Question
from holdfast.health.node import boot_id
from holdfast.health.probes import ProbeQueue
from holdfast.health.settings import HealthSettings
from holdfast.messages.health import HealthResult, Verdict

REASON_CHARACTERS = 600


class Checker:
    """The health checks of a node, and their probes."""

    def __init__(self, settings: HealthSettings, baseline: Baseline | None = None) -> None:
        self.settings = settings
        self.baseline = baseline or Baseline()
        self.checks: list[HealthCheck] = checks_of(settings, _installed(settings))
        self._queues = {
            check.probe: ProbeQueue(check.kind != "own", self._question, self._note)
            for check in self.checks
        }
        self._look = 0
        self._results: dict[str, HealthResult] = {}

    def names(self, costly: bool = True) -> list[str]:
        """List all checks, or those that are cheap enough to run during training."""
        return [check.name for check in self.checks if costly or check.kind not in COSTLY]

    def run(
        self, names: Collection[str] | None = None, deadline_s: float | None = None
    ) -> list[HealthResult]:
        """Run checks once. `deadline_s` is for all together; each check has its own besides."""
        checks = self.checks if names is None else chosen(self.checks, names)
        out_of_time = float("inf") if deadline_s is None else time.monotonic() + deadline_s
        self._forget_if_rebooted()
        self._look += 1
        self._results = {}
        queued: dict[str, list[HealthCheck]] = {}
        for check in checks:
            queued.setdefault(check.probe, []).append(check)
        try:
            for probe, waiting in queued.items():
                self._queues[probe].begin(waiting, out_of_time)
            self._listen([self._queues[probe] for probe in queued])
        except BaseException:
            # An answer that is left over would be taken for the next question's.
            self.close()
            raise
        return [self._results[check.name] for check in checks]

    def _listen(self, queues: Iterable[ProbeQueue]) -> None:
        while busy := [queue for queue in queues if queue.busy]:
            patience = min(queue.until for queue in busy) - time.monotonic()
            with selectors.DefaultSelector() as selector:
                for queue in busy:
                    selector.register(queue, selectors.EVENT_READ, queue)
                heard = [key.data for key, _ in selector.select(max(0.0, patience))]
            now = time.monotonic()
            for queue in heard:
                queue.on_readable()
            # A probe that has answered meanwhile was in time, however late we look.
            for queue in busy:
                if queue.busy and queue not in heard and now >= queue.until:
                    queue.on_deadline()

    def _question(self, check: HealthCheck) -> Question:
        before = self.baseline.seen.get(check.name)
        return Question(check.kind, check.subject, self._look, self.settings, before)

    def _note(self, check: HealthCheck, found: Judgement, seconds: float) -> None:
        if found.seen is not None:
            self.baseline.seen[check.name] = found.seen
        reason = "".join(c if c.isprintable() else " " for c in found.reason)
        if len(reason) > REASON_CHARACTERS:
            reason = reason[: REASON_CHARACTERS - 3] + "..."
        self._results[check.name] = HealthResult(
            check.name, found.verdict, reason, round(seconds, 6), found.facts
        )

    def _forget_if_rebooted(self) -> None:
        boot = boot_id(self.settings.root)
        if boot != self.baseline.boot:
            self.baseline = Baseline(boot=boot)

    @property
    def pids(self) -> set[int]:
        """The current probes."""
        return {queue.pid for queue in self._queues.values() if queue.pid is not None}

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()

    def __enter__(self) -> Checker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _installed(settings: HealthSettings) -> dict[str, str]:
    if not settings.installed_checks:
        return {}
    from holdfast.health.own_checks import installed_checks

    return installed_checks()


def worst_verdict(results: Iterable[HealthResult]) -> Verdict:
    """Return the worst of the verdicts; "unknown" without any."""
    verdicts = [result.verdict for result in results]
    return max(verdicts, key=lambda verdict: SEVERITY[verdict], default="unknown")

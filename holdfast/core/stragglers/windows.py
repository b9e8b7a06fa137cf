"""Decides which ranks slow the others down, and which nodes have too little CPU time for their ranks.

Agents report how long the sections of their ranks' steps took. Reports are collected in a window until
every rank of the round has eight samples and five seconds have passed; then the window is judged and
the next one begins. A rank that reports nothing does not delay this for ever: once a rank has reported
three times and has 24 samples, those with enough are judged, and the rest are unknown.

Each window gives a rank two scores (`stragglers.own_work` defines them, and why a rank that waits is
not a slow one):

    relative     compared with the best rank of the window: finds the rank that the others wait for
    individual   compared with its own best of any two consecutive windows: finds a slowdown of all
                 ranks at once, which no comparison between ranks can show

A rank becomes a straggler when its score is below 0.75 in three consecutive windows, and ceases to be
one when it is 0.85 or more in three. For the relative score these thresholds are multiplied by the
score of the *typical* rank, the slowest of the faster half: one exceptionally fast rank makes no
stragglers of the others. A window in which a rank is unknown changes nothing for it.

A rank can only be called slow if it had a CPU. Agents report how long their ranks wanted to run and had
none (`CpuShortage`). If that is more than a tenth of a rank's own work in a window, the rank is not
judged slow by that window, and none of its times is remembered as its best; if it is more than a tenth
of the time, no rank on its host is. An overload of three consecutive windows is a finding of its own,
about the host.

Scores compare the ranks of one round. A new round starts from nothing, except for the best times of
ranks that stay on their host, if the world keeps its size: with the size a rank's work may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high
from typing import NamedTuple

from msgspec import Struct, field

from holdfast.core.stragglers import own_work
from holdfast.core.stragglers.own_work import Sample, Score, Sections, Works
from holdfast.messages.timings import Finding, Kind, RankTimings
from holdfast.messages.units import Rank, Seconds, StepNumber, Time

THRESHOLD = 0.75
CLEAR = 0.85
WINDOWS = 3
"""Consecutive windows that it takes to become a straggler, or to cease to be one."""
WINDOW_SAMPLES = 8
WINDOW_S: Seconds = 5.0
PATIENCE = 3
"""A window is judged without late ranks when a rank has this many reports and times the samples."""
OVERLOADED = 0.1
"""Share of a rank's time without a CPU above which its host is overloaded."""
RELIEVED = 0.05
"""Share below which an overload ends."""


class Track(Struct):
    """One kind of score of one rank, over the windows."""

    now: Score | None = None
    """Score in the last window in which it was known."""
    run: int = 0
    """Number of consecutive windows that contradict `flagged`."""
    flagged: bool = False


class RankSpeed(Struct):
    """Times and scores of one rank."""

    host: str
    best_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    relative: Track = field(default_factory=Track)
    individual: Track = field(default_factory=Track)


class RankScores(Struct, frozen=True):
    """Scores of one rank; None if unknown."""

    relative: float | None
    individual: float | None
    straggler: Kind | None = None
    """Kind of straggler it is, if it is one."""


class Shares(Struct, frozen=True):
    """Time that a rank had no CPU, by reason, as shares of all its time."""

    queued: float = 0.0
    throttled: float = 0.0
    stolen: float = 0.0

    @property
    def total(self) -> float:
        return self.queued + self.throttled + self.stolen

    def __str__(self) -> str:
        return (
            f"its ranks had no CPU for {_percent(self.total)} of the time: run-queue delay"
            f" {_percent(self.queued)}, throttled {_percent(self.throttled)},"
            f" steal {_percent(self.stolen)}"
        )


class HostLoad(Struct):
    """How much CPU time the ranks of one host lacked, over the windows."""

    now: Shares = Shares()
    """Of the rank that lacked most, in the last window."""
    run: int = 0
    """Number of consecutive windows that contradict `overloaded`."""
    overloaded: bool = False


class Overload(NamedTuple):
    """A host that became overloaded, or ceased to be."""

    host: str
    began: bool
    shares: Shares


class Judged(NamedTuple):
    """What a window shows that was not known before."""

    findings: Sequence[Finding] = ()
    overloads: Sequence[Overload] = ()


class Gathered(Struct):
    """What one rank reported in a window."""

    sections: Sections = field(default_factory=dict)
    reports: int = 0
    queued_s: float = 0.0
    throttled_s: float = 0.0
    stolen_s: float = 0.0

    def add(self, report: RankTimings) -> None:
        self.reports += 1
        for timing in report.timings:
            if timing.count > 0:
                self.sections.setdefault(timing.section, Sample()).add(timing)
        self.queued_s += report.shortage.queued_s
        self.throttled_s += report.shortage.throttled_s
        self.stolen_s += report.shortage.stolen_s

    @property
    def samples(self) -> int:
        return own_work.samples(self.sections)

    def shares(self, works: Works) -> Shares:
        """Return which share of its time it had no CPU."""
        taken_s = max(own_work.step_s(self.sections), own_work.total_s(works)) * self.samples
        parts = (self.queued_s, self.throttled_s, self.stolen_s)
        return Shares(*(min(1.0, part_s / taken_s) if taken_s > 0 else 0.0 for part_s in parts))

    def starved(self, works: Works) -> bool:
        """Return whether it had no CPU for more than a small part of its own work."""
        lacked_s = self.queued_s + self.throttled_s + self.stolen_s
        return lacked_s > OVERLOADED * own_work.total_s(works) * self.samples


class Stragglers(Struct):
    ranks: dict[Rank, RankSpeed] = field(default_factory=dict)
    """All ranks of the round."""
    hosts: dict[str, HostLoad] = field(default_factory=dict)
    """All hosts of the round."""
    opened_at: Time | None = None
    """When the first report of the window came."""
    window: dict[Rank, Gathered] = field(default_factory=dict)
    full: dict[Rank, bool] = field(default_factory=dict)
    """Ranks with enough samples in the window (the values have no meaning)."""


def renew(state: Stragglers, hosts: Mapping[Rank, str], now_step: StepNumber) -> list[Finding]:
    """Start a round with these ranks on these hosts; return the findings that end with the last one."""
    ended = [
        _finding(rank, kind, track, now_step, began=False)
        for rank, rank_state in sorted(state.ranks.items())
        for kind, track in _tracks(rank_state)
        if track.flagged
    ]
    before = state.ranks if len(hosts) == len(state.ranks) else {}
    state.ranks = {rank: RankSpeed(host) for rank, host in sorted(hosts.items())}
    state.hosts = {host: state.hosts.get(host, HostLoad()) for host in sorted(set(hosts.values()))}
    for rank, fresh in state.ranks.items():
        if rank in before and before[rank].host == fresh.host:
            fresh.best_s = before[rank].best_s
    _empty(state)
    state.window = {}
    return ended


def take(
    state: Stragglers, reports: Iterable[RankTimings], now_step: StepNumber, now: Time
) -> Judged:
    """Add reports to the window; if that completes it, return what it shows."""
    patient = True
    for report in reports:
        if report.rank in state.ranks:
            patient = _gather(state, report, now) and patient
    if state.opened_at is None or now - state.opened_at < WINDOW_S:
        return Judged()
    if len(state.full) < len(state.ranks) and patient:
        return Judged()
    judged = {rank: state.window.pop(rank) for rank in state.full}
    _empty(state)
    return _judge(state, judged, now_step) if judged else Judged()


def scores(state: Stragglers) -> dict[Rank, RankScores]:
    """Return each rank's scores in the last window in which they were known."""
    return {
        rank: RankScores(
            each.relative.now.score if each.relative.now is not None else None,
            each.individual.now.score if each.individual.now is not None else None,
            next((kind for kind, track in _tracks(each) if track.flagged), None),
        )
        for rank, each in state.ranks.items()
    }


def overload(state: Stragglers, host: str) -> Shares | None:
    """Return what keeps the CPUs of a host from its ranks; None if it is not overloaded."""
    load = state.hosts.get(host)
    return load.now if load is not None and load.overloaded else None


# ---- windows -----------------------------------------------------------------------------------


def _gather(state: Stragglers, report: RankTimings, now: Time) -> bool:
    """Add a report to the window; return whether its rank can wait for others."""
    if state.opened_at is None:
        state.opened_at = now
    gathered = state.window.setdefault(report.rank, Gathered())
    gathered.add(report)
    count = gathered.samples
    if count >= WINDOW_SAMPLES:
        state.full[report.rank] = True
    else:
        state.full.pop(report.rank, None)
    return gathered.reports < PATIENCE or count < PATIENCE * WINDOW_SAMPLES


def _empty(state: Stragglers) -> None:
    """Begin the next window; what late ranks reported stays in it."""
    state.full, state.opened_at = {}, None


def _judge(state: Stragglers, window: Mapping[Rank, Gathered], now_step: StepNumber) -> Judged:
    works = own_work.own_work({rank: gathered.sections for rank, gathered in window.items()})
    overloads, busy = _weigh(state, {r: g.shares(works[r]) for r, g in window.items()})
    steps_s = {rank: own_work.step_s(gathered.sections) for rank, gathered in window.items()}
    relative = _relative(works, steps_s)
    typical = median_high([score.score for score in relative.values()] or [1.0])
    findings = []
    for rank in sorted(works):
        each = state.ranks[rank]
        compared = relative.get(rank)
        if each.host in busy or window[rank].starved(works[rank]):
            if compared is None or compared.score < THRESHOLD * typical:
                continue
            found: tuple[Score | None, ...] = compared, None
        else:
            found = compared, _individual(each, works[rank], steps_s[rank])
        for (kind, track), score, bar in zip(_tracks(each), found, (typical, 1.0), strict=True):
            if score is not None and _follow(track, score, bar):
                findings.append(_finding(rank, kind, track, now_step, began=track.flagged))
    return Judged(findings, overloads)


def _weigh(state: Stragglers, shares: Mapping[Rank, Shares]) -> tuple[list[Overload], set[str]]:
    """Note how much CPU time each host lacked; return which became or ceased to be overloaded, and
    which were overloaded in this window."""
    worst: dict[str, Shares] = {}
    for rank, lacked in sorted(shares.items()):
        host = state.ranks[rank].host
        if host not in worst or lacked.total > worst[host].total:
            worst[host] = lacked
    turned = []
    for host, lacked in sorted(worst.items()):
        load = state.hosts[host]
        load.now = lacked
        says = lacked.total < RELIEVED if load.overloaded else lacked.total > OVERLOADED
        load.run = load.run + 1 if says else 0
        if load.run == WINDOWS:
            load.overloaded, load.run = not load.overloaded, 0
            turned.append(Overload(host, load.overloaded, lacked))
    return turned, {host for host, lacked in worst.items() if lacked.total > OVERLOADED}


def _relative(works: Mapping[Rank, Works], steps_s: Mapping[Rank, Seconds]) -> dict[Rank, Score]:
    seen = [each for each in works.values() if any(not work.hidden for work in each.values())]
    if len(seen) < 2:
        return {}
    best = own_work.best_of(seen)
    found = {rank: own_work.score(each, best, steps_s[rank]) for rank, each in works.items()}
    return {rank: score for rank, score in found.items() if score is not None}


def _individual(each: RankSpeed, works: Works, step_s: Seconds) -> Score | None:
    """Score a rank against its best; a time counts as reached when it was held in two windows."""
    now_s = {name: work.own_s for name, work in works.items() if not work.hidden}
    for name in filter(each.last_s.__contains__, now_s):
        held_s = max(now_s[name], each.last_s[name])
        each.best_s[name] = min(held_s, each.best_s.get(name, held_s))
    each.last_s = now_s
    return own_work.score(works, each.best_s, step_s)


def _follow(track: Track, score: Score, bar: float) -> bool:
    """Note a window's score; return True if the rank became or ceased to be a straggler."""
    track.now = score
    says = score.score >= CLEAR * bar if track.flagged else score.score < THRESHOLD * bar
    track.run = track.run + 1 if says else 0
    if track.run < WINDOWS:
        return False
    track.flagged, track.run = not track.flagged, 0
    return True


def _tracks(each: RankSpeed) -> tuple[tuple[Kind, Track], tuple[Kind, Track]]:
    return ("relative", each.relative), ("individual", each.individual)


def _finding(rank: Rank, kind: Kind, track: Track, step: StepNumber, *, began: bool) -> Finding:
    assert track.now is not None, "a straggler without a score"
    score, section = track.now.score, track.now.section
    return Finding(rank=rank, kind=kind, began=began, score=score, section=section, step=step)


def _percent(share: float) -> str:
    return f"{round(100 * share)} %"


def validate(state: Stragglers) -> None:
    """Check every invariant."""
    assert state.window.keys() <= state.ranks.keys(), "a window of an unknown rank"
    enough = {rank for rank, each in state.window.items() if each.samples >= WINDOW_SAMPLES}
    assert state.full.keys() == enough, "miscounted samples"
    for each in state.window.values():
        assert all(sample.count > 0 for sample in each.sections.values()), "an empty section"
    for speed in state.ranks.values():
        for kind, track in _tracks(speed):
            assert 0 <= track.run < WINDOWS, f"a {kind} track that should have turned"
            assert not track.flagged or track.now is not None, "a straggler without a score"
            assert track.now is None or 0 <= track.now.score <= 1, "an impossible score"
    assert state.hosts.keys() == {speed.host for speed in state.ranks.values()}, "unknown hosts"
    for load in state.hosts.values():
        assert 0 <= load.run < WINDOWS, "a host's load that should have turned"

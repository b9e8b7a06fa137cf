"""Decides which ranks slow the others down.

Agents report how long the sections of their ranks' steps took. Reports are collected in a window until
every rank of the round has eight samples; then the window is judged and the next one begins. A rank
that reports nothing does not delay this for ever: once a rank has 24 samples, those with enough are
judged, and the rest are unknown.

Each window gives a rank two scores (`stragglers.own_work` defines them, and why a rank that waits is
not a slow one):

    relative     compared with the best rank of the window: finds the rank that the others wait for
    individual   compared with its own best of any two consecutive windows: finds a slowdown of all
                 ranks at once, which no comparison between ranks can show

A rank becomes a straggler when its score is below 0.75 in two consecutive windows, and ceases to be one
when it is 0.8 or more in two consecutive windows. For the relative score these thresholds are
multiplied by the score of the *typical* rank, the slowest of the faster half: one exceptionally fast
rank makes no stragglers of the others. A window in which a rank is unknown changes nothing for it.

Scores compare the ranks of one round. A new round starts from nothing, except for the best times of
ranks that stay on their host, if the world keeps its size: with the size a rank's work may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_high

from msgspec import Struct, field

from holdfast.core.stragglers import own_work
from holdfast.core.stragglers.own_work import Sample, Score, Sections, Works
from holdfast.messages.timings import STEP, Finding, Kind, RankTimings
from holdfast.messages.units import Rank, StepNumber

THRESHOLD = 0.75
CLEAR = 0.8
WINDOWS = 2
"""Consecutive windows that it takes to become a straggler, or to cease to be one."""
WINDOW_SAMPLES = 8
PATIENCE = 3
"""A window is judged without late ranks when a rank has this many times the samples."""


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


class Stragglers(Struct):
    ranks: dict[Rank, RankSpeed] = field(default_factory=dict)
    """All ranks of the round."""
    window: dict[Rank, Sections] = field(default_factory=dict)
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
    for rank, fresh in state.ranks.items():
        if rank in before and before[rank].host == fresh.host:
            fresh.best_s = before[rank].best_s
    state.window, state.full = {}, {}
    return ended


def take(state: Stragglers, reports: Iterable[RankTimings], now_step: StepNumber) -> list[Finding]:
    """Add reports to the window; if that completes it, return who became or ceased to be slow."""
    most = max((_gather(state, report) for report in reports), default=0)
    if len(state.full) < len(state.ranks) and most < PATIENCE * WINDOW_SAMPLES:
        return []
    judged = {rank: state.window.pop(rank) for rank in state.full}
    state.full = {}
    return _judge(state, judged, now_step) if judged else []


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


# ---- windows -----------------------------------------------------------------------------------


def _gather(state: Stragglers, report: RankTimings) -> int:
    """Add a report to the window; return how many samples the rank now has in it."""
    if report.rank not in state.ranks:
        return 0
    sections = state.window.setdefault(report.rank, {})
    for timing in report.timings:
        if timing.count > 0:
            sections.setdefault(timing.section, Sample()).add(timing)
    count = _samples(sections)
    if count >= WINDOW_SAMPLES:
        state.full[report.rank] = True
    else:
        state.full.pop(report.rank, None)
    return count


def _samples(sections: Sections) -> int:
    """Return the number of steps if they are reported, else the count of the most frequent section."""
    if STEP in sections:
        return sections[STEP].count
    return max((sample.count for sample in sections.values()), default=0)


def _judge(
    state: Stragglers, window: Mapping[Rank, Sections], now_step: StepNumber
) -> list[Finding]:
    works = own_work.own_work(window)
    relative = _relative(works)
    typical = median_high([score.score for score in relative.values()] or [1.0])
    findings = []
    for rank in sorted(works):
        each = state.ranks[rank]
        found = relative.get(rank), _individual(each, works[rank])
        for (kind, track), score, bar in zip(_tracks(each), found, (typical, 1.0), strict=True):
            if score is not None and _follow(track, score, bar):
                findings.append(_finding(rank, kind, track, now_step, began=track.flagged))
    return findings


def _relative(works: Mapping[Rank, Works]) -> dict[Rank, Score]:
    seen = [each for each in works.values() if any(not work.hidden for work in each.values())]
    if len(seen) < 2:
        return {}
    best = own_work.best_of(seen)
    found = {rank: own_work.score(each, best) for rank, each in works.items()}
    return {rank: score for rank, score in found.items() if score is not None}


def _individual(each: RankSpeed, works: Works) -> Score | None:
    """Score a rank against its best; a time counts as reached when it was held in two windows."""
    now_s = {name: work.median_s for name, work in works.items() if not work.hidden}
    for name in filter(each.last_s.__contains__, now_s):
        held_s = max(now_s[name], each.last_s[name])
        each.best_s[name] = min(held_s, each.best_s.get(name, held_s))
    each.last_s = now_s
    return own_work.score(works, each.best_s)


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


def validate(state: Stragglers) -> None:
    """Check every invariant."""
    assert state.window.keys() <= state.ranks.keys(), "a window of an unknown rank"
    counts = {rank: _samples(sections) for rank, sections in state.window.items()}
    enough = {rank for rank, count in counts.items() if count >= WINDOW_SAMPLES}
    assert state.full.keys() == enough, "miscounted samples"
    assert len(enough) < max(1, len(state.ranks)), "a window that should have been judged"
    for sections in state.window.values():
        assert all(sample.count > 0 for sample in sections.values()), "a section without samples"
    for each in state.ranks.values():
        for kind, track in _tracks(each):
            assert 0 <= track.run < WINDOWS, f"a {kind} track that should have turned"
            assert not track.flagged or track.now is not None, "a straggler without a score"
            assert track.now is None or 0 <= track.now.score <= 1, "an impossible score"

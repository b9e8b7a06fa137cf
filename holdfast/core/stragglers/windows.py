"""Who slows the others down, while training.

Agents report now and then how long the sections of their ranks' steps took. Reports are gathered in a
window until every rank of the round has eight samples in it; then the window is judged and the next
begins. A rank that reports nothing does not hold up the others for ever: when one has 24, those
who have enough are judged, and the rest are unknown.

Each window gives a rank two scores (`stragglers.own_work` says how, and why a rank that waits is
not a slow one):

    relative     beside the best rank of the same window: finds the one that the others wait for
    individual   beside its own best, held for two windows running: finds a slowdown of all at once,
                 which no comparison between ranks can show

A rank is a straggler when its score was below 0.75 in two windows running, and no longer when it was
0.8 or more in two windows running. For the relative score it must also lie that far below the
*typical* rank, the slowest one of the faster half: one rank that is faster than all others makes no
stragglers of them. A window in which a rank is unknown changes nothing for it.

Scores compare ranks of one round. A new round begins afresh; only the best times of ranks that stay
on their host are kept, and those only while the world has the same size, because with the size the
work of a rank may change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_high

from msgspec import Struct, field

from holdfast.core.stragglers import own_work as ownwork
from holdfast.core.stragglers.own_work import Sample, Score, Sections, Works
from holdfast.messages.timings import STEP, Finding, Kind, RankTimings
from holdfast.messages.units import Rank, StepNumber

THRESHOLD = 0.75
CLEAR = 0.8
WINDOWS = 2
"""How many windows running it takes to be called a straggler, or none any more."""
WINDOW_SAMPLES = 8
PATIENCE = 3
"""A window is judged without the late ones when a rank has that many times its samples."""


class Track(Struct):
    """One kind of score of one rank through the windows."""

    now: Score | None = None
    """Of the last window in which it was known."""
    run: int = 0
    """How many windows running say the opposite of `flagged`."""
    flagged: bool = False


class RankSpeed(Struct):
    host: str
    best_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    relative: Track = field(default_factory=Track)
    individual: Track = field(default_factory=Track)


class RankScores(Struct, frozen=True):
    """None: unknown."""

    relative: float | None
    individual: float | None
    straggler: Kind | None = None
    """Beside whom it is slow, if it is."""


class Stragglers(Struct):
    ranks: dict[Rank, RankSpeed] = field(default_factory=dict)
    """All of the round."""
    window: dict[Rank, Sections] = field(default_factory=dict)
    full: dict[Rank, bool] = field(default_factory=dict)
    """Who has enough samples in the window (the values say nothing)."""


def renew(state: Stragglers, hosts: Mapping[Rank, str], now_step: StepNumber) -> list[Finding]:
    """A new round has these ranks on these hosts: whoever was a straggler is none any more."""
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
    """Add these reports to the window; when that completes it, who became or ceased to be slow."""
    most = max((_gather(state, report) for report in reports), default=0)
    if len(state.full) < len(state.ranks) and most < PATIENCE * WINDOW_SAMPLES:
        return []
    judged = {rank: state.window.pop(rank) for rank in state.full}
    state.full = {}
    return _judge(state, judged, now_step) if judged else []


def scores(state: Stragglers) -> dict[Rank, RankScores]:
    """Each rank's scores in the last window in which they were known."""
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
    """Add a report to the window; how many samples the rank has in it now."""
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
    """Steps if they are reported, which may be later than other sections; else the most there is."""
    if STEP in sections:
        return sections[STEP].count
    return max((sample.count for sample in sections.values()), default=0)


def _judge(
    state: Stragglers, window: Mapping[Rank, Sections], now_step: StepNumber
) -> list[Finding]:
    works = ownwork.own_work(window)
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
    best = ownwork.best_of(seen)
    found = {rank: ownwork.score(each, best) for rank, each in works.items()}
    return {rank: score for rank, score in found.items() if score is not None}


def _individual(each: RankSpeed, works: Works) -> Score | None:
    """How fast the rank is beside its best; a time counts as reached when it was held twice."""
    now_s = {name: work.median_s for name, work in works.items() if not work.hidden}
    for name in filter(each.last_s.__contains__, now_s):
        held_s = max(now_s[name], each.last_s[name])
        each.best_s[name] = min(held_s, each.best_s.get(name, held_s))
    each.last_s = now_s
    return ownwork.score(works, each.best_s)


def _follow(track: Track, score: Score, bar: float) -> bool:
    """Note a window's score; True when the rank became a straggler by it, or ceased to be one."""
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
    """Re-check every invariant."""
    assert state.window.keys() <= state.ranks.keys(), "a window of a stranger"
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

"""Decides whether a job that stands still may go on by itself.

A rank that is late is not proof of anything: rank 0 evaluates, uploads, waits for a file, and the
others wait for it. So every kind of evidence belongs to one of three classes, and only the class
decides:

1. **Proven.** The rank cannot continue, whatever happens: its process is stopped, its collective
   can never meet the others', it has left while others wait for it, ranks wait for each other in a
   circle, all its threads wait for each other's locks, a native call keeps the GIL and does
   nothing. The round is broken at once, after a second look has confirmed it.
2. **No sign of life.** Others wait for the rank, and nothing of it has moved: not its line, its CPU
   time, its I/O, its sockets, its children nor its data loader's workers. It is left alone for as
   long as such a place may take (`limits`).
3. **Signs of life.** Something of it moves. It is left alone until shortly before the process group
   of the waiting ranks would end them anyway.

While nobody waits for a rank there is no deadline, unless the user set one. Once a rank of the
round has ended well, doubt ends nothing any more: what is finished is started again only for a
proven hang.

The table in `docs/faults.md` has a row for each kind of evidence.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from holdfast.core.hangs import limits
from holdfast.core.hangs.state import Hangs, LateRank, Suspicion
from holdfast.messages.hangs import Proof
from holdfast.messages.units import Rank, Seconds, StepNumber, Time

STOPPED_S: Seconds = 1.2
"""A stopped process is given this long to be continued by the one who stopped it."""
CONFIRM_S: Seconds = 0.25
"""A proof by the flight recorders is given twice, at least this far apart."""
SEEN_TWICE: frozenset[Proof] = frozenset({"locked", "gil"})
"""Proofs that an agent gives only after several looks of its own."""
FRESH_S: Seconds = 3.0
"""Doubt is acted on by a verdict that is not older than this."""
VERDICT_S: Seconds = 1.5
"""Longest wait for a verdict on a rank that is stopped anyway."""
MARGIN_S: Seconds = 3.0
"""Time before the process group's own timeout at which a busy rank is ended."""

_HOW: dict[Proof | None, str] = {
    "stopped": "the process is stopped",
    "mismatch": "collectives that can never meet",
    "left": "a rank has left while others wait for it",
    "circle": "ranks wait for each other in a circle",
    "locked": "every thread waits for a lock of its own process",
    "gil": "a native call keeps the GIL and does nothing",
    None: "no proof",
}


class Scene(Struct, frozen=True):
    """What the rules need to know of the job besides its late ranks."""

    unfinished: int
    """Ranks of the round that have not ended well."""
    finished: int
    highest: StepNumber


class Outlook(Struct, frozen=True):
    """What will be done about a suspicion, and when, if nothing changes."""

    rank: Rank | None
    """The rank that the others wait for; None if that is not known."""
    act_at: Time | None
    """When the round is broken; None if only a person ends it."""
    reason: str
    """Why then: completes "left alone until"; empty if `act_at` is None."""
    proof: Proof | None = None
    sure: bool = False
    """Whether no other look is needed first; doubt needs a fresh one, a proof a second one."""


def is_suspicious(hangs: Hangs, scene: Scene) -> bool:
    """Return whether the late ranks mean that the job may stand still."""
    kinds = {standing.stall.kind for standing in hangs.late.values()}
    if kinds & {"stopped", "gil", "locked", "waits"}:
        return True
    limited = any(s.limit_s(hangs.terms) is not None for s in hangs.late.values())
    own = sum(standing.stall.kind != "ended" for standing in hangs.late.values())
    return limited or (own > 0 and own == scene.unfinished and scene.unfinished > 1)


def suspects(hangs: Hangs) -> list[Rank]:
    """Name the ranks that the others seem to wait for: the verdict's, or those that do not wait."""
    verdict = hangs.verdict
    if verdict is not None and verdict.guilty:
        return list(verdict.guilty)
    stopped = [r for r, s in hangs.late.items() if s.stall.kind == "stopped"]
    elsewhere = [r for r, s in hangs.late.items() if s.stall.kind != "waits"]
    return sorted(stopped or elsewhere)


def waiting(hangs: Hangs) -> set[Rank]:
    """Name the ranks that are known to wait for others."""
    verdict = hangs.verdict
    seen = {rank for rank, s in hangs.late.items() if s.stall.kind == "waits"}
    return seen.union(verdict.waiting) if verdict is not None else seen


def outlook(hangs: Hangs, scene: Scene) -> Outlook:
    """Return what will be done about the open suspicion."""
    assert hangs.suspicion is not None
    guilty = suspects(hangs)
    first = guilty[0] if guilty else None
    if any(rank in hangs.spared for rank in guilty):
        return Outlook(first, None, "")
    found = [*_proven(hangs, guilty), *_limited(hangs, first)]
    if not scene.finished and waiting(hangs):
        found += [*_silent(hangs, scene, guilty), *_timed_out(hangs, hangs.suspicion, first)]
    ahead = [one for one in found if one.act_at is not None]
    return min(ahead, key=_when) if ahead else Outlook(first, None, "")


def _when(one: Outlook) -> Time:
    assert one.act_at is not None
    return one.act_at


def _proven(hangs: Hangs, guilty: Iterable[Rank]) -> Iterable[Outlook]:
    for rank in guilty:
        standing = hangs.late.get(rank)
        if standing is not None and standing.stall.kind == "stopped":
            at = Time(standing.marked_at + STOPPED_S)
            yield Outlook(rank, at, "it has been stopped for a moment", "stopped", sure=True)
    suspicion = hangs.suspicion
    if suspicion is None or suspicion.proven_at is None or suspicion.verdict is None:
        return
    proof = suspicion.verdict.proof
    again = suspicion.reached_at - suspicion.proven_at >= CONFIRM_S
    confirmed = again or proof in SEEN_TWICE
    if proof != "stopped":
        first = next(iter(guilty), None)
        at = suspicion.reached_at if confirmed else Time(suspicion.proven_at + CONFIRM_S)
        yield Outlook(first, at, "another look confirms the proof", proof, sure=confirmed)


def _limited(hangs: Hangs, first: Rank | None) -> Iterable[Outlook]:
    """Yield what the user's own limits ask for."""
    for rank, standing in hangs.late.items():
        limit_s = standing.limit_s(hangs.terms)
        if limit_s is not None and standing.stall.kind != "ended":
            who = rank if first is None else first
            at = Time(standing.marked_at + limit_s)
            yield Outlook(who, at, f"rank {rank} has made no progress for {limit_s:g} s, as set")


def _silent(hangs: Hangs, scene: Scene, guilty: list[Rank]) -> Iterable[Outlook]:
    for rank in guilty:
        standing = hangs.late.get(rank)
        if standing is not None and standing.is_silent(hangs.terms):
            place = standing.stall.place
            pause = _named_pause(hangs, standing)
            limit_s = limits.silence_s(hangs, place, pause, scene.highest)
            if limit_s is not None:
                at = Time(standing.still_since + limit_s)
                yield Outlook(rank, at, f"it has shown no sign of life for {limit_s:g} s")
    if not guilty and len(hangs.late) == scene.unfinished:
        standings = list(hangs.late.values())
        if all(standing.is_silent(hangs.terms) for standing in standings):
            at = Time(max(s.still_since for s in standings) + limits.floor_s(hangs.terms))
            limit_s = limits.floor_s(hangs.terms)
            yield Outlook(None, at, f"no rank has shown a sign of life for {limit_s:g} s")


def _named_pause(hangs: Hangs, standing: LateRank) -> str:
    """Return the section that names what a rank does; empty if none does."""
    verdict = hangs.verdict
    if verdict is not None and verdict.pause and standing.stall.rank in verdict.guilty:
        return verdict.pause
    return standing.stall.where if standing.stall.where in hangs.longest_s else ""


def _timed_out(hangs: Hangs, suspicion: Suspicion, first: Rank | None) -> Iterable[Outlook]:
    verdict = suspicion.verdict
    if verdict is not None and verdict.left_s is not None:
        at = Time(max(suspicion.since, suspicion.reached_at + verdict.left_s - MARGIN_S))
        yield Outlook(first, at, "the process group of the waiting ranks is about to time out")


def acts_at(suspicion: Suspicion, ahead: Outlook) -> Time | None:
    """Return when the outlook may be acted on, or looked into once more."""
    if ahead.act_at is None or suspicion.asked_at is None:
        return ahead.act_at
    if ahead.proof == "stopped":  # What it did when it was stopped is worth a moment.
        return max(ahead.act_at, Time(suspicion.asked_at + VERDICT_S))
    return ahead.act_at if ahead.sure else None  # The verdict to come decides.


def is_due(suspicion: Suspicion, ahead: Outlook, now: Time) -> bool:
    """Return whether the round is to be broken now."""
    at = acts_at(suspicion, ahead)
    if at is None or now < at:
        return False
    fresh = suspicion.verdict is not None and now - suspicion.reached_at <= FRESH_S
    return ahead.sure or (ahead.proof is None and fresh)


# ---- saying it ----


def how(proof: Proof) -> str:
    """Say what is proven."""
    return _HOW[proof]


def signature(proof: Proof | None) -> str:
    """Describe a hang in words that are equal for equal hangs."""
    return f"hang: {_HOW[proof]}"


def sentence(hangs: Hangs, ahead: Outlook) -> str:
    """Say why the round is broken."""
    verdict = hangs.verdict
    said = verdict.sentence if verdict is not None else ""
    if ahead.proof is not None:
        subject = f"rank {ahead.rank}" if ahead.rank is not None else "the job"
        return said or f"{subject}: {_HOW[ahead.proof]}"
    standing = hangs.late.get(ahead.rank) if ahead.rank is not None else None
    busy = (
        f" (it was not silent: {life(hangs, standing)})"
        if standing and standing.stall.signs
        else ""
    )
    return "; ".join(filter(None, (said, f"{ahead.reason}{busy}")))


def life(hangs: Hangs, standing: LateRank | None) -> str:
    """Say what of a rank moves."""
    if standing is None:
        return "it makes progress"
    if standing.stall.signs and not standing.is_silent(hangs.terms):
        return f"signs of life: {', '.join(standing.stall.signs)}"
    return f"no sign of life for {standing.stall.still_s:.0f} s"


def line(hangs: Hangs, scene: Scene, now: Time) -> str:
    """Describe the open suspicion in one line."""
    assert hangs.suspicion is not None
    ahead = outlook(hangs, scene)
    for_s = max(0.0, now - hangs.suspicion.since)
    parts = [_who(hangs, ahead.rank, for_s)]
    if ahead.rank is not None:
        count = len(waiting(hangs) - set(suspects(hangs)))
        parts[0] += f", {count} {'rank waits' if count == 1 else 'ranks wait'}"
        parts.append(life(hangs, hangs.late.get(ahead.rank)))
    if ahead.act_at is None:
        parts.append("left alone until it moves on or `holdfast hang` ends it")
    else:
        left_s = max(0.0, ahead.act_at - now)
        parts.append(f"left alone until {ahead.reason}, in {left_s:.0f} s")
    parts.append(f"proven: {_HOW[ahead.proof] if ahead.proof is not None else 'no'}")
    return "; ".join(parts)


def _who(hangs: Hangs, rank: Rank | None, for_s: Seconds) -> str:
    if rank is None:
        places = sorted({s.stall.place for s in hangs.late.values() if s.stall.place})
        where = f" ({', '.join(places[:3])})" if places else ""
        return f"{len(hangs.late)} ranks have made no progress{where} for {for_s:.0f} s"
    verdict = hangs.verdict
    place = hangs.place_of(rank) or (verdict.place if verdict is not None else "")
    return f"rank {rank} has been in {place or 'an unknown place'} for {for_s:.0f} s"


def validate(hangs: Hangs) -> None:
    """Check the invariants."""
    assert all(rank == s.stall.rank for rank, s in hangs.late.items()), "a rank under another name"
    suspicion = hangs.suspicion
    if suspicion is not None:
        assert hangs.late, "a suspicion without a late rank"
        looking = suspicion.asked_at is not None
        assert looking != (suspicion.look_at is not None), "looks and waits to look"
        assert suspicion.proven_at is None or suspicion.verdict is not None, "a proof from nothing"

"""What the job knows of its late ranks, the suspicion that follows from them, and the pauses it has
seen.

A *standing* is one late rank as its agent saw it last. A *suspicion* is open while ranks wait for
others that do not come, or no rank moves; there is at most one at a time. What is *remembered* of
places outlives rounds and requeues: how long they paused and went on by themselves, which were
given more time, and which a person wants left alone.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.events import VerdictReached
from holdfast.messages.hangs import FIRST_STEP, HangTerms, Memory, PlaceMemory, Stall, StallKind
from holdfast.messages.units import NodeId, Rank, Seconds, Time

PLACES_AT_MOST = 256
"""Places that are remembered; the ones that paused for the shortest time are forgotten first."""


class LateRank(Struct, frozen=True):
    """A late rank, as its agent saw it last."""

    node: NodeId
    stall: Stall
    at: Time
    """When the agent saw it."""
    first_step: bool = False
    """Whether its process has not finished a step yet."""

    @property
    def marked_at(self) -> Time:
        """When it reached its last mark; of a stopped rank, when it was first seen stopped."""
        return Time(self.at - self.stall.for_s)

    @property
    def still_since(self) -> Time:
        """When something of it moved last."""
        return Time(self.at - self.stall.still_s)

    def is_silent(self, terms: HangTerms) -> bool:
        """Whether it has shown no sign of life for a while."""
        return self.stall.still_s >= terms.silent_s

    def limit_s(self, terms: HangTerms) -> Seconds | None:
        """Return the user's own limit for what it is in; None without one."""
        name = self.stall.where
        if name in terms.rank_section_timeouts:
            return terms.rank_section_timeouts[name]
        if self.first_step or name == FIRST_STEP:
            return terms.initial_rank_heartbeat_timeout
        if terms.rank_heartbeat_timeout is not None:
            return terms.rank_heartbeat_timeout
        return terms.rank_out_of_section_timeout


class Suspicion(Struct):
    """The job may stand still: since when, and what was found out about it so far."""

    since: Time
    """When the first of the ranks concerned reached its last mark."""
    look_at: Time | None
    """When all ranks are to be examined next; None while an examination is under way."""
    asked_at: Time | None = None
    """When the examination under way was asked for."""
    looks: int = 0
    """Examinations that have ended."""
    examination: int = 0
    """Number of the newest one."""
    verdict: VerdictReached | None = None
    reached_at: Time = Time(0.0)
    proven_at: Time | None = None
    """When the newest verdict's proof was first given, against the same ranks."""
    news: tuple[tuple[Rank, StallKind, bool], ...] = ()
    """How each late rank stood at the last report, and whether it was silent."""
    told: bool = False
    """Whether the people at the terminal know."""


class Hangs(Struct):
    """Late ranks, the suspicion, and what is remembered."""

    terms: HangTerms = HangTerms()
    late: dict[Rank, LateRank] = field(default_factory=dict)
    """Late ranks of the round in force."""
    suspicion: Suspicion | None = None
    spared: list[Rank] = field(default_factory=list)
    """Ranks of the round in force that a person wants left alone."""
    examinations: int = 0
    rest_s: Seconds = 0.0
    """How long no new suspicion is examined after one that came to nothing."""
    rested_at: Time = Time(0.0)
    memory: Memory = field(default_factory=Memory)
    step_s: dict[NodeId, Seconds] = field(default_factory=dict)
    """Median step time of each node."""
    longest_s: dict[str, Seconds] = field(default_factory=dict)
    """Longest completed duration of each section."""

    @property
    def verdict(self) -> VerdictReached | None:
        """The newest verdict on the open suspicion."""
        return self.suspicion.verdict if self.suspicion is not None else None

    def place_of(self, rank: Rank) -> str:
        standing = self.late.get(rank)
        return standing.stall.place if standing is not None else ""


def remembered(hangs: Hangs, place: str) -> PlaceMemory:
    """Return what is known of a place; nothing of one that was never seen to pause."""
    return hangs.memory.places.get(place, PlaceMemory())


def remember(hangs: Hangs, place: str, known: PlaceMemory) -> None:
    """Keep what is known of a place, and forget the least important one if there are too many."""
    if not place:
        return
    places = {**hangs.memory.places, place: known}
    if len(places) > PLACES_AT_MOST:
        del places[min(places, key=lambda name: _weight(places[name]))]
    hangs.memory = Memory(places=places)


def _weight(known: PlaceMemory) -> tuple[bool, Seconds]:
    return known.trusted, max(known.still_s, known.waited_s, known.grant_s)

"""How positions get their requests, lose them, and get others.

`sight` and `end` take in what happened to one position; `plan` compares what is wanted with what
stands, and returns the difference. The first two never make a plan themselves: they note that one is
due, and it is made on the next tick, so that all that happened together is one plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from holdfast.core.supply.reasons import AskAgain, GiveUp, reason_of, relaunch
from holdfast.core.supply.state import Supply, WantedNode
from holdfast.messages.records import Terms
from holdfast.messages.supply import (
    Cordon,
    ExitReason,
    NodeWish,
    PositionStatus,
    RequestId,
    SeenStatus,
    Sighting,
    SupplyPlan,
)
from holdfast.messages.units import NodeId, Seconds, Time

RETURN_S: Final[Seconds] = 30.0
"""How long a node that runs, they say, may be away from the job before it is lost."""
LEAVE_S: Final[Seconds] = 60.0
"""How long a node that was told to leave may take before its request is released."""
PENDING_FLOOR_S: Final[Seconds] = 900.0
PENDING_FACTOR: Final = 3.0

_STEP: Final[dict[PositionStatus | SeenStatus, int]] = {
    "wanted": 0,
    "requested": 1,
    "pending": 2,
    "running": 3,
    "succeeded": 4,
    "failed": 4,
    "deleted": 4,
    "lost": 4,
}
"""Statuses of one attempt only go forward."""


def pending_limit_s(s: Supply) -> Seconds:
    """Return how long a request may stand before it counts as overdue."""
    if s.terms.pending_s is not None:
        return s.terms.pending_s
    return max(PENDING_FLOOR_S, PENDING_FACTOR * s.slowest_s)


def find(s: Supply, request: RequestId) -> WantedNode | None:
    """Find the position of a request that stands; None if it is over or unknown."""
    number = request.partition("-")[0]
    position = s.positions.get(int(number)) if number.isdecimal() else None
    return position if position is not None and position.request == request else None


def note_change(s: Supply, now: Time) -> None:
    """Have a plan made on the next tick."""
    s.due = now if s.due is None else min(s.due, now)


# ---- what happens to a position ------------------------------------------------------------------


def sight(s: Supply, sighting: Sighting, now: Time) -> GiveUp | None:
    """Take in what the platform says of a request; GiveUp if its position is not asked for again."""
    position = find(s, sighting.request)
    if position is None or not position.stands:
        if sighting.status in ("pending", "running") and sighting.request not in s.parting:
            s.to_release[sighting.request] = None  # Nobody wants it, or not any more.
            note_change(s, now)
        return None
    position.host = sighting.host or position.host
    position.detail = sighting.detail or position.detail
    if _STEP[sighting.status] <= _STEP[position.status]:
        return None
    if sighting.status in ("pending", "running"):
        _set(s, position, sighting.status, now)
        return None
    reason = reason_of(sighting, joined=position.joined_at is not None)
    return end(s, position, sighting.status, reason, now)


def missing(s: Supply, sightings: Iterable[Sighting]) -> list[WantedNode]:
    """Return the positions whose requests were seen before, and are not in a whole list."""
    listed = {one.request for one in sightings}
    seen = ("pending", "running")
    return [p for p in s.positions.values() if p.status in seen and p.request not in listed]


def end(
    s: Supply, position: WantedNode, status: PositionStatus, reason: ExitReason, now: Time
) -> GiveUp | None:
    """Note that a position's request is over, and decide whether it gets another."""
    _set(s, position, status, now)
    s.members.pop(position.node, None)
    position.reason = reason
    again = relaunch(position, reason, s.terms, now)
    position.node, position.joined_at, position.away_since = NodeId(""), None, None
    note_change(s, now)
    if isinstance(again, AskAgain):
        position.memory_mib = again.memory_mib or position.memory_mib
        position.not_before = Time(now + again.pause_s) if again.pause_s else None
        s.vacant[position.number] = None
        if again.cordon and position.host:
            s.cordoned[position.host] = f"request {position.request}: {position.detail or reason}"
        return None
    s.given_up[position.number] = _told(position, again)
    return again


def _told(position: WantedNode, gave_up: GiveUp) -> str:
    said = f" ({position.detail})" if position.detail else ""
    return f"request {position.request} ended: {position.reason}{said}; {gave_up.why}"


def release(s: Supply, position: WantedNode, now: Time) -> None:
    """Want a position's request no more; the position stays, without one."""
    s.to_release[position.request] = None
    _set(s, position, "deleted", now)
    s.members.pop(position.node, None)
    position.node, position.joined_at, position.away_since = NodeId(""), None, None


def let_leave(s: Supply, node: NodeId, request: RequestId, now: Time) -> None:
    """Note that a node was told to leave; its request is released once it is gone, or after a while:
    nobody may ever hear of it again."""
    if request in s.parting:  # Its launcher started another agent meanwhile: that is the node now.
        for other in [one for one, name in s.leaving.items() if name == request]:
            del s.leaving[other]
    s.leaving[node] = request
    s.parting[request] = Time(now + LEAVE_S)


def left(s: Supply, node: NodeId) -> None:
    """Release the request of a node that was told to leave, if it was."""
    request = s.leaving.pop(node, None)
    if request is not None:
        del s.parting[request]
        s.to_release[request] = None


def overstaying(s: Supply, now: Time) -> list[NodeId]:
    """Return the nodes that were told to leave, and had all the time that they get."""
    return [node for node, request in s.leaving.items() if s.parting[request] <= now]


def _set(s: Supply, position: WantedNode, status: PositionStatus, now: Time) -> None:
    before = position.stands
    position.status, position.since = status, now
    s.standing += position.stands - before


def fill(s: Supply, position: WantedNode, node: NodeId, host: str, now: Time) -> None:
    """Note that a position's node has joined."""
    if position.status != "running":
        _set(s, position, "running", now)
    if position.joined_at is None:
        position.joined_at = now
        s.slowest_s = max(s.slowest_s, now - position.asked_at)
    s.members.pop(position.node, None)  # Its launcher started another agent: that is the node now.
    position.node, position.host, position.away_since = node, host, None
    position.overdue = False
    s.members[node] = position.number


def others_of_group(s: Supply, position: WantedNode) -> list[WantedNode]:
    """Return the positions that are only provided together with this one, and stand."""
    size = s.terms.group
    if size <= 1:
        return []
    first = position.number - position.number % size
    group = (s.positions.get(number) for number in range(first, first + size))
    return [one for one in group if one is not None and one is not position and one.stands]


# ---- plans ---------------------------------------------------------------------------------------


class Seated(Protocol):
    """A member that may have a seat."""

    seat: int | None


def plan(
    s: Supply,
    wanted: int,
    placed: Mapping[NodeId, Seated],
    avoid: Mapping[str, str],
    now: Time,
) -> tuple[SupplyPlan | None, list[WantedNode]]:
    """Make what stands what is wanted; also return the positions that are released although their
    nodes are members, of which `placed` have a seat in the world.

    None if nothing is to be done.
    """
    s.due = None
    surplus = _take_back(s, wanted, placed, now)
    ask = [_ask(s, number, now) for number in _fillable(s, wanted, now)]
    hosts = {**s.cordoned, **avoid}
    released = tuple(s.to_release)
    s.to_release.clear()
    if not ask and not released and len(hosts) == s.avoided:
        return None, surplus
    s.avoided = len(hosts)
    s.plans += 1
    cordons = tuple(Cordon(host=host, why=why) for host, why in hosts.items())
    return SupplyPlan(number=s.plans, ask=tuple(ask), release=released, avoid=cordons), surplus


def whole_plan(s: Supply, avoid: Mapping[str, str]) -> SupplyPlan:
    """Say all that is wanted, to a supplier that knows nothing."""
    standing = tuple(wish(s, p) for p in s.positions.values() if p.stands)
    hosts = {**s.cordoned, **avoid}
    cordons = tuple(Cordon(host=host, why=why) for host, why in hosts.items())
    return SupplyPlan(number=s.plans, ask=standing, avoid=cordons, whole=True)


def _take_back(
    s: Supply, wanted: int, placed: Mapping[NodeId, Seated], now: Time
) -> list[WantedNode]:
    """Drop positions beyond what is wanted; those that have a member are returned."""
    excess = s.standing + len(s.vacant) - max(0, wanted)
    if excess <= 0:
        return []
    critical = frozenset(s.terms.critical)
    for number in [n for n in reversed(s.vacant) if n not in critical][:excess]:
        del s.vacant[number]
        drop(s, number)
        excess -= 1
    dispensable = [p for p in s.positions.values() if p.stands and p.number not in critical]
    seats = {node: one.seat for node, one in placed.items() if one.seat is not None}
    dispensable.sort(key=lambda p: _attachment(p, seats))
    dropped = []
    for position in dispensable[: max(0, excess)]:
        if position.node:
            let_leave(s, position.node, position.request, now)
            s.members.pop(position.node)
            _set(s, position, "deleted", now)
            dropped.append(position)
        else:
            release(s, position, now)
        drop(s, position.number)
    return dropped


def drop(s: Supply, number: int) -> None:
    """Forget a position; should it be wanted again, its requests have names of their own."""
    s.dropped[number] = s.positions.pop(number).attempt


def _attachment(position: WantedNode, seats: Mapping[NodeId, int]) -> tuple[bool, int, int]:
    """Order positions by what it costs to lose them, the cheapest first."""
    return bool(position.node), -seats.get(position.node, 1 << 40), -position.number


def _fillable(s: Supply, wanted: int, now: Time) -> list[int]:
    """Return the vacant positions that get a request now; new ones are opened as they are needed."""
    number = 0
    for _ in range(wanted - s.standing - len(s.vacant)):
        while number in s.positions or number in s.given_up:
            number += 1
        attempt = s.dropped.pop(number, 0)
        s.positions[number] = WantedNode(number, attempt, since=now)
        s.vacant[number] = None
    due = []
    for number in s.vacant:
        at = s.positions[number].not_before
        if at is None or at <= now:
            due.append(number)
    return due[: max(0, wanted - s.standing)]


def _ask(s: Supply, number: int, now: Time) -> NodeWish:
    position = s.positions[number]
    del s.vacant[number]
    position.attempt += 1
    position.asked_at, position.not_before = now, None
    position.host = position.detail = ""
    position.overdue = False
    _set(s, position, "requested", now)
    return wish(s, position)


def wish(s: Supply, position: WantedNode) -> NodeWish:
    """Write a position's request as the platform is asked for it."""
    size = max(1, s.terms.group)
    return NodeWish(
        id=position.request,
        position=position.number,
        attempt=position.attempt,
        memory_mib=position.memory_mib or s.terms.memory_mib,
        seen=position.status != "requested",
        group=position.number // size,
        priority=_priority(s, position.number),
    )


def _priority(s: Supply, number: int) -> str:
    """Return a position's priority: the platform's name for it, or high for a share of them."""
    said = s.terms.priority
    try:
        share = float(said)
    except ValueError:
        return said
    return "high" if number < share * len(s.positions) else "low"


# ---- what is possible ----------------------------------------------------------------------------


def refusal(terms: Terms, fewest: int, most: int) -> str:
    """Say why a job cannot have these numbers of nodes; empty if it can."""
    if not 1 <= fewest <= most:
        return f"{fewest}:{most}: at least 1 node is needed, and no more at least than at most"
    unit = math.lcm(terms.node_unit, terms.segment)
    if most // unit * unit < fewest:
        return f"no number of nodes from {fewest} to {most} is a multiple of {unit} (--node-unit)"
    return ""


# ---- invariants ----------------------------------------------------------------------------------


def validate(s: Supply) -> None:
    """Assert every invariant."""
    stand = [p for p in s.positions.values() if p.stands]
    assert s.standing == len(stand), "miscounted requests"
    assert all(not s.positions[number].stands for number in s.vacant), "a vacancy has a request"
    assert not s.vacant.keys() & s.given_up.keys(), "a position that was given up is to be filled"
    for node, number in s.members.items():
        assert s.positions[number].node == node, "a member fills another position"
        assert s.positions[number].stands, "a member fills a position whose request is over"
    for position in stand:
        assert not position.node or s.members.get(position.node) == position.number
    assert not {p.request for p in stand} & s.to_release.keys(), "what is wanted is released"
    assert set(s.leaving.values()) == s.parting.keys(), "a leaving node has no time limit"

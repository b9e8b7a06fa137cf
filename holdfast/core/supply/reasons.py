"""Why a request is over, and whether its position is asked for again.

The platform's own word comes first (a pod that was evicted, a job that was preempted), else the exit
code of the node's launcher says it. See the table in `docs/supply.md`.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from holdfast.core.supply.state import WantedNode
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE, EXIT_TRY_AGAIN, EXIT_USAGE
from holdfast.messages.supply import ExitReason, Sighting, SupplyTerms
from holdfast.messages.units import Seconds, Time

_BY_CODE: Final[dict[int, ExitReason]] = {
    0: "finished",
    EXIT_USAGE: "fatal",
    14: "hardware",
    EXIT_TRY_AGAIN: "preempted",
    EXIT_DO_NOT_REQUEUE: "fatal",
    126: "fatal",
    127: "fatal",
    137: "killed",
    143: "killed",
    201: "hardware",
    202: "hardware",
    247: "oom",
}
_FATAL_AT_START: Final = frozenset({1, 134})
"""Exit codes of a launcher that could not even begin; later, something of the node ended it."""

UNSPENT: Final[frozenset[ExitReason]] = frozenset({"preempted", "evicted", "excluded"})
"""What says nothing about the node: neither budget nor pauses count it."""
UNCOUNTED: Final[frozenset[ExitReason]] = UNSPENT | {"killed", "deleted", "lost"}
"""What is relaunched however often, after growing pauses."""

HEALTHY_S: Final[Seconds] = 600.0
"""A node that was in the job for so long has its budget back."""
FREE_ENDS: Final = 2
"""Ends in a row after which the next relaunch waits."""
PAUSE_S: Final[Seconds] = 1.0
PAUSE_MOST_S: Final[Seconds] = 60.0


class AskAgain(Struct, frozen=True):
    """Fill the position with another request."""

    pause_s: Seconds = 0.0
    memory_mib: int = 0
    """0: as before."""
    cordon: bool = False
    """Whether its host is to be avoided."""


class GiveUp(Struct, frozen=True):
    """Do not ask for the position again."""

    why: str
    for_good: bool = True
    """Whether the same would happen again if the job were queued anew."""


Relaunch = AskAgain | GiveUp


def reason_of(sighting: Sighting, joined: bool) -> ExitReason:
    """Say why a request is over; `joined` if its node ever was a member."""
    if sighting.reason is not None:
        return sighting.reason
    if sighting.code is None:
        return "deleted" if sighting.status == "deleted" else "unknown"
    if sighting.code in _FATAL_AT_START and not joined:
        return "fatal"
    return _BY_CODE.get(sighting.code, "unknown")


def relaunch(position: WantedNode, reason: ExitReason, terms: SupplyTerms, now: Time) -> Relaunch:
    """Decide about a position whose request is over, and count it."""
    lived_s = now - position.joined_at if position.joined_at is not None else 0.0
    if lived_s >= HEALTHY_S:
        position.spent = position.ends = 0
    position.ends = position.ends if reason in UNSPENT else position.ends + 1
    if reason == "fatal":
        return GiveUp("it would fail again")
    if reason not in UNCOUNTED:
        if position.spent >= terms.relaunches:
            return GiveUp(f"{terms.relaunches} relaunches allowed and used", for_good=False)
        position.spent += 1
    memory_mib = 0
    if reason == "oom":
        memory_mib = more_memory(position, terms)
        if not memory_mib:
            return GiveUp(_memory_spent(position, terms))
    pause_s = 0.0
    if position.ends > FREE_ENDS:
        pause_s = min(PAUSE_MOST_S, PAUSE_S * 2.0 ** min(position.ends - FREE_ENDS - 1, 16))
    return AskAgain(pause_s, memory_mib, cordon=reason == "hardware")


def more_memory(position: WantedNode, terms: SupplyTerms) -> int:
    """Return twice the memory that the position has, within the limit; 0 if it has all of that."""
    has = position.memory_mib or terms.memory_mib
    if has == 0:  # The platform's own setting: nobody here knows what twice of it is.
        return 0
    return min(2 * has, terms.memory_limit_mib) if has < terms.memory_limit_mib else 0


def _memory_spent(position: WantedNode, terms: SupplyTerms) -> str:
    has = position.memory_mib or terms.memory_mib
    if has == 0:
        return "its memory ran out; say with --memory how much it has, so that it can be raised"
    return f"its memory ran out at {has} MiB, and --memory-limit allows {terms.memory_limit_mib}"

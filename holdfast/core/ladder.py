"""The ladder: the kinds of repair, cheapest first.

    re-enter the function   the same processes; all leave the user's function and enter it again
    standby                 the same nodes; warm processes take the ranks
    spare                   a node that waits takes the place of a lost one
    fewer nodes             the world shrinks to the nodes that are left
    ask the platform        whoever started the nodes is asked for another
    await nodes             nobody can be asked: the job waits for nodes to join, within its join limit
    stop                    the same failure would only repeat, or the user set a limit

`cheapest` picks the lowest rung that can repair a fault with what is there. That the same failure moves
up and never loops is for `core.recovery.rules` to see to, which alone decides on the last rung. What is
asked of a platform, and when, is for `core.supply`: a job that goes on with fewer nodes asks for more
all the same.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.core.faults import Fault

RungName = Literal[
    "re-enter the function",
    "standby",
    "spare",
    "fewer nodes",
    "ask the platform",
    "await nodes",
    "stop",
]


class Resources(Struct, frozen=True, kw_only=True):
    """What there is to repair a round with, once all its workers are gone."""

    seats: int
    """Nodes that the broken world had."""
    survivors: int
    """Nodes of that world that are still members."""
    formable: int
    """Nodes of the largest world that all members could form."""
    needed: int
    """The fewest nodes the job may train with."""
    ranks: int = 0
    """Ranks that the broken world had."""
    parked: int = 0
    """Processes that wait to enter their function again."""
    platform: bool = False
    """Whether there is a platform that can be asked for nodes."""


class Again(Struct, frozen=True):
    """Try again in a new round, on this rung."""

    rung: RungName


class Stop(Struct, frozen=True):
    """Give up, with the launcher's exit code and the reason."""

    code: int
    reason: str
    rung: RungName = "stop"


Rung = Again | Stop

DONE: dict[RungName, str] = {
    "re-enter the function": "left the function on all ranks and entered it again",
    "standby": "gave the ranks to standbys",
    "spare": "gave the ranks to standbys; a spare took the lost node's place",
    "fewer nodes": "gave the ranks to standbys on fewer nodes",
    "ask the platform": "asked the platform for nodes, then gave the ranks to standbys",
    "await nodes": "waited for nodes to join, then gave the ranks to standbys",
}
"""What an incident says was done."""


def done(rung: RungName, there: Resources) -> str:
    """Say what was done about a fault."""
    said = DONE[rung]
    if there.parked and rung != "re-enter the function":
        stay = "1 rank entered its" if there.parked == 1 else f"{there.parked} ranks entered their"
        said += f"; {stay} function again"
    return said


def cheapest(fault: Fault, there: Resources) -> Again:
    """Climb from the bottom to the first rung that can repair the fault."""
    if there.formable < there.needed:
        return Again("ask the platform" if there.platform else "await nodes")
    if there.survivors < there.seats:
        return Again("spare" if there.formable >= there.seats else "fewer nodes")
    if 0 < there.ranks <= there.parked:
        return Again("re-enter the function")
    return Again("standby")

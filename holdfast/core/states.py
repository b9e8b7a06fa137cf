"""The states of a job, as types that carry their own data.

                 a world is frozen            a fault
    Gathering ──────────────────────▶ Running ───────▶ Stopping
        ▲                                │                │  every node is ready: the fault is judged
        └────────────────────────────────┼────────────────┤
                                         ▼                ▼
                                       Ending ◀───────────┘  the last node is gone ──▶ Ended

Any state but the last two may also pass to Ending: the job finished, gave up, or was told to stop.
A job that is over passes to Gathering when its platform starts it again.
A world exists only while running; a culprit only while stopping; a result only at the end.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from holdfast.core.faults import Fault
from holdfast.messages.records import JobResult, World
from holdfast.messages.units import Time

StateName = Literal["gathering", "running", "stopping", "ending", "ended"]


class Gathering(Struct, tag="gathering"):
    """Too few nodes are ready for a round, or the next is about to be frozen."""

    name: ClassVar[StateName] = "gathering"
    short_until: Time | None = None
    """While there are fewer nodes than the minimum: when the job gives up waiting."""


class Running(Struct, frozen=True, tag="running"):
    """A world is in force."""

    name: ClassVar[StateName] = "running"
    world: World


class Stopping(Struct, frozen=True, tag="stopping"):
    """The round is broken, and its workers are being stopped."""

    name: ClassVar[StateName] = "stopping"
    fault: Fault
    """The likeliest culprit so far."""


class Ending(Struct, frozen=True, tag="ending"):
    """Every node was told to finish."""

    name: ClassVar[StateName] = "ending"
    result: JobResult


class Ended(Struct, frozen=True, tag="ended"):
    """The last node is gone."""

    name: ClassVar[StateName] = "ended"
    result: JobResult


AnyState = Gathering | Running | Stopping | Ending | Ended

LIVE = (Gathering, Running, Stopping)
OVER = (Ending, Ended)
ALWAYS = (*LIVE, *OVER)

FOLLOWS: dict[type, tuple[type, ...]] = {
    Gathering: (Running, Stopping, Ending),
    Running: (Stopping, Ending),
    Stopping: (Gathering, Ending, Stopping),
    Ending: (Ended, Gathering),
    Ended: (Gathering,),
}
"""Which states a state may pass to. A node that knows a round which the journal lost takes a job from
Gathering to Stopping; Stopping follows itself when another culprit is found."""

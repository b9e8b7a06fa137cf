"""Which nodes are wanted of the platform, and what was last seen of each."""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.supply import (
    STANDING,
    ExitReason,
    PositionStatus,
    RequestId,
    SupplyTerms,
)
from holdfast.messages.units import NodeId, Seconds, Time


class WantedNode(Struct):
    """One of the nodes that the job wants; it outlives the nodes that fill it."""

    number: int
    attempt: int = 0
    status: PositionStatus = "wanted"
    since: Time = Time(0.0)
    """When the status became so."""
    asked_at: Time = Time(0.0)
    """When this attempt was asked for."""
    node: NodeId = NodeId("")
    """The member that fills it; empty while there is none."""
    joined_at: Time | None = None
    """When its node first joined in this attempt."""
    away_since: Time | None = None
    """While its node runs and is no member any more."""
    host: str = ""
    memory_mib: int = 0
    """0: as the platform's own settings say."""
    spent: int = 0
    """Relaunches that count against its budget."""
    ends: int = 0
    """How often in a row it ended soon, whatever the reason."""
    not_before: Time | None = None
    """When it may be asked for again; None for at once."""
    reason: ExitReason | None = None
    """Why its last attempt ended."""
    detail: str = ""
    """The platform's own words on it."""
    overdue: bool = False
    """Whether it was reported that it is pending for too long."""

    @property
    def request(self) -> RequestId:
        return f"{self.number}-{self.attempt}"

    @property
    def stands(self) -> bool:
        """Whether its request is not over."""
        return self.status in STANDING


class Supply(Struct):
    """What a job wants of its platform."""

    terms: SupplyTerms
    platform: str = ""
    """Empty while no supplier ever came: then nobody can be asked."""
    together: bool = False
    """Whether a node of the platform that is told to leave speaks for all of them."""
    connected: bool = False
    plans: int = 0
    """Number of the newest plan."""
    due: Time | None = None
    """Since when something has changed that the next plan has to take into account."""
    positions: dict[int, WantedNode] = field(default_factory=dict)
    vacant: dict[int, None] = field(default_factory=dict)
    """Positions without a request that are to get one, in the order in which they lost theirs."""
    standing: int = 0
    """Positions whose request is not over."""
    members: dict[NodeId, int] = field(default_factory=dict)
    """Positions by the member that fills them."""
    by_hand: dict[NodeId, None] = field(default_factory=dict)
    """Members that the platform was not asked for."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Last attempts of positions that are not wanted now: a request's name is used once."""
    given_up: dict[int, str] = field(default_factory=dict)
    """Positions that are not asked for again, and why."""
    leaving: dict[NodeId, RequestId] = field(default_factory=dict)
    """Nodes that were told to leave: their requests are released once they are gone."""
    parting: dict[RequestId, Time] = field(default_factory=dict)
    """Requests of nodes that were told to leave, and when each is released in any case."""
    to_release: dict[RequestId, None] = field(default_factory=dict)
    """Requests that the next plan releases."""
    cordoned: dict[str, str] = field(default_factory=dict)
    """Hosts that the platform's word is against, and why; `Membership.excluded` has the job's own."""
    avoided: int = 0
    """How many hosts the newest plan named."""
    look_at: Time | None = None
    """When to look next for what takes too long; it may be earlier than need be, never later."""
    at_least: bool = False
    """Whether only the minimum is asked for, because more did not come."""
    short_since: Time | None = None
    """Since when there are too few nodes to train, with requests that do not come."""
    slowest_s: Seconds = 0.0
    """Longest time from asking for a node until it joined."""
    refusal: str = ""
    """Why the platform takes no requests at the moment; empty if it does."""

    @property
    def active(self) -> bool:
        """Whether there is a platform that can be asked."""
        return bool(self.platform)
